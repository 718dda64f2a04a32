// What delta_rule and its gradients share: the inputs' rows and what they become, and the fields of problems' text.
#pragma once

#include <array>
#include <span>

#include "core/fields.hpp"
#include "operations/arguments.hpp"
#include "operations/bound.hpp"
#include "operations/delta_rule/params.hpp"
#include "rapt/delta_rule.hpp"

namespace rapt {

struct DeltaRuleFeatures {
  enum : unsigned {
    dense = 1,
    ragged = 2,
    decays = 4,
    predicts = 8,
    gate = 16,
    slots = 32,
    steps = 64,  // slots for the state after each token
    beta_used = 128,
    constant_g = 256,
    channel_g = 512,
  };
  static constexpr const char* names[] = {
      "no cu_seqlens", "cu_seqlens",  "a gated rule",       "a rule with a delta",
      "gate",          "state_slots", "state_slots [b, n]", "beta_sigmoid or beta_double"};
  static unsigned of(const DeltaRuleArgs& args);
};

// Whether the state's old value for a key is subtracted from the new one.
inline bool has_delta(UpdateRule rule) {
  return rule == UpdateRule::delta || rule == UpdateRule::gated_delta;
}

// [b, t, ...], or ragged [total, ...].
inline constexpr Shapes kTokens = Shapes("b t").when(DeltaRuleFeatures::ragged, "total");
inline constexpr Shapes kStates = Shapes("b h d dv").when(DeltaRuleFeatures::slots, "slots h d dv");

// A step: t of ragged tensors, h = max(hk, hv), and h_out = max(hq, h) from sizes that are in order.
void derive_delta_rule_sizes(const DeltaRuleArgs& args, Bound& bound);

// kPath: the member of Args that is a DeltaRuleArgs; none if Args is.
template <class Args, auto... kPath>
constexpr std::array<Argument, 9> delta_rule_inputs() {
  using C = rapt_delta_rule_args;
  using F = DeltaRuleArgs;
  using Features = DeltaRuleFeatures;
  return {
      read<&C::q, kPath..., &F::q>("q", kFloatTypes, kTokens + "hq d"),
      read<&C::k, kPath..., &F::k>("k", kFloatTypes, kTokens + "hk d"),
      read<&C::v, kPath..., &F::v>("v", kFloatTypes, kTokens + "hv dv"),
      read<&C::cu_seqlens, kPath..., &F::cu_seqlens>("cu_seqlens", kIntegers, "b+1").optional(),
      step([](const void* args, Bound& bound) {
        derive_delta_rule_sizes(detail::member<kPath...>(*static_cast<const Args*>(args)), bound);
      }),
      read<&C::g, kPath..., &F::g>("g", kFloatTypes,
                                   Shapes("b t h")
                                       .when(Features::constant_g, "h")
                                       .when(Features::ragged | Features::channel_g, "total h d")
                                       .when(Features::ragged, "total h")
                                       .when(Features::channel_g, "b t h d"))
          .in(Features::decays)
          .needed(Features::gate),
      read<&C::a_log, kPath..., &F::a_log>("a_log", kF32, "h").in(Features::gate),
      read<&C::dt_bias, kPath..., &F::dt_bias>("dt_bias", kF32, Shapes("h").when(Features::channel_g, "h d"))
          .in(Features::gate),
      read<&C::beta, kPath..., &F::beta>("beta", kFloatTypes, kTokens + "h")
          .in(Features::predicts)
          .needed(Features::beta_used),
  };
}
template <auto... kPath>
constexpr std::array<Argument, 3> delta_rule_states() {
  using C = rapt_delta_rule_args;
  using F = DeltaRuleArgs;
  using Features = DeltaRuleFeatures;
  return {
      read<&C::initial_state, kPath..., &F::initial_state>("initial_state", kStateTypes, kStates).optional(),
      read<&C::state_slots, kPath..., &F::state_slots>("state_slots", kIntegers,
                                                       Shapes("b").when(Features::steps, "b n"))
          .optional(),
      read<&C::accepted, kPath..., &F::accepted>("accepted", kIntegers, "b").in(Features::steps),
  };
}

// The problem, and the parameters of the inputs and of `out` and `final`: the results, or their gradients. These may be
// empty.
DeltaRuleProblem bind_delta_rule(const DeltaRuleArgs& args, const TensorView& out, const TensorView& final,
                                 const Bound& bound, DeltaRuleParams& params);

// The rows of [b, t, h], [b, t, h, d] or, ragged, [total, h] and [total, h, d]; and states. Empty tensors: null.
TokenRows token_rows(const TensorView& t, bool ragged);
StateRows state_rows(const TensorView& t);

// The fields of a problem's text, and what they leave open.
std::span<const Field<DeltaRuleProblem>> delta_rule_fields();
void complete(const Words& words, DeltaRuleProblem& problem);

}  // namespace rapt
