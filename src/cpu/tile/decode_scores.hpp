// Scores and softmax of attention_decode. A vector holds the scores of several keys for all rows of the query block:
// of one row, 16 keys fill a vector of 16 lanes, where one key to a vector would waste 15 of 16 exponentials.
#pragma once

#include "cpu/tile/score.hpp"
#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {

template <int kStride, int... kLane>
[[gnu::always_inline]] inline vec spread_lanes(vec x, std::integer_sequence<int, kLane...>) {
  return vec(__builtin_shufflevector(x.data, x.data, (kLane / kStride)...));
}
// Lane i of the result is lane i / stride of x; stride is a power of two up to kLanes.
template <int kStride = 1>
[[gnu::always_inline]] inline vec spread(vec x, std::int64_t stride) {
  if constexpr (kStride < kLanes)
    if (stride > kStride) return spread<2 * kStride>(x, stride);
  return spread_lanes<kStride>(x, std::make_integer_sequence<int, kLanes>());
}

template <int kFirst, int... kLane>
[[gnu::always_inline]] inline vec zipped(vec a, vec b, std::integer_sequence<int, kLane...>) {
  return vec(__builtin_shufflevector(a.data, b.data, (kFirst + kLane / 2 + kLane % 2 * kLanes)...));
}
// The first elements of x[0] to x[count - 1], then their second ones, and so on; count is a power of two.
inline void interleave(vec (&x)[kLanes], std::int64_t count) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  for (std::int64_t rounds = 1; rounds < count; rounds *= 2) {
    vec y[kLanes];
    for (std::int64_t i = 0; i < count / 2; ++i) {
      y[2 * i] = zipped<0>(x[i], x[i + count / 2], kAll);
      y[2 * i + 1] = zipped<kLanes / 2>(x[i], x[i + count / 2], kAll);
    }
    for (std::int64_t i = 0; i < count; ++i) x[i] = y[i];
  }
}

// Scores, and then weights, of keys [begin, end) of a block.
struct DecodeScores {
  float* s;             // [key][stride], from the block's first key on, with room for a vector past the last one
  std::int64_t stride;  // at least the query block's rows; a power of two up to kLanes
  std::int64_t begin, end;

  // The vectors that hold these scores: [from(), to()), in floats of s.
  std::int64_t from() const { return begin * stride / kLanes * kLanes; }
  std::int64_t to() const { return round_up(end * stride, kLanes); }

