// The table of an operation with one kernel, which ISAs of vectors have.
#pragma once

#include "cpu/isa/isa.hpp"

namespace rapt::cpu::RAPT_ISA {

template <class Kernels, const auto& kKernel>
[[gnu::always_inline]] constexpr Kernels vector_table() {
#if defined(RAPT_HAVE_TILES) || defined(RAPT_HAVE_DOTS)
  return {};
#else
  return {&kKernel};
#endif
}

}  // namespace rapt::cpu::RAPT_ISA
