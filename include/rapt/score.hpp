// Score modifiers: what changes a score between q.k and the softmax.
#pragma once

#include <cstdint>
#include <optional>

#include "rapt/tensor.hpp"
#include "rapt/types.hpp"

namespace rapt {

/// Where query row 0 sits among the keys: row i of a sequence sits at key position i + offset. `causal`, `window` and
/// `alibi` use it. They require it if a sequence's query and key lengths differ: libraries disagree about the default,
/// so rapt does not guess.
struct Align {
  /// The ways to give the offset.
  enum class Kind : std::uint8_t { top_left, bottom_right, offset };
  Kind kind = Kind::top_left;
  std::int64_t value = 0;  ///< the offset, for Kind::offset only; may be negative

  static constexpr Align top_left() { return {Kind::top_left, 0}; }          ///< offset 0 (PyTorch's is_causal)
  static constexpr Align bottom_right() { return {Kind::bottom_right, 0}; }  ///< offset len_k - len_q (KV caches)
  static constexpr Align offset(std::int64_t value) { return {Kind::offset, value}; }  ///< this offset
};

/// A sliding window: row i attends to keys i + offset - left <= j <= i + offset + right. -1 leaves a side open.
struct Window {
  std::int64_t left = -1;
  std::int64_t right = -1;
};

/// Dropout of attention weights after the softmax: out = sum_j keep_ij / (1 - p) p_ij v_j (Srivastava et al., 2014).
/// The mask depends only on p, seed, offset, b, h, i and j (docs/contract.md states the mapping), so the same seed and
/// offset give the same mask again, with any kernel. Give every call its own (seed, offset). Offsets below 2^32 keep
/// all pairs apart. dropout_mask() writes the mask.
struct Dropout {
  float p = 0;  ///< 0 <= p <= 1, the share of dropped weights, rounded to a multiple of 2^-16; 0: none, 1: all
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

/// Scale, masks, bias and other score modifiers of an attention call, in this order: x = scale * (q . k) -> softcap ->
/// + bias -> + alibi -> causal, window and mask -> softmax (with the sink) -> dropout. A score of -inf has no weight,
/// whatever its cause. A row without keys gives out = 0 and lse = -inf (with a sink: the sink).
struct ScoreSpec {
  std::optional<float> scale{};    ///< default d^-1/2; any finite value, 0 and negative included
  bool causal = false;             ///< keys j <= i + offset
  std::optional<Window> window{};  ///< independent of `causal`
  std::optional<Align> align{};    ///< required for causal, window and alibi if query and key lengths differ
  std::optional<float> softcap{};  ///< 1e-30 <= c <= 1e30: x -> c * tanh(x / c)
  /// Added to the scores: f32, bf16 or f16, of 1 to 4 dimensions that broadcast to [b, hq, sq, sk]: any may be 1, and
  /// leading ones may be missing. -inf masks. In ragged batches, indices are local to a sequence, and sq (sk) is at
  /// least the length of the longest sequence.
  TensorView bias{};
  TensorView mask{};   ///< boolean, true = attend; shapes as for `bias`
  TensorView alibi{};  ///< f32, bf16 or f16 [hq] or [b, hq], slopes: x -= slope * |i + offset - j|
  /// f32, bf16 or f16 [hq]: one extra logit per head in the softmax's denominator only; -inf = none.
  TensorView sinks{};
  std::optional<Dropout> dropout{};  ///< `lse` ignores it

  /// Calls f(name, member) for every member but `dropout`, in the order of Python's arguments, and f(name, member,
  /// DType::boolean) for a boolean tensor. Bindings need no list of their own.
  template <class F>
  constexpr void for_each(const F& f) {
    f("causal", causal), f("align", align), f("window", window), f("scale", scale);
    f("mask", mask, DType::boolean), f("bias", bias), f("softcap", softcap), f("alibi", alibi), f("sinks", sinks);
  }
};

/// The fields of a problem for a ScoreSpec. Text: words of AttentionProblem, in this order.
struct ScoreProblem {
  enum class Align : std::uint8_t { none, top_left, bottom_right, offset };
  /// Broadcasting of a bias or mask: bits for the dimensions with their full size. kNone: not given. Text: the letters
  /// of the full dimensions, for example "bk" or "hqk"; "1" if there are none.
  static constexpr std::uint8_t kNone = 0xff, kFullB = 1, kFullH = 2, kFullQ = 4, kFullK = 8;

  bool causal = false;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  Align align = Align::none;
  std::int64_t align_offset = 0;  ///< text: align=N
  bool has_scale = false;
  float scale = 0;    ///< text: scale=
  float softcap = 0;  ///< 0: none
  std::uint8_t bias = kNone;
  DType bias_dtype = DType::f32;  ///< text: bias_dtype=
  std::uint8_t mask = kNone;
  bool alibi = false;
  bool sinks = false;
  float dropout = 0;  ///< text: dropout=; p. seed and offset are not part of the problem

  friend bool operator==(const ScoreProblem&, const ScoreProblem&) = default;
};

}  // namespace rapt
