// The kernels of delta_rule_backward that this ISA has.
#pragma once

#include "cpu/kernels/vector_table.hpp"
#include "operations/delta_rule_backward/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

extern const DeltaRuleBackwardKernel kDeltaRuleBackward;
inline constexpr auto delta_rule_backward_kernels = vector_table<DeltaRuleBackwardKernels, kDeltaRuleBackward>;

}  // namespace rapt::cpu::RAPT_ISA
