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

// Whether one addition finishes a scaled score, of the row's -m and the bias or mask.
inline bool only_adds(const ScoreParams& s) {
  return !s.alibi && s.softcap_log2 == 0;
}
// That addition, of a score that is not scaled yet.
[[gnu::always_inline]] inline vec finished_by_adding(vec x, const vec& scale, const vec& neg_m, const vec& modifier) {
  return xsimd::select(modifier == minus_infinity(), minus_infinity(), fma(x, scale, neg_m + modifier));
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

// The biases and masks of up to a vector of rows. Where they lie is worked out once for a block of keys.
class Modifiers {
 public:
  [[gnu::always_inline]] Modifiers(const Head& head, const Row* row, std::int64_t rows)
      : score_(head.p.score), rows_(rows) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const ScorePlace place = place_of(head, row[i], 0);
      bias_[i] = score_.bias ? modifier_index(score_.bias_stride, place) : 0;
      mask_[i] = score_.mask ? modifier_index(score_.mask_stride, place) : 0;
      alike_ &= bias_[i] == bias_[0] && mask_[i] == mask_[0];
    }
  }
  // Of `n` keys from `key` on: modifier[row][key] is the scaled bias, or -inf where masked.
  [[gnu::always_inline]] void load_rows(std::int64_t key, std::int64_t n, vec (&modifier)[kLanes]) const {
    load_rows(key, n, rows_, modifier);
  }
  // Of a vector of rows: modifier[key][lane].
  [[gnu::always_inline]] void load_keys(std::int64_t key, std::int64_t n, vec (&modifier)[kLanes]) const {
    if (alike_) {
      load_rows(key, n, 1, modifier);
      alignas(64) float of_keys[kLanes];
      store(of_keys, modifier[0]);
      for (int j = 0; j < kLanes; ++j) modifier[j] = vec(of_keys[j]);
    } else {
      load_rows(key, n, kLanes, modifier);
      transpose(modifier);
    }
  }

 private:
  [[gnu::always_inline]] void load_rows(std::int64_t key, std::int64_t n, std::int64_t rows,
                                        vec (&modifier)[kLanes]) const {
    if (score_.bias) {
      with_float_type(
          score_.bias_type, [&](auto element) {  // one type dispatch for all rows, which costs more than loads
            load_each(
                static_cast<const decltype(element)*>(score_.bias), score_.bias_stride.d, bias_, key, n,
                rows, [&](std::int64_t i, vec bias) __attribute__((always_inline)) { modifier[i] = scale_bias(bias); });
          });
    } else {
      for (vec& x : modifier) x = vec(0.f);
    }
    if (score_.mask)
      load_each(
          reinterpret_cast<const std::int8_t*>(score_.mask), score_.mask_stride.d, mask_, key, n,
          rows, [&](std::int64_t i, vec attended) __attribute__((always_inline)) {
            // Select: a NaN under the mask must not stay.
            modifier[i] = xsimd::select(attended == vec(0.f), minus_infinity(), modifier[i]);
          });
  }
  // Calls f(i, those of row i).
  template <class T, class F>
  [[gnu::always_inline]] static void load_each(const T* from, std::int64_t stride, const std::int64_t* at,
                                               std::int64_t key, std::int64_t n, std::int64_t rows, const F& f) {
    from += key * stride;
    if (stride == 0) {
      for (std::int64_t i = 0; i < rows; ++i) f(i, load_same(from + at[i]));
    } else if (stride == 1 && n == kLanes) {
      for (std::int64_t i = 0; i < rows; ++i) f(i, load_any(from + at[i]));
    } else {
      for (std::int64_t i = 0; i < rows; ++i) f(i, load_strided(from + at[i], stride, n));
    }
  }

  const ScoreParams& score_;
  const std::int64_t rows_;
  std::int64_t bias_[kLanes], mask_[kLanes];  // the elements of key 0
  bool alike_ = true;                         // all rows have the same
};

// Whether each row has one modifier for all keys: modifiers_of_rows().
inline bool has_modifier_per_row(const ScoreParams& s) {
  return (s.bias || s.mask) && (!s.bias || s.bias_stride.d == 0) && (!s.mask || s.mask_stride.d == 0);
}
// Of a vector of rows. Called before other vectors are live, which a call would spill.
[[gnu::noinline]] inline vec modifiers_of_rows(const Head& head, const Row* row) {
  vec modifier[kLanes];
  Modifiers(head, row, kLanes).load_rows(0, kLanes, modifier);
  transpose(modifier);
  return modifier[0];
}

