// Gradients of delta_rule().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/delta_rule.hpp"

namespace rapt {

/// Arguments of delta_rule_backward(): the forward's inputs, the gradients of its results, and the gradients to write.
/// Each gradient that is written has the shape of its input and overlaps no other tensor. Empty gradients are not
/// written.
struct DeltaRuleBackwardArgs {
  /// The forward's arguments. out and final_state are ignored. initial_state holds the values from before the forward
  /// call. Pools of states (state_slots) have no gradients.
  DeltaRuleArgs forward{};
  TensorView dout{};          ///< f32, bf16 or f16, of out's shape, with any strides; default 0
  TensorView dfinal_state{};  ///< f32 or bf16, of final_state's shape; default 0
  /// f32, bf16 or f16, each independently.
  MutableTensorView dq{}, dk{}, dv{}, dg{}, dbeta{};
  MutableTensorView dinitial_state{};      ///< f32 or bf16
  MutableTensorView da_log{}, ddt_bias{};  ///< f32; sums over all tokens, like the gradient of a g of [h]
};

/// Gradients of sum(dout * out) + sum(dfinal_state * final_state) with respect to the inputs as given: through norms,
/// gates and sigmoid if the forward has them. The call recomputes the states from one state per 24 tokens, which the
/// workspace keeps. Sums are fp32 (over all tokens fp64) for all types, and every gradient is rounded once.
///
/// The bits do not depend on threads or on the other sequences of a batch, except for sums over sequences. NaN and Inf
/// stay within their sequence, and within state heads that share heads of q, k or v. Throws Error before anything is
/// written. Reentrant. `workspace` as for attention(). docs/contract.md states the bounds.
///
/// FLOPs (cost.hpp): S^T k and k u^T, for the states again, and q dout^T, S dout, G^T k, G u, S du and k du^T, with G
/// the gradient of S.
RAPT_API void delta_rule_backward(const DeltaRuleBackwardArgs& args, const Context& context = default_context(),
                                  std::span<std::byte> workspace = {});

/// The problem of a delta_rule_backward call: the forward's problem. `out_dtype` is the type of dout, and `state` is
/// set if a state or its gradient is given. Text form: "delta_rule_backward", then the forward's words.
///
///     delta_rule_backward decay=channel b=1 hq=8 t=1024 d=128 beta
struct DeltaRuleBackwardProblem : DeltaRuleProblem {
  friend bool operator==(const DeltaRuleBackwardProblem&, const DeltaRuleBackwardProblem&) = default;

  /// Reads the text form, as DeltaRuleProblem::parse() does.
  RAPT_API static DeltaRuleBackwardProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static DeltaRuleBackwardProblem of(const DeltaRuleBackwardArgs& args);
};

}  // namespace rapt
