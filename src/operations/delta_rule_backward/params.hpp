// What delta_rule_backward's kernels get: plain data, filled once, by validate().
#pragma once

#include "operations/delta_rule/params.hpp"

namespace rapt {

// A gradient of each head, or of each channel of it, that is summed over tokens. Null: not wanted.
struct HeadGradient {
  void* data;
  DType type;
  std::int64_t stride_h, stride_d;

  RAPT_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// The forward's parameters, whose `out` is dout and whose `final` dfinal_state. Gradients that are not wanted are null.
struct DeltaRuleBackwardParams : DeltaRuleParams {
  TokenRows grad_q, grad_k, grad_v, grad_g, grad_beta;
  StateRows grad_initial;
  HeadGradient grad_constant_g, grad_a_log, grad_dt_bias;
};

}  // namespace rapt
