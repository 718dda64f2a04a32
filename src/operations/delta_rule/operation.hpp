#pragma once

#include <vector>

#include "operations/delta_rule/inputs.hpp"
#include "operations/operation.hpp"
#include "rapt/delta_rule.hpp"

namespace rapt {

template <>
struct OperationOf<DeltaRuleArgs> {
  using Args = DeltaRuleArgs;
  using C = rapt_delta_rule_args;
  static constexpr auto& feature_names = DeltaRuleFeatures::names;

  static constexpr ArgumentTable arguments{
      delta_rule_inputs<Args>(),
      written<&C::out, &Args::out>("out", kFloatTypes, kTokens + "h_out dv"),
      // The initial state follows: where both are the same memory, the final one is named.
      written<&C::final_state, &Args::final_state>("final_state", kStateTypes, kStates).optional(),
      delta_rule_states<>(),
  };
  static unsigned features(const Args& args) { return DeltaRuleFeatures::of(args); }
  static Device device(const Args& args) { return args.q.device; }
  static Call bind(const Args& args, Bound& bound);
  static std::vector<Problem> corners(const DeltaRuleProblem& largest);
  static void set_scalars(const C& c, Args& args);
};

}  // namespace rapt
