// The kernels of select_topk that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/select_topk/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
extern const SelectTopkKernel kSelectTopk;
#endif

[[gnu::always_inline]] constexpr SelectTopkKernels select_topk_kernels() {
  return {
#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
    &kSelectTopk
#endif
  };
}

}  // namespace rapt::cpu::RAPT_ISA
