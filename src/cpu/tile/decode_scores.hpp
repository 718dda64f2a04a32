// Scores and softmax of attention_decode. A vector holds the scores of several keys for all rows of the query block:
// of one row, 16 keys fill a vector of 16 lanes, where one key to a vector would waste 15 of 16 exponentials.
#pragma once

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
};

}  // namespace rapt::cpu::RAPT_ISA
