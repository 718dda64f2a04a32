#pragma once

#include "operations/delta_rule/operation.hpp"
#include "operations/operation.hpp"
#include "rapt/delta_rule_backward.hpp"

namespace rapt {

template <>
struct OperationOf<DeltaRuleBackwardArgs> {
  using Args = DeltaRuleBackwardArgs;
  using C = rapt_delta_rule_backward_args;
  using Forward = DeltaRuleArgs;
  static constexpr Operation kForward = Operation::delta_rule;
  static constexpr auto& feature_names = DeltaRuleFeatures::names;

  static void refuse_states(const void* args, Bound& bound);

  static constexpr ArgumentTable arguments{
      step(refuse_states),
      of_forward(delta_rule_inputs<Args, &Args::forward>()),
      read<&C::dout, &Args::dout>("dout", kFloatTypes, kTokens + "h_out dv").optional(),
      of_forward(delta_rule_states<&Args::forward>()),
      read<&C::dfinal_state, &Args::dfinal_state>("dfinal_state", kStateTypes, kStates).optional(),
      written<&rapt_delta_rule_args::out, &Args::forward, &DeltaRuleArgs::out>("out", kFloatTypes, kTokens + "h_out dv")
          .of_forward()
          .unchecked(),
      written<&rapt_delta_rule_args::final_state, &Args::forward, &DeltaRuleArgs::final_state>("final_state",
                                                                                               kStateTypes, kStates)
          .of_forward()
          .unchecked(),
      gradient<&C::dq, &Args::dq>("dq", kFloatTypes, "q"),
      gradient<&C::dk, &Args::dk>("dk", kFloatTypes, "k"),
      gradient<&C::dv, &Args::dv>("dv", kFloatTypes, "v"),
      gradient<&C::dbeta, &Args::dbeta>("dbeta", kFloatTypes, "beta"),
      gradient<&C::dg, &Args::dg>("dg", kFloatTypes, "g"),
      gradient<&C::dinitial_state, &Args::dinitial_state>("dinitial_state", kStateTypes, "initial_state"),
      gradient<&C::da_log, &Args::da_log>("da_log", kF32, "a_log"),
      gradient<&C::ddt_bias, &Args::ddt_bias>("ddt_bias", kF32, "dt_bias"),
  };
  static unsigned features(const Args& args) { return DeltaRuleFeatures::of(args.forward); }
  static Call bind(const Args& args, Bound& bound);
  // c.forward has been read as far as it is known.
  static void set_scalars(const C& c, Args& args) { OperationOf<DeltaRuleArgs>::set_scalars(*c.forward, args.forward); }
};

}  // namespace rapt
