// Turns scores into weights, as the bf16 components that the second product multiplies.
#pragma once

#include "cpu/tile/bf16_mma.hpp"
#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {

// A block of scores has at most kMaxBlockKeys keys, each with a row of kChunk query rows.
constexpr std::int64_t kMaxBlockKeys = 256, kScoreBytes = kMaxBlockKeys * kRowBytes;
constexpr int kVecsOfRow = static_cast<int>(kChunk) / kLanes;

// The byte offset of a component of weights from the scores: in the first or the second row of each pair.
constexpr std::int64_t weights_at(int component) {
  return component * kRowBytes;
}

// Keys that one step exponentiates: one pair, or the pairs of merged rows.
constexpr std::int64_t kStepKeys = 2 * kMergedRows;

// Computes 2^scores of kStepKeys keys at a time. The weights' bf16 components overwrite the scores, and their sum is
// kept.
template <int kComponents>
struct Exponentials {
  // m is kHeadroom above a row's first or largest score. It moves when the weights of a block sum to more than
  // kMaxSum, or those of the first block that a row sees to less than kMinSum: when the largest exponent is above
  // kMaxExponent or below kMinExponent.
  static constexpr float kHeadroom = 0, kMaxSum = 0x1p16f, kMinSum = 0x1p-8f, kMaxExponent = kExponentRange,
                         kMinExponent = -kExponentRange;
  static_assert(kMaxBlockKeys * 0x1p8f <= kMaxSum);
  static_assert(kComponents == 2 && kMergedRows == 1);
  float *s = nullptr, *end = nullptr;
  vec scale[kVecsOfRow], add[kVecsOfRow], sum[kVecsOfRow];

  // Sets the exponents of vector i of rows to s * s_scale + s_add.
  void set(vec s_scale, int i, vec s_add) { scale[i] = s_scale, add[i] = s_add, sum[i] = vec(0.f); }

  template <bool kClamps>
  [[gnu::always_inline]] void next_step() {
#pragma GCC unroll 8
    for (int i = 0; i < kVecsOfRow; ++i) {
      float* at = s + i * kLanes;
      vec even = exp2_18_bits(fma(load(at), scale[i], add[i]));
      vec odd = exp2_18_bits(fma(load(at + kChunk), scale[i], add[i]));
#pragma GCC unroll 2
      for (int p = 0; p < kComponents; ++p) {
        store(at + weights_at(p) / 4, truncate_to_bf16_pairs(even, odd));
        const vec high_even = truncate_to_bf16(even), high_odd = truncate_to_bf16(odd);
        sum[i] = sum[i] + (high_even + high_odd);  // sums what is stored: the last component is truncated
        even = even - high_even, odd = odd - high_odd;
      }
    }
    s += 2 * kChunk;
  }
  template <bool kClamps>
  void rest() {
    while (s != end) next_step<kClamps>();
  }
};

// One component, in 7.9 fixed point: no weight is above 2, and a saturated weight shows in the sum.
template <>
struct Exponentials<1> {
  static constexpr float kHeadroom = 23, kMaxSum = 1.9f, kMinSum = 0x1p-39f, kMaxExponent = -8, kMinExponent = -39;
  static_assert(kMaxBlockKeys * 0x1p-8f <= kMaxSum);
  float *s = nullptr, *end = nullptr;
  vec scale[kVecsOfRow], add[kVecsOfRow], sum[kVecsOfRow];
  FixedExp2 exponential;

  void set(vec s_scale, int i, vec s_add) {
    scale[i] = s_scale * vec(FixedExp2::kScale);
    add[i] = fma(s_add, vec(FixedExp2::kScale), vec(FixedExp2::kOffset));
    sum[i] = vec(0.f);
  }
  template <bool kClamps>
  [[gnu::always_inline]] void next_step() {
#pragma GCC unroll 8
    for (int i = 0; i < kVecsOfRow; ++i) exponentiate<kClamps>(s + i * kLanes, scale[i], add[i], sum[i], exponential);
    s += kStepKeys * kChunk;
  }
  // All remaining steps. Where the state of all vectors of a row does not fit the registers, one vector of rows after
  // the other.
  template <bool kClamps>
  void rest() {
    while (kVecsOfRow <= 4 && s != end) next_step<kClamps>();
    for (int i = 0; s != end && i < kVecsOfRow; ++i) {
      const vec factor = scale[i], addend = add[i];
      const FixedExp2 local = exponential;
      vec total = sum[i];
      for (float* at = s + i * kLanes; at < end; at += kStepKeys * kChunk)
        exponentiate<kClamps>(at, factor, addend, total, local);
      sum[i] = total;
    }
    s = end;
  }

 private:
  template <bool kClamps>
  [[gnu::always_inline]] static void exponentiate(float* at, vec factor, vec addend, vec& total,
                                                  const FixedExp2& exponential) {
    vec pairs[kMergedRows];
#pragma GCC unroll 2
    for (int m = 0; m < kMergedRows; ++m) {
      const float* key = at + 2 * m * kChunk;
      const vec even = fma(load(key), factor, addend), odd = fma(load(key + kChunk), factor, addend);
      pairs[m] = exponential.weights<kClamps>(even, odd, total);
    }
    merge_rows(pairs);
#pragma GCC unroll 2
    for (int m = 0; m < kMergedRows; ++m) store(at + 2 * m * kChunk, pairs[m]);
  }
};

// in_registers() copies e to registers, put_back() writes back the members that change. Both name each member: copying
// the whole struct would use vector loads, which stall until the pointers inside have left the store buffer, behind
// all stores of tiles.
template <int kComponents>
[[gnu::always_inline]] inline Exponentials<kComponents> in_registers(const Exponentials<kComponents>& e) {
  Exponentials<kComponents> local;
  local.s = e.s, local.end = e.end;
#pragma GCC unroll 8
  for (int i = 0; i < kVecsOfRow; ++i) local.scale[i] = e.scale[i], local.add[i] = e.add[i], local.sum[i] = e.sum[i];
  return local;
}
template <int kComponents>
[[gnu::always_inline]] inline void put_back(const Exponentials<kComponents>& local, Exponentials<kComponents>& e) {
  e.s = local.s;
#pragma GCC unroll 8
  for (int i = 0; i < kVecsOfRow; ++i) e.sum[i] = local.sum[i];
}

}  // namespace rapt::cpu::RAPT_ISA
