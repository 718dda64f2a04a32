// Linear attention with a state of fixed size: the delta rule and its variants.
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

/// Arguments of delta_rule(). All but q, k, v and out are optional. Symbols: b sequences, t tokens, hq, hk and hv heads
/// of q, k and v, h = max(hk, hv) state heads, d and dv head dimension of keys and of values.
struct DeltaRuleArgs {
  TensorView q{};           ///< f32, bf16 or f16 [b, t, hq, d], or ragged [total, hq, d]; 1 <= d <= 256
  TensorView k{};           ///< f32, bf16 or f16 [b, t, hk, d]
  TensorView v{};           ///< f32, bf16 or f16 [b, t, hv, dv]; 1 <= dv <= 256
  TensorView g{};           ///< log decay, gated rules only: f32, bf16 or f16 [h], [b, t, h] or [b, t, h, d]; default 0
  TensorView beta{};        ///< rules with a delta only: f32, bf16 or f16 [b, t, h]; default 1
  MutableTensorView out{};  ///< f32, bf16 or f16 [b, t, max(hq, h), dv]
  TensorView initial_state{};  ///< f32 or bf16 [b, h, d, dv], with any strides; default 0
  MutableTensorView
      final_state{};        ///< f32 or bf16 [b, h, d, dv]; may be initial_state itself, which is then updated in place
  TensorView cu_seqlens{};  ///< i32 or i64 [b + 1]: q, k, v, g, beta and out are ragged, for b sequences
  UpdateRule rule = UpdateRule::gated_delta;
  std::optional<float> scale{};  ///< of q; default d^-1/2

  /// Pools of states: i32 or i64 [b]. initial_state and final_state are then [slots, h, d, dv]. Sequence i starts from
  /// slot state_slots[i] and leaves its state there. No two sequences may share a slot. Other slots keep their
  /// contents. A negative slot is read as 0 and not written. The two pools may be the same pool, two pools with the
  /// same number of slots, or one of them may be empty.
  ///
  /// Or [b, n], for speculative decoding with up to n tokens per call: the state after token j goes to slot
  /// state_slots[i, j].
  TensorView state_slots{};
  /// With state_slots [b, n], i32 or i64 [b], 1 to n: how many tokens of the previous call were accepted. Sequence i
  /// starts from slot state_slots[i, accepted[i] - 1]. Default: 1.
  TensorView accepted{};

  // Steps that models apply to their projections before the rule; each is computed in fp32.
  bool l2norm_qk = false;     ///< q and k are divided by sqrt(sum of squares + 1e-6); rows past 1e19 count as 0
  bool beta_sigmoid = false;  ///< sigmoid(beta) replaces beta
  bool beta_double = false;   ///< beta, or its sigmoid, is multiplied by 2: states with negative eigenvalues
  /// -exp(a_log) softplus(g + dt_bias) replaces g, or with gate_lower_bound, gate_lower_bound sigmoid(exp(a_log) (g +
  /// dt_bias)).
  bool gate = false;
  TensorView a_log{};                       ///< f32 [h]; default 0
  TensorView dt_bias{};                     ///< f32 [h, d] if g has d, else [h]; default 0
  std::optional<float> gate_lower_bound{};  ///< at most 0
};

/// Linear attention with the delta rule. For each sequence and state head, one token after another, with S [d, dv] in
/// fp32 for all types:
///
///     S = diag(exp(g)) S                      gated, gated_delta
///     u = beta (v - S^T k)                    delta, gated_delta;  u = v otherwise
///     S = S + k u^T
///     out = scale S^T q
///
/// Sources: Schlag et al., 2021; Yang et al., Gated Delta Networks, 2024; Kimi Linear, 2025, eq. 1; ONNX's
/// LinearAttention. The smaller of hk and hv divides the larger; hq divides h or is a multiple of it. Head i of the
/// fewer heads serves the i-th of equal runs of the others.
///
/// All tensors are on one device. On a GPU, values of cu_seqlens, state_slots and accepted are not validated: they are
/// clamped to what the tensors hold, a slot that the pool lacks counts as a negative one, and tokens past the n-th of
/// state_slots [b, n] are left out.
///
/// The bits do not depend on threads, on the other sequences of a batch, or on later tokens. They may depend on whether
/// the call keeps a state for each token. Throws Error before anything is written. Reentrant. `workspace` as for
/// attention(). docs/contract.md states the corner cases. FLOPs (cost.hpp): S^T k, k u^T and S^T q.
RAPT_API void delta_rule(const DeltaRuleArgs& args, const Context& context = default_context(),
                         std::span<std::byte> workspace = {});

/// The problem of a delta_rule call: all that dispatch and planning use. Text form: "delta_rule", then `key=value`
/// words in the order of the fields below. Words at their default are omitted, except sizes.
///
///     delta_rule decay=channel b=1 hq=8 t=1024 d=128 beta state
///     delta_rule dtype=bf16 b=4 hq=4 hv=16 t=1 d=128 decay=head beta gate l2norm state slots
///
/// max_workspace_bytes() covers problems with smaller b, t and ragged.
struct DeltaRuleProblem {
  DType dtype =
      DType::f32;  ///< of q, k and v; if they differ, of the first that is not f32; text: dtype=, for out, too
  DType out_dtype = DType::f32;    ///< text: out=
  DType state_dtype = DType::f32;  ///< of the states; if they differ, of the one that is not f32
  DeviceType device = DeviceType::cpu;
  UpdateRule rule = UpdateRule::gated_delta;
  Decay decay = Decay::none;
  std::int64_t b = 1;
  std::int64_t hq = 1;
  std::int64_t hk = 1;  ///< text default: hq
  std::int64_t hv = 1;  ///< text default: hk
  std::int64_t t = 0;   ///< tokens per sequence; ragged: of the longest sequence, on a GPU the most it can be
  std::int64_t d = 0;
  std::int64_t dv = 0;       ///< text default: d
  std::int64_t ragged = -1;  ///< tokens of all sequences; -1: dense
  bool beta = false;
  bool gate = false;
  bool l2norm = false;
  bool state = false;      ///< an initial state, a final state, or both
  bool slots = false;      ///< states are in pools
  std::int64_t steps = 0;  ///< states that a sequence keeps, one per token; 0: only the last state

  /// max(hk, hv).
  std::int64_t state_heads() const noexcept { return hk > hv ? hk : hv; }

  friend bool operator==(const DeltaRuleProblem&, const DeltaRuleProblem&) = default;

  /// Reads the text form. Throws Error, which names an unknown, malformed or repeated word.
  RAPT_API static DeltaRuleProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static DeltaRuleProblem of(const DeltaRuleArgs& args);
};

}  // namespace rapt
