// Scores: which keys a row sees, and how a score becomes final between q.k and the softmax. The checker, the work list
// and the kernels of every backend use these functions; kernels that work on whole vectors keep the order of
// operations of finish_score().
#pragma once

#include "semantics/dropout.hpp"
#include "semantics/sequence.hpp"

namespace rapt {

// Scores are in the log2 domain where a name says so.
struct ScoreParams {
  float scale_log2;    // scale * log2(e)
  float softcap_log2;  // c * log2(e); 0: none
  // Row i sees keys i + offset - left <= j <= i + offset + right; a side is open at kOpen. Causal is right = 0.
  std::int64_t left, right, offset;
  bool bottom_right;         // adds len_k - len_q of the sequence to offset
  const void* bias;          // [b, hq, sq, sk] with broadcast strides of 0; null: none
  const std::uint8_t* mask;  // [b, hq, sq, sk] likewise, nonzero = attend; null: none
  Strides bias_stride, mask_stride;
  const void* alibi;  // [b, hq] slopes; null: none
  std::int64_t alibi_stride_b, alibi_stride_h;
  const void* sinks;  // [hq]; null: none
  std::int64_t sinks_stride;
  DType bias_type, alibi_type, sinks_type;  // f32, bf16 or f16
  // The sizes of bias and mask; keys and rows past them are masked. (Lengths on a GPU may ask for more.)
  std::int64_t modifier_rows, modifier_keys;
  DropoutParams dropout;
};
inline constexpr std::int64_t kOpen = std::int64_t{1} << 53, kNoLimit = INT64_MAX;

// The key position of a sequence's row 0: the only place that turns `align` into an offset.
RAPT_HOST_DEVICE std::int64_t row_offset(const ScoreParams& s, const Sequence& q) {
  return s.offset + (s.bottom_right ? q.len_k - q.len_q : 0);
}

struct KeyRange {
  std::int64_t first, last;  // keys [first, last)
};

// The keys in [low, high) that row `token`, at key position `position`, sees after causal, window and the sizes of
// bias and mask. Both ends rise with the row, up to the last that bias and mask have; rows behind it see no key.
RAPT_HOST_DEVICE KeyRange visible_keys(const ScoreParams& s, std::int64_t token, std::int64_t position,
                                       std::int64_t low, std::int64_t high) {
  const std::int64_t first = s.left == kOpen ? low : clamp_to(position - s.left, low, high);
  const std::int64_t last = s.right == kOpen ? high : clamp_to(position + s.right + 1, low, high);
  const std::int64_t limit = token < s.modifier_rows ? s.modifier_keys : 0;
  return {first, last < limit ? last : limit};
}

// The keys that any row of a sequence sees.
RAPT_HOST_DEVICE KeyRange visible_keys(const ScoreParams& s, const Sequence& q) {
  const std::int64_t rows = q.len_q < s.modifier_rows ? q.len_q : s.modifier_rows;
  if (rows == 0) return {0, 0};
  const std::int64_t offset = row_offset(s, q), last_row = rows - 1;
  return {visible_keys(s, 0, offset, q.oldest, q.len_k).first,
          visible_keys(s, last_row, offset + last_row, q.oldest, q.len_k).last};
}

// visible_keys() in 32 bits, for kernels with fewer than 2^30 rows and keys. Keys are counted from `base` on, which is
// at most 2^30 below the oldest.
struct KeyBounds32 {
  std::int32_t first, last;  // row `token` sees keys [token + first, token + last)
  std::int32_t low, high;    // limits of these keys
  std::int32_t rows, limit;  // rows from `rows` on see no key; others see none from `limit` on

  RAPT_HOST_DEVICE KeyBounds32(const ScoreParams& s, const Sequence& q, std::int64_t base) {
    constexpr std::int32_t kFar = 1 << 30;  // farther than any key from any row
    const std::int64_t offset = row_offset(s, q) - base;
    first = s.left == kOpen ? -kFar : saturate(offset - s.left);
    last = s.right == kOpen ? kFar : saturate(offset + s.right + 1);
    low = saturate(q.oldest - base), high = saturate(q.len_k - base);
    rows = saturate(s.modifier_rows), limit = saturate(s.modifier_keys - base);
  }
  KeyBounds32() = default;
  // Counts keys from `key` on instead.
  RAPT_HOST_DEVICE void start_at(std::int32_t key) { first -= key, last -= key, low -= key, high -= key, limit -= key; }
  RAPT_HOST_DEVICE std::int32_t first_of(std::int32_t token) const { return clamp(token + first); }
  RAPT_HOST_DEVICE std::int32_t last_of(std::int32_t token) const {
    const std::int32_t end = clamp(token + last);
    return token >= rows ? low : end < limit ? end : limit;
  }

