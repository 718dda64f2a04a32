// Which calls of delta_rule get what kernel on a GPU: a pure function of the parameters.
#pragma once

#include "operations/delta_rule/params.hpp"

namespace rapt::cuda {

// Whether delta_rule_decode can copy states as wholes: each lies in one piece, at a multiple of 16 bytes, and both have
// one type and one order of dimensions.
bool can_copy_states(const DeltaRuleParams& params);

// Whether delta_rule_prefill has a kernel for the types of q, k and v, and counts states and tokens in 32 bits.
bool can_multiply_chunks(const DeltaRuleParams& params);

}  // namespace rapt::cuda
