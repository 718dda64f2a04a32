// Gradients of delta_rule().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/delta_rule.hpp"

namespace rapt {

/// What the forward call had, the gradients of its results, and where those of its inputs go. Every gradient that is
/// written has the shape of what it is the gradient of, and overlaps nothing; those left empty are not written.
struct DeltaRuleBackwardArgs {
  /// The forward's. out and final_state are not looked at; initial_state is as it was before the call, and pools of
  /// states (state_slots) have no gradients.
  DeltaRuleArgs forward{};
  TensorView dout{};          ///< f32, bf16 or f16, of out's shape; any strides. Empty: 0
  TensorView dfinal_state{};  ///< f32 or bf16, of final_state's shape; empty: 0
  /// f32, bf16 or f16, each by itself.
  MutableTensorView dq{}, dk{}, dv{}, dg{}, dbeta{};
  MutableTensorView dinitial_state{};      ///< f32 or bf16
  MutableTensorView da_log{}, ddt_bias{};  ///< f32; sums over all tokens, as is the gradient of a g of [h]
};

/// Gradients of sum(dout * out) + sum(dfinal_state * final_state), of the inputs as they were given: through norms,
/// gates and sigmoid where the forward does them. States are computed again, from one in every 24 tokens, which the
/// workspace keeps. Sums are fp32 (those over all tokens fp64) whatever the types, and every gradient is rounded once.
///
/// Bits do not depend on threads or on the other sequences of a batch, but for the sums over them. NaN and infinities
/// stay within their sequence, and within state heads that share heads of q, k or v. Throws Error before anything is
/// written. Reentrant. `workspace` as for attention(). docs/contract.md has the bounds.
/// FLOPs (cost.hpp): S^T k and k u^T, for the states again, and q dout^T, S dout, G^T k, G u, S du and k du^T, with G
/// the gradient of S.
RAPT_API void delta_rule_backward(const DeltaRuleBackwardArgs& args, const Context& context = default_context(),
                                  std::span<std::byte> workspace = {});

/// What dispatch and planning see of a delta_rule_backward call: the forward's problem, with `out_dtype` that of dout,
/// and `state` set where a state or its gradient is given. Text form: "delta_rule_backward", and the forward's words.
///
///     delta_rule_backward decay=channel b=1 hq=8 t=1024 d=128 beta
struct DeltaRuleBackwardProblem : DeltaRuleProblem {
  friend bool operator==(const DeltaRuleBackwardProblem&, const DeltaRuleBackwardProblem&) = default;

  /// As DeltaRuleProblem::parse().
  RAPT_API static DeltaRuleBackwardProblem parse(std::string_view text);
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static DeltaRuleBackwardProblem of(const DeltaRuleBackwardArgs& args);
};

}  // namespace rapt