 private:
  RAPT_HOST_DEVICE static std::int32_t saturate(std::int64_t x) {
    constexpr std::int64_t kFar = 1 << 30;
    return static_cast<std::int32_t>(clamp_to(x, -kFar, kFar));
  }
  RAPT_HOST_DEVICE std::int32_t clamp(std::int32_t x) const {
    const std::int32_t raised = x > low ? x : low;
    return raised < high ? raised : high;
  }
};

// Whether a modifier changes scores. (A mask only hides keys.)
RAPT_HOST_DEVICE bool changes_scores(const ScoreParams& s) {
  return s.softcap_log2 != 0 || s.bias || s.alibi;
}
// Whether the final score's derivative with respect to the scaled q.k is another than 1.
RAPT_HOST_DEVICE bool changes_derivative(const ScoreParams& s) {
  return s.softcap_log2 != 0;
}
// Whether a final score differs from q.k times the scale.
RAPT_HOST_DEVICE bool has_modifiers(const ScoreParams& s) {
  return changes_scores(s) || s.mask;
}

// A pair of one query row and one key.
struct ScorePlace {
  std::int64_t b, q_head, token, key;
};
// The pair's index in the bias or the mask, whose rows and keys are those of the sequence.
RAPT_HOST_DEVICE std::int64_t modifier_index(const Strides& s, const ScorePlace& at) {
  return at.b * s.b + at.q_head * s.h + at.token * s.s + at.key * s.d;
}
RAPT_HOST_DEVICE bool is_masked(const ScoreParams& s, const ScorePlace& at) {
  return s.mask && !s.mask[modifier_index(s.mask_stride, at)];
}

RAPT_HOST_DEVICE bool is_dropped(const ScoreParams& s, const ScorePlace& at) {
  return is_dropped(s.dropout, at.b, at.q_head, at.token, at.key);
}

// ALiBi's distances are measured from the key nearest to the row, where they are exact whatever the offset. The
// remaining distance is the same for all keys: it lowers all scores of the row by alibi_shift_log2().
RAPT_HOST_DEVICE std::int64_t nearest_key(std::int64_t position, std::int64_t len_k) {
  return clamp_to(position, 0, len_k > 0 ? len_k - 1 : 0);
}
// `number_at(data, dtype, index)` reads one number as fp32.
template <class NumberAt>
RAPT_HOST_DEVICE float alibi_slope_log2(const ScoreParams& s, std::int64_t b, std::int64_t q_head, NumberAt number_at) {
  const float slope = number_at(s.alibi, s.alibi_type, b * s.alibi_stride_b + q_head * s.alibi_stride_h);
  return slope * static_cast<float>(kLog2e);
}
template <class NumberAt>
RAPT_HOST_DEVICE float alibi_shift_log2(const ScoreParams& s, std::int64_t b, std::int64_t q_head,
                                        std::int64_t position, std::int64_t nearest, NumberAt number_at) {
  if (!s.alibi || position == nearest) return 0;
  return alibi_slope_log2(s, b, q_head, number_at) * abs_of(static_cast<float>(position - nearest));
}

// What softcap makes of x = q.k * scale_log2.
template <class Number>
RAPT_HOST_DEVICE Number capped(const ScoreParams& s, Number x) {
  return s.softcap_log2 * tanh_of(x / s.softcap_log2);
}
// The same with its derivative, by a kernel's own tanh(x, y) of x / y.
struct Capped {
  float x, derivative;
};
template <class Tanh>
RAPT_HOST_DEVICE Capped capped(const ScoreParams& s, float x, Tanh tanh) {
  const float of_x = tanh(x, s.softcap_log2);
  return {s.softcap_log2 * of_x, 1 - of_x * of_x};
}

// d(final score) / d(scaled q.k), at x = q.k * scale_log2.
RAPT_HOST_DEVICE double score_derivative(const ScoreParams& s, double x) {
  if (!changes_derivative(s)) return 1;
  const double tanh = tanh_of(x / static_cast<double>(s.softcap_log2));
  return 1 - tanh * tanh;
}

// The final score of a pair, in the log2 domain, from x = q.k * scale_log2; -inf where mask or bias hides the key.
// `nearest` is the row's nearest_key(). Kernels use floats, references doubles.
template <class Number, class NumberAt>
RAPT_HOST_DEVICE Number finish_score(const ScoreParams& s, const ScorePlace& at, std::int64_t nearest, Number x,
                                     NumberAt number_at) {
  if (is_masked(s, at)) return -kInfinity;
  if (s.softcap_log2 != 0) x = capped(s, x);
  if (s.bias) {
    const float bias = number_at(s.bias, s.bias_type, modifier_index(s.bias_stride, at));
    if (bias == -kInfinity) return bias;
    // Only -inf masks: the largest finite values, which frameworks use as masks, stay finite. (fmin would drop a NaN.)
    const Number scaled = bias * static_cast<Number>(kLog2e);
    const bool overflows = abs_of(scaled) > kMaxFloat && !is_inf(bias);
    x += overflows ? with_sign_of(kMaxFloat, bias) : scaled;
  }
  if (s.alibi) {
    const auto distance = static_cast<Number>(nearest - at.key);
    x -= alibi_slope_log2(s, at.b, at.q_head, number_at) * abs_of(distance);
  }
  return x;
}

}  // namespace rapt
