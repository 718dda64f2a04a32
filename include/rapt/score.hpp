// What happens to a score between q.k and the softmax.
#pragma once

#include <cstdint>
#include <optional>

#include "rapt/tensor.hpp"
#include "rapt/types.hpp"

namespace rapt {

/// Where query row 0 sits among the keys: row i of a sequence sits at key position i + offset.
/// It matters to `causal`, `window` and `alibi`, and must be given for them when a sequence's query and key lengths
/// differ: the two customs disagree there, so rapt never guesses.
struct Align {
  enum class Kind : std::uint8_t { top_left, bottom_right, offset };
  Kind kind = Kind::top_left;
  std::int64_t value = 0;  ///< used by `offset` only; negative is legal

  static constexpr Align top_left() { return {Kind::top_left, 0}; }          ///< offset 0 (PyTorch's is_causal)
  static constexpr Align bottom_right() { return {Kind::bottom_right, 0}; }  ///< len_k - len_q (KV caches)
  static constexpr Align offset(std::int64_t value) { return {Kind::offset, value}; }
};

/// Keys i + offset - left <= j <= i + offset + right are attended; -1 leaves a side open.
struct Window {
  std::int64_t left = -1;
  std::int64_t right = -1;
};

/// Weights dropped at random after the softmax: out = sum_j keep_ij / (1 - p) p_ij v_j. Which ones are kept follows
/// from seed, offset, b, h, i and j alone (docs/contract.md has the mapping), so the same two numbers give the same
/// mask again, from any kernel. Give every call a (seed, offset) of its own; offsets below 2^32 keep all pairs apart.
/// dropout_mask() writes the mask out.
struct Dropout {
  float p = 0;  ///< 0 <= p <= 1, the share that is dropped, rounded to a multiple of 2^-16; 0: none, 1: all
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

/// x = scale * (q . k) -> softcap -> + bias -> + alibi -> causal, window and mask -> softmax (with the sink) ->
/// dropout. A score of -inf weighs nothing however it came about; a row without any key gives out = 0 and lse = -inf
/// (its sink, if it has one).
struct ScoreSpec {
  std::optional<float> scale{};    ///< default d^-1/2; any finite value, 0 and negative included
  bool causal = false;             ///< keys j <= i + offset
  std::optional<Window> window{};  ///< independent of `causal`
  std::optional<Align> align{};
  std::optional<float> softcap{};  ///< 1e-30 <= c <= 1e30: x -> c * tanh(x / c)
  /// Added to the scores: f32, bf16 or f16 of 1 to 4 dimensions that broadcast (size 1, or missing in front) to
  /// [b, hq, sq, sk]. -inf masks. With ragged sources, indices are local to a sequence and sizes reach the longest one.
  TensorView bias{};
  TensorView mask{};   ///< boolean, true = attend; shapes as for `bias`
  TensorView alibi{};  ///< slopes of these types, [hq] or [b, hq]: x -= slope * |i + offset - j|
  TensorView
      sinks{};  ///< of these types, [hq]: one extra logit per head in the softmax's denominator only; -inf = none
  std::optional<Dropout> dropout{};  ///< `lse` is that without it

  /// Calls f(name, member) for every member but `dropout`, in the order of Python's arguments, so that bindings need no
  /// list of their own; f(name, member, DType::boolean) for a tensor of booleans.
  template <class F>
  constexpr void for_each(const F& f) {
    f("causal", causal), f("align", align), f("window", window), f("scale", scale);
    f("mask", mask, DType::boolean), f("bias", bias), f("softcap", softcap), f("alibi", alibi), f("sinks", sinks);
  }
};

/// What a problem says of a ScoreSpec. Text: the words of AttentionProblem, in this order.
struct ScoreProblem {
  enum class Align : std::uint8_t { none, top_left, bottom_right, offset };
  /// Broadcasting of a bias or mask: which of its dimensions have their full size. kNone: not given. Text: the letters
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
  float dropout = 0;  ///< p; seed and offset are no part of the problem. Text: dropout=

  friend bool operator==(const ScoreProblem&, const ScoreProblem&) = default;
};

}  // namespace rapt
