// Applies softcap, bias, ALiBi and masks to scores in memory. Kernels call it only for blocks that need it.
#pragma once

#include "cpu/tile/head.hpp"

namespace rapt::cpu::RAPT_ISA {

inline vec infinity() {
  return vec(__builtin_inff());
}
inline vec minus_infinity() {
  return vec(-__builtin_inff());
}

// Whether final scores are something other than q.k times a positive number. (A denormal scale counts as 0 here.)
inline bool needs_finish(const ScoreParams& s) {
  return has_modifiers(s) || !(s.scale_log2 >= __FLT_MIN__);
}

// c * tanh(x / c) by tanh(y) = (e^2y - 1) / (e^2y + 1), which keeps its relative precision near 0.
inline vec softcap(vec x, float c) {
  const vec y = x * vec(1 / c);
  const vec e = exp2_minus_1(xsimd::min(vec(60.f), xsimd::abs(y) * vec(2 * kLog2e)));  // min keeps NaN
  return vec(c) * xsimd::copysign(e / (e + vec(2.f)), y);
}

// bias * log2(e). Only -inf masks: the largest finite values, which frameworks use as masks, must stay finite.
inline vec scale_bias(vec bias) {
  const vec largest(__FLT_MAX__);
  const vec scaled =
      xsimd::max(vec(0.f) - largest, xsimd::min(largest, bias * vec(kLog2e)));  // in this order NaN stays
  return xsimd::select(xsimd::abs(bias) == infinity(), bias, scaled);
}

// For `rows` rows and `n` keys from `key` on: modifier[row][key] is the scaled bias, or -inf where masked.
[[gnu::always_inline]] inline void load_modifier_rows(const Head& head, const Row* row, std::int64_t rows,
                                                      std::int64_t key, std::int64_t n, vec (&modifier)[kLanes]) {
  const ScoreParams& s = head.p.score;
  if (s.bias) {
    with_float_type(
        s.bias_type, [&](auto element) {  // one type dispatch for all rows: one per row would cost more than its loads
          const auto* bias = static_cast<const decltype(element)*>(s.bias);
          const auto at = [&](int i) { return bias + modifier_index(s.bias_stride, place_of(head, row[i], key)); };
          if (s.bias_stride.d == 0) {
            for (int i = 0; i < rows; ++i) modifier[i] = scale_bias(load_same(at(i)));
          } else {
            for (int i = 0; i < rows; ++i) modifier[i] = scale_bias(load_strided(at(i), s.bias_stride.d, n));
          }
        });
  } else {
    for (vec& x : modifier) x = vec(0.f);
  }
  if (s.mask) {
    const auto at = [&](int i) { return s.mask + modifier_index(s.mask_stride, place_of(head, row[i], key)); };
    if (s.mask_stride.d == 0) {
      for (int i = 0; i < rows; ++i)
        if (*at(i) == 0) modifier[i] = minus_infinity();
    } else {
      for (int i = 0; i < rows; ++i) {
        const vec attended = load_strided(reinterpret_cast<const std::int8_t*>(at(i)), s.mask_stride.d, n);
        // Select: a NaN under the mask must not stay.
        modifier[i] = xsimd::select(attended == vec(0.f), minus_infinity(), modifier[i]);
      }
    }
  }
}
// For one vector of rows: modifier[key][lane].
inline void load_modifiers(const Head& head, const Row* row, std::int64_t key, std::int64_t n,
                           vec (&modifier)[kLanes]) {
  load_modifier_rows(head, row, kLanes, key, n, modifier);
  transpose(modifier);
}

// What the scores of a vector of rows are finished with, over keys [begin, end) of the block at `k0`.
template <bool kModified>
struct FinishLanes {
  const ScoreParams& score;
  alignas(64) float first[kLanes], last[kLanes];     // the keys that each row sees: [first, last)
  alignas(64) float slope[kLanes], nearest[kLanes];  // of ALiBi, if given

  [[gnu::always_inline]] FinishLanes(const Head& head, const Row* row, std::int64_t k0, std::int64_t begin,
                                     std::int64_t end)
      : score(head.p.score) {
    for (int i = 0; i < kLanes; ++i) {
      first[i] = static_cast<float>(clamp(row[i].first - k0, begin, end));
      last[i] = static_cast<float>(clamp(row[i].last - k0, begin, end));
      if (kModified && score.alibi) {
        slope[i] = -alibi_slope_log2(head, row[i]);
        nearest[i] = static_cast<float>(row[i].nearest - k0);
      }
    }
  }
  // The exponents of x = q.k of key `key` of the block. `add` is -m: it gets the modifiers first, since both may be
  // large and cancel. `modifier`: as load_modifiers() gives it, or null. `derivative` receives those of the scores, or
  // is null.
  [[gnu::always_inline]] vec finished(vec x, vec key, vec add, const vec* modifier, float* derivative) const {
    auto visible = (key >= load(first)) & (key < load(last));
    if constexpr (kModified) {
      if (score.alibi) add = fma(load(slope), xsimd::abs(load(nearest) - key), add);
      if (modifier) add = add + *modifier, visible = visible & !(*modifier == minus_infinity());
      if (score.softcap_log2 != 0) {
        const vec capped = softcap(x * vec(score.scale_log2), score.softcap_log2);
        if (derivative) {
          const vec tanh = capped * vec(1 / score.softcap_log2);
          store(derivative, fma(vec(0.f) - tanh, tanh, vec(1.f)));
        }
        x = capped + add;
      } else {
        x = fma(x, vec(score.scale_log2), add);
      }
    }
    return xsimd::select(visible, x, minus_infinity());
  }
};

// Finishes the scores of keys [begin, end) of the block at `k0` for one vector of the query block, and folds their
// maximum into `block_max`. On entry s[key][width] is q.k. Without modifiers it is only masked. With modifiers it
// becomes the exponent, relative to m; the function then returns whether any key is visible, which a maximum cannot
// tell since it may ignore a NaN. `derivatives` receives those of the scores (changes_derivative()), in the layout of
// s; null: not wanted.
template <bool kModified>
[[gnu::noinline]] bool finish_scores(const Head& head, const QueryBlock& q_block, std::int64_t v, std::int64_t k0,
                                     std::int64_t begin, std::int64_t end, float* s, float* block_max,
                                     float* derivatives = nullptr) {
  const bool has_bias_or_mask = kModified && (head.p.score.bias || head.p.score.mask);
  const std::int64_t lane = v * kLanes;
  const Row* row = q_block.row + lane;
  const FinishLanes<kModified> lanes(head, row, k0, begin, end);
  vec new_max = load(block_max + lane);
  auto visible = vec(0.f) != vec(0.f);
  vec modifier[kLanes];
  vec key(static_cast<float>(begin));
  for (std::int64_t j = begin; j < end; ++j, key = key + vec(1.f)) {
    const std::int64_t at = j * q_block.width + lane, t = (j - begin) % kLanes;
    if (has_bias_or_mask && t == 0) load_modifiers(head, row, k0 + j, min(kLanes, end - j), modifier);
    const vec x = lanes.finished(load(s + at), key, load(q_block.neg_m + lane),
                                 has_bias_or_mask ? &modifier[t] : nullptr, derivatives ? derivatives + at : nullptr);
    store(s + at, x);
    new_max = xsimd::max(new_max, x);
    if constexpr (kModified) visible = visible | !(x == minus_infinity());
  }
  store(block_max + lane, new_max);
  return xsimd::any(visible);
}

}  // namespace rapt::cpu::RAPT_ISA
