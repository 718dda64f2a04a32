// The delta rule as Python gives it.
#pragma once

#include <nanobind/nanobind.h>

namespace rapt::python {
namespace nb = nanobind;

/// The arguments of rapt.delta_rule, in its order, with the arrays that are written: final_state may be None.
struct DeltaRuleArguments {
  nb::handle q, k, v, g, beta, rule, scale, initial_state, final_state, cu_seqlens, state_slots, accepted, l2norm_qk,
      beta_sigmoid, beta_double, gate, a_log, dt_bias, gate_lower_bound, state_v_first, out, threads, isa;
};

/// rapt.delta_rule. Without the GIL where it works.
void delta_rule(const DeltaRuleArguments& arguments);

}  // namespace rapt::python
