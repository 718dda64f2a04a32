// The kernels of append_kv that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/append_kv/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
extern const AppendKvKernel kAppendKv;
#endif

[[gnu::always_inline]] constexpr AppendKvKernels append_kv_kernels() {
  return {
#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
    &kAppendKv
#endif
  };
}

}  // namespace rapt::cpu::RAPT_ISA
