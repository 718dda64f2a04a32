// The kernels of delta_rule that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/delta_rule/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

#if !defined(RAPT_HAVE_DOTS)
extern const DeltaRuleKernel kDeltaRule;
#endif
#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
extern const DeltaRuleKernel kDeltaRuleDecode;
#endif
#if defined(RAPT_HAVE_REFERENCES)
extern const DeltaRuleKernel kDeltaRuleNaive;
#endif

[[gnu::always_inline]] constexpr DeltaRuleKernels delta_rule_kernels() {
  return {
#if !defined(RAPT_HAVE_TILES) && !defined(RAPT_HAVE_DOTS)
    .decode = &kDeltaRuleDecode,
#endif
#if !defined(RAPT_HAVE_DOTS)
    .prefill = &kDeltaRule,
#endif
#if defined(RAPT_HAVE_REFERENCES)
    .naive = &kDeltaRuleNaive,
#endif
  };
}

}  // namespace rapt::cpu::RAPT_ISA
