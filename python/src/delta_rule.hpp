// The delta rule and its gradients as Python gives them.
#pragma once

#include <nanobind/nanobind.h>

namespace rapt::python {
namespace nb = nanobind;

/// What rapt.delta_rule and its gradients are given alike, in the order of _delta_rule.py's _INPUTS.
struct DeltaRuleInputs {
  nb::handle q, k, v, g, beta, rule, scale, initial_state, cu_seqlens, l2norm_qk, beta_sigmoid, beta_double, gate,
      a_log, dt_bias, gate_lower_bound, state_v_first, threads, isa;
};

/// What rapt.delta_rule writes; final_state may be None. And where states in pools lie.
struct DeltaRuleResults {
  nb::handle out, final_state, state_slots, accepted;
};
/// rapt.delta_rule. Without the GIL where it works.
void delta_rule(const DeltaRuleInputs& inputs, const DeltaRuleResults& results);

/// The gradients of the results, and the arrays to write those of the inputs to; any may be None.
struct DeltaRuleGradients {
  nb::handle dout, dfinal_state, dq, dk, dv, dg, dbeta, dinitial_state, da_log, ddt_bias;
};
/// rapt.delta_rule_backward. Without the GIL where it works.
void delta_rule_backward(const DeltaRuleInputs& inputs, const DeltaRuleGradients& gradients);

}  // namespace rapt::python
