// The kernels of merge_states that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/merge_states/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
extern const MergeStatesKernel kMergeStates;
#endif

[[gnu::always_inline]] constexpr MergeStatesKernels merge_states_kernels() {
  return {
#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
    &kMergeStates
#endif
  };
}

}  // namespace rapt::cpu::RAPT_ISA
