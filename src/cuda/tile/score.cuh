// From raw scores to final ones: softcap, bias, ALiBi and masks, in the log2 domain.
#pragma once

#include "cuda/tile/head.cuh"

namespace rapt::cuda {

constexpr auto kLog2e = static_cast<float>(rapt::kLog2e), kLn2 = static_cast<float>(rapt::kLn2);

__device__ inline float infinity() {
  return __int_as_float(0x7f800000);
}

// 2^x by the special-function unit: off by at most 2^-22 of the result; results below 2^-126 are 0; 2^0 is 1.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What rows are reduced by.
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

__device__ inline bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

__host__ __device__ inline bool has_terms(const ScoreParams& s) {
  return s.softcap_log2 != 0 || s.bias || s.mask || s.alibi;
}

// Whether scores may be scaled after their terms: they are a mask at most, and -inf stays -inf. Then no bit depends on
// there being one.
inline bool scales_last(const ScoreParams& s) {
  return s.scale_log2 != 0 && s.softcap_log2 == 0 && !s.bias && !s.alibi;
}

__device__ inline float alibi_slope_log2(const ScoreParams& s, std::int64_t b, std::int64_t q_head) {
  return load(s.alibi, s.alibi_type, b * s.alibi_stride_b + q_head * s.alibi_stride_h) * kLog2e;
}

// Distances count from the key nearest to the row, where they are exact whatever the offset. The rest of the way is the
// same for all keys: it lowers all scores of the row by this much.
__device__ inline float alibi_shift_log2(const Head& head, const Row& row) {
  const std::int64_t rest = row.token + head.offset - row.nearest(head);
  return head.p.score.alibi && rest != 0
             ? alibi_slope_log2(head.p.score, head.b, row.q_head) * fabsf(static_cast<float>(rest))
             : 0;
}

// The final score of key j, which the row sees, from `x`, its scaled q.k; -inf where bias or mask hides it.
// `token` is the row's, `nearest` the key nearest to it.
__device__ __forceinline__ float finish_score(const ScoreParams& s, std::int64_t b, std::int64_t q_head,
                                              std::int64_t token, std::int64_t nearest, std::int64_t j, float x) {
  const auto at = [&](const Strides& stride) {
    return b * stride.b + q_head * stride.h + token * stride.s + j * stride.d;
  };
  if (s.mask && !s.mask[at(s.mask_stride)]) return -infinity();
  if (s.softcap_log2 != 0) x = s.softcap_log2 * tanhf(x / s.softcap_log2);
  if (s.bias) {
    const float bias = load(s.bias, s.bias_type, at(s.bias_stride));
    if (bias == -infinity()) return bias;
    // The largest finite values, which frameworks use as masks, stay finite; fmin and fmax would drop NaN.
    const float scaled = bias * kLog2e;
    x += isinf(scaled) && is_finite(bias) ? copysignf(3.402823466e38f, bias) : scaled;
  }
  if (s.alibi) {
    x -= alibi_slope_log2(s, b, q_head) * fabsf(static_cast<float>(nearest - j));
  }
  return x;
}

// The same out of line, so that kernels keep their registers for what is hot.
static __device__ __noinline__ float finish_score(const Head& head, const Row& row, std::int64_t j, float x) {
  return finish_score(head.p.score, head.b, row.q_head, row.token, row.nearest(head), j, x);
}

// The row's sink in the log2 domain; -inf: none.
__device__ inline float sink_of(const Head& head, const Row& row) {
  const ScoreParams& s = head.p.score;
  if (!s.sinks) return -infinity();
  return load(s.sinks, s.sinks_type, row.q_head * s.sinks_stride) * kLog2e;
}

// What scores are taken relative to before 2^x: their maximum, but 0 where there is none.
__device__ inline float reference(float max) {
  return max == -infinity() ? 0.f : max;
}

// Of scores whose weights, taken relative to `reference`, have this sum.
__device__ inline float lse_of(float reference, float sum, float alibi_shift) {
  return sum == 0 ? -infinity() : (reference - alibi_shift + log2f(sum)) * kLn2;
}

// A row whose weights, taken relative to its maximum, have this sum, with its sink: out is O half half / sum. The sink
// may be so far above the maximum that its weight, or the weights relative to it, are no numbers that fp32 has.
struct Finish {
  float sum, half, lse;
};
__device__ inline Finish finish_row(float max, float sum, float sink, float alibi_shift) {
  const float m = reference(max), above = sink - m + alibi_shift;
  const float sink_lse = sink * kLn2 + sum * 0;  // or NaN
  constexpr float kFar = 100;
  if (!(above <= kFar)) return {1, exp2_approx(above / -2) + (above - above), sink_lse};  // NaN for a sink of inf
  const float all = sum + exp2_approx(above);
  return {all, 1, sum == 0 ? sink_lse : lse_of(m, all, alibi_shift)};
}

// A weight of -0 marks a key that is hidden: times a value that is no NaN or Inf it adds nothing.
__device__ inline bool is_hidden(float weight) {
  return __float_as_uint(weight) == 0x80000000u;
}
__device__ inline float weight_of(float score, float reference) {
  return score == -infinity() ? -0.f : exp2_approx(score - reference);
}

}  // namespace rapt::cuda
