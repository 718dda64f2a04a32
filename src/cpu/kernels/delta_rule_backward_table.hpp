// The kernels of delta_rule_backward that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/delta_rule_backward/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
extern const DeltaRuleBackwardKernel kDeltaRuleBackward;
#endif

[[gnu::always_inline]] constexpr DeltaRuleBackwardKernels delta_rule_backward_kernels() {
  return {
#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
    &kDeltaRuleBackward
#endif
  };
}

}  // namespace rapt::cpu::RAPT_ISA