  // Multiplies the scores of key j by factor[j]. `factor` has room for a vector past the last key.
  void multiply(const float* factor) const {
    for (std::int64_t x = from(); x < to(); x += kLanes)
      store(s + x, load(s + x) * spread(load_any(factor + x / stride), stride));
  }
  // Sets the scores of keys that a row does not see to -inf. `k0` is the position of the block's first key.
  void mask(const QueryBlock& q_block, std::int64_t k0) const {
    for (std::int64_t r = 0; r < q_block.rows; ++r) {
      const std::int64_t first = clamp(q_block.first(r) - k0, begin, end),
                         last = clamp(q_block.last(r) - k0, first, end);
      for (std::int64_t j = begin; j < first; ++j) s[j * stride + r] = -__builtin_inff();
      for (std::int64_t j = last; j < end; ++j) s[j * stride + r] = -__builtin_inff();
    }
  }
  // Clears lanes that hold no score: rows from `rows` on, and keys before `begin` and from `end` on.
  void clear_rest(std::int64_t rows) const {
    if (rows < stride) {
      alignas(64) float lane[kLanes];
      for (std::int64_t l = 0; l < kLanes; ++l) lane[l] = (l & (stride - 1)) < rows ? 1.f : 0.f;
      const auto exists = load(lane) != vec(0.f);
      for (std::int64_t x = from(); x < to(); x += kLanes) store(s + x, xsimd::select(exists, load(s + x), vec(0.f)));
    }
    for (std::int64_t x = from(); x < begin * stride; ++x) s[x] = -__builtin_inff();
    if (end * stride < to()) store_any(s + end * stride, minus_infinity());
  }
  // finish_scores() of these. `block_max`: the maximum of row i % stride, in lane i.
  [[gnu::noinline]] bool finish(const Head& head, const QueryBlock& q_block, std::int64_t k0, float* block_max) const {
    const ScoreParams& score = head.p.score;
    const vec neg_m = load(q_block.neg_m), scale(score.scale_log2);
    // The common case: one addition finishes a score. The scores of keys outside of [begin, end) are -inf, and stay so
    // as the scale is positive (or become NaN, in rows that are NaN).
    const bool adds_only = only_adds(score) && score.scale_log2 >= __FLT_MIN__ &&
                           q_block.first(kLanes - 1) <= k0 + begin && q_block.last(0) >= k0 + end;
    if (adds_only)
      return finish_each(
          head, q_block, k0, block_max, [&](vec x, std::int64_t, const vec& modifier) __attribute__((always_inline)) {
            return finished_by_adding(x, scale, neg_m, modifier);
          });
    const FinishLanes<true> lanes(head, q_block.row, k0, begin, end);
    alignas(64) float offset[kLanes];  // of each lane's key from the vector's first
    for (std::int64_t i = 0; i < kLanes; ++i) offset[i] = static_cast<float>(i / stride);
    const bool has_bias_or_mask = score.bias || score.mask;
    return finish_each(
        head, q_block, k0, block_max, [&](vec x, std::int64_t j, const vec& modifier) __attribute__((always_inline)) {
          const vec key = vec(static_cast<float>(j)) + load(offset);
          return lanes.finished(x, key, neg_m, has_bias_or_mask ? &modifier : nullptr, nullptr);
        });
  }
  // The maximum of row i % stride, in lane i.
  vec maximum() const {
    vec top = minus_infinity();
    for (std::int64_t x = from(); x < to(); x += kLanes) top = xsimd::max(top, load(s + x));
    return over_period(
        top, stride, [](vec a, vec b) __attribute__((always_inline)) { return xsimd::max(a, b); });
  }
  // S -> P = 2^S. Returns the row sums, that of row i % stride in lane i. `sums` is scratch, [kLanes][kLanes]. Keys
  // kLanes apart are summed first and these sums in a tree, whatever the number of rows, so that a row's bits do not
  // depend on the rows beside it.
  vec to_weights(ToExponents e, float* sums) const {
    const auto sum_of = [&](std::int64_t n) { return sums + n * kLanes; };
    for (std::int64_t n = 0; n < stride; ++n) store(sum_of(n), vec(0.f));
    const vec scale(e.scale), add = load(e.add);
    for (std::int64_t x = from(); x < to(); x += kLanes) {
      const vec p = exp2(fma(load(s + x), scale, add));
      store(s + x, p);
      float* const sum = sum_of(x / kLanes & (stride - 1));
      store(sum, load(sum) + p);
    }
    for (std::int64_t half = stride / 2; half > 0; half /= 2)
      for (std::int64_t n = 0; n < half; ++n) store(sum_of(n), load(sum_of(n)) + load(sum_of(n + half)));
    return over_period(
        load(sum_of(0)), stride, [](vec a, vec b) __attribute__((always_inline)) { return a + b; });
  }

 private:
  // Finishes each vector by finished(scores, the first one's key, the bias and mask or 0).
  template <class Finished>
  [[gnu::always_inline]] bool finish_each(const Head& head, const QueryBlock& q_block, std::int64_t k0,
                                          float* block_max, const Finished& finished) const {
    const bool has_bias_or_mask = head.p.score.bias || head.p.score.mask;
    const Modifiers modifiers(head, q_block.row, has_bias_or_mask ? stride : 0);
    vec top = minus_infinity();
    auto visible = vec(0.f) != vec(0.f);
    vec modifier[kLanes];
    for (std::int64_t t = 0; !has_bias_or_mask && t < stride; ++t) modifier[t] = vec(0.f);
    const std::int64_t keys_of_vector = kLanes / stride;
    std::int64_t j = from() / stride;
    for (std::int64_t x = from(), n = 0; x < to(); x += kLanes, ++n, j += keys_of_vector) {
      const std::int64_t t = n & (stride - 1);
      if (has_bias_or_mask && t == 0) load_modifiers(modifiers, k0, j, modifier);
      const vec y = finished(load(s + x), j, modifier[t]);
      store(s + x, y);
      top = xsimd::max(top, y);
      visible = visible | !(y == minus_infinity());
    }
    store(block_max, over_period(
                         top, stride, [](vec a, vec b) __attribute__((always_inline)) { return xsimd::max(a, b); }));
    return xsimd::any(visible);
  }
  // Those of kLanes keys from the block's key j on, as scores lie. Of keys outside of [begin, end) nothing is read.
  void load_modifiers(const Modifiers& modifiers, std::int64_t k0, std::int64_t j, vec (&modifier)[kLanes]) const {
    const std::int64_t key = max(j, begin);
    modifiers.load_rows(k0 + key, min(j + kLanes, end) - key, modifier);
    for (std::int64_t r = 0; key > j && r < stride; ++r) {
      alignas(64) float moved[2 * kLanes] = {};
      store_any(moved + (key - j), modifier[r]);
      modifier[r] = load(moved);
    }
    if (stride == kLanes) transpose(modifier);
    else interleave(modifier, stride);
  }
};

}  // namespace rapt::cpu::RAPT_ISA
