// Linear attention with a state of fixed size: the delta rule and its relatives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "rapt/context.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// Everything but q, k, v and out is optional; h is the number of state heads, max(hk, hv).
struct DeltaRuleArgs {
  TensorView q{};                   ///< f32, bf16 or f16 [b, t, hq, d], or ragged [total, hq, d]; d from 1 to 256
  TensorView k{};                   ///< f32, bf16 or f16 [b, t, hk, d]
  TensorView v{};                   ///< f32, bf16 or f16 [b, t, hv, dv]; dv from 1 to 256
  TensorView g{};                   ///< log decay, f32, bf16 or f16: [h], [b, t, h] or [b, t, h, d]; empty: none
  TensorView beta{};                ///< f32, bf16 or f16 [b, t, h], of rules with a delta; empty: 1
  MutableTensorView out{};          ///< f32, bf16 or f16 [b, t, max(hq, h), dv]
  TensorView initial_state{};       ///< f32 or bf16 [b, h, d, dv]; empty: 0. Other layouts by their strides
  MutableTensorView final_state{};  ///< likewise, of either type; it may be initial_state itself, updated in place then
  TensorView cu_seqlens{};  ///< i32 or i64 [b + 1]: q and the others are ragged, and b is the number of sequences
  UpdateRule rule = UpdateRule::gated_delta;
  std::optional<float> scale{};  ///< of q; default 1 / sqrt(d)

  /// Pools of states: i32 or i64 [b]. initial_state and final_state are [slots, h, d, dv], sequence i starts from slot
  /// state_slots[i] and leaves its state there; no two sequences may share a slot, and no other is touched. Of a
  /// negative slot nothing is read (the state is 0) or written. The two may be one pool or two of as many slots, or one
  /// of them is left empty.
  /// Or [b, n] for speculative decoding with up to n tokens a call: the state after token j goes to state_slots[i, j].
  TensorView state_slots{};
  /// With state_slots [b, n], i32 or i64 [b], 1 to n: how many tokens of the call before were accepted. Sequence i
  /// starts from state_slots[i, accepted[i] - 1]. Empty: 1.
  TensorView accepted{};

  // What models compute from their projections before the rule; each is done in fp32 here.
  bool l2norm_qk = false;     ///< q and k are divided by sqrt(sum of squares + 1e-6); rows past 1e19 count as 0
  bool beta_sigmoid = false;  ///< beta counts as sigmoid(beta)
  bool beta_double = false;   ///< beta, or its sigmoid, counts twice: states with negative eigenvalues
  /// g counts as -exp(a_log) softplus(g + dt_bias) or, with gate_lower_bound, as
  /// gate_lower_bound sigmoid(exp(a_log) (g + dt_bias)).
  bool gate = false;
  TensorView a_log{};    ///< f32 [h]; empty: 0
  TensorView dt_bias{};  ///< f32 [h, d] if g has d, else [h]; empty: 0
  std::optional<float> gate_lower_bound{};
};

/// For each sequence and state head, with S [d, dv] in fp32 whatever the type of its tensor, token by token:
///
///     S = diag(exp(g)) S                      gated, gated_delta
///     u = beta (v - S^T k)                    delta, gated_delta;  u = v otherwise
///     S = S + k u^T
///     out = scale S^T q
///
/// (Yang et al., Gated Delta Networks, 2024; Kimi Linear, 2025, eq. 1; ONNX's LinearAttention.) Either hk divides hv or
/// hv divides hk; hq divides h or is a multiple of it. Heads of the fewer serve runs of
/// equal length of the more, in their order.
///
/// Bits do not depend on threads, on the other sequences of a batch, or on later tokens. They may depend on whether a
/// state is kept for each token. Throws Error before anything is written. Reentrant. `workspace` as for attention().
/// docs/contract.md has the corners.
/// FLOPs (cost.hpp): S^T k, k u^T and S^T q.
RAPT_API void delta_rule(const DeltaRuleArgs& args, const Context& context = default_context(),
                         std::span<std::byte> workspace = {});

/// What dispatch and planning see of a delta_rule call. Text form: "delta_rule", then `key=value` words in the order of
/// the fields below; all but sizes are left out at their default.
///
///     delta_rule decay=channel b=1 hq=8 t=1024 d=128 beta state
///     delta_rule dtype=bf16 b=4 hq=4 hv=16 t=1 d=128 decay=head beta gate l2norm state slots
///
/// max_workspace_bytes() holds for problems with smaller b, t, ragged.
struct DeltaRuleProblem {
  DType dtype = DType::f32;      ///< of q, k and v, or of whichever is not f32; text: dtype= for both this and the next
  DType out_dtype = DType::f32;  ///< text: out=
  DType state_dtype = DType::f32;  ///< of the states, or of whichever is not f32
  UpdateRule rule = UpdateRule::gated_delta;
  Decay decay = Decay::none;
  std::int64_t b = 1;
  std::int64_t hq = 1;
  std::int64_t hk = 1;  ///< text default: hq
  std::int64_t hv = 1;  ///< text default: hk
  std::int64_t t = 0;   ///< tokens of a sequence; ragged: the longest
  std::int64_t d = 0;
  std::int64_t dv = 0;       ///< text default: d
  std::int64_t ragged = -1;  ///< tokens of all sequences; -1: dense
  bool beta = false;
  bool gate = false;
  bool l2norm = false;
  bool state = false;      ///< an initial and a final state, or one of them
  bool slots = false;      ///< in a pool
  std::int64_t steps = 0;  ///< states that a sequence keeps, one for each token; 0: only the last

  std::int64_t state_heads() const noexcept { return hk > hv ? hk : hv; }

  friend bool operator==(const DeltaRuleProblem&, const DeltaRuleProblem&) = default;

  /// Throws Error naming the word it cannot read or has read before.
  RAPT_API static DeltaRuleProblem parse(std::string_view text);
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static DeltaRuleProblem of(const DeltaRuleArgs& args);
};

}  // namespace rapt