// Calls f(t, modifier[t]) for t in [0, n). All of a whole vector stay in registers.
template <class F>
[[gnu::always_inline]] inline void for_each_modifier(const vec (&modifier)[kLanes], std::int64_t n, const F& f) {
  if (n == kLanes) {
#pragma GCC unroll 16
    for (int t = 0; t < kLanes; ++t) f(t, modifier[t]);
  } else {
    alignas(64) float rest[kLanes][kLanes];
    for (int t = 0; t < kLanes; ++t) store(rest[t], modifier[t]);
    for (int t = 0; t < n; ++t) f(t, load(rest[t]));
  }
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
  // Whether all rows see all of the keys [begin, end).
  bool see_all(std::int64_t begin, std::int64_t end) const {
    return !xsimd::any((load(first) > vec(static_cast<float>(begin))) | (load(last) < vec(static_cast<float>(end))));
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
// becomes the exponent, relative to m (kSaturates: +inf in place of NaN); the function then returns whether any key is
// visible, which a maximum cannot tell since it may ignore a NaN. `derivatives` receives those of the scores
// (changes_derivative()), in the layout of s; null: not wanted.
template <bool kModified, bool kSaturates = false>
[[gnu::noinline]] bool finish_scores(const Head& head, const QueryBlock& q_block, std::int64_t v, std::int64_t k0,
                                     std::int64_t begin, std::int64_t end, float* s, float* block_max,
                                     float* derivatives = nullptr) {
  const ScoreParams& score = head.p.score;
  const std::int64_t lane = v * kLanes, width = q_block.width;
  const Row* const row = q_block.row + lane;
  const bool per_row = kModified && has_modifier_per_row(score);
  const vec of_rows = per_row ? modifiers_of_rows(head, row) : vec(0.f);
  const FinishLanes<kModified> lanes(head, row, k0, begin, end);
  vec new_max = load(block_max + lane);
  auto visible = vec(0.f) != vec(0.f);
  const vec neg_m = load(q_block.neg_m + lane);
  const auto put = [&](float* to, vec x) __attribute__((always_inline)) {
    store(to, kSaturates ? xsimd::select(x == x, x, infinity()) : x);
    new_max = xsimd::max(new_max, x);
    if constexpr (kModified) visible = visible | !(x == minus_infinity());
  };
  const bool adds_only = only_adds(score) && lanes.see_all(begin, end);
  const vec scale(score.scale_log2);
  if (per_row) {
    for (std::int64_t j = begin; j < end; ++j) {
      const std::int64_t at = j * width + lane;
      const vec x = load(s + at), key(static_cast<float>(j));
      put(s + at, adds_only ? finished_by_adding(x, scale, neg_m, of_rows)
                            : lanes.finished(x, key, neg_m, &of_rows, derivatives ? derivatives + at : nullptr));
    }
  } else if (kModified && (score.bias || score.mask)) {
    const Modifiers modifiers(head, row, kLanes);
    vec modifier[kLanes];
    for (std::int64_t j = begin; j < end; j += kLanes) {
      const std::int64_t n = min(kLanes, end - j);
      modifiers.load_keys(k0 + j, n, modifier);
      float* const at = s + j * width + lane;
      if (adds_only) {
        for_each_modifier(
            modifier, n, [&](int t, vec add) __attribute__((always_inline)) {
              put(at + t * width, finished_by_adding(load(at + t * width), scale, neg_m, add));
            });
        continue;
      }
      alignas(64) float of_key[kLanes][kLanes];
      for (int t = 0; t < kLanes; ++t) store(of_key[t], modifier[t]);
      for (std::int64_t t = 0; t < n; ++t) {
        const vec add = load(of_key[t]);
        float* const derivative = derivatives ? derivatives + (at - s) + t * width : nullptr;
        put(at + t * width,
            lanes.finished(load(at + t * width), vec(static_cast<float>(j + t)), neg_m, &add, derivative));
      }
    }
  } else {
    vec key(static_cast<float>(begin));
    for (std::int64_t j = begin; j < end; ++j, key = key + vec(1.f)) {
      const std::int64_t at = j * width + lane;
      put(s + at, lanes.finished(load(s + at), key, neg_m, nullptr, derivatives ? derivatives + at : nullptr));
    }
  }
  store(block_max + lane, new_max);
  return xsimd::any(visible);
}

}  // namespace rapt::cpu::RAPT_ISA
