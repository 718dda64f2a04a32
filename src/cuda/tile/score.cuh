// Scores of a row as semantics/score.hpp defines them, and the arithmetic of softmax, in the log2 domain.
#pragma once

#include "cuda/tile/head.cuh"

namespace rapt::cuda {

constexpr auto kLog2e = static_cast<float>(rapt::kLog2e), kLn2 = static_cast<float>(rapt::kLn2);

// 2^x by the special-function unit. The relative error is at most 2^-22; results below 2^-126 are 0; 2^0 is 1.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Reductions.
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
// Over all lanes of a warp.
template <class X, class Combine>
__device__ X over_lanes(X x, Combine combine) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x = combine(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

__device__ inline float not_a_number() {
  return __int_as_float(0x7fffffff);
}
__device__ inline bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// Whether scores may be scaled after their modifiers: if these are at most a mask, since -inf stays -inf. A call with a
// mask then has the same bits as one without, if key blocks are the same and shifts are not predicted.
inline bool scales_last(const ScoreParams& s) {
  return s.scale_log2 != 0 && !changes_scores(s);
}

// Functions of semantics/score.hpp for a row and a key.
__device__ inline float alibi_shift_log2(const Head& head, const Row& row) {
  return alibi_shift_log2(head.p.score, head.b, row.q_head, row.token + head.offset, row.nearest(head), NumberAt());
}
__device__ __forceinline__ float finish_score(const ScoreParams& s, const ScorePlace& at, std::int64_t nearest,
                                              float x) {
  return finish_score(s, at, nearest, x, NumberAt());
}
// The same out of line, to leave registers to inner loops.
static __device__ __noinline__ float finish_score(const Head& head, const Row& row, std::int64_t j, float x) {
  return finish_score(head.p.score, {head.b, row.q_head, row.token, j}, row.nearest(head), x);
}

// A bias in the log2 domain. Only -inf hides keys: the largest finite values stay finite.
__device__ inline float scaled_bias(float bias) {
  const float scaled = bias * kLog2e;
  return fabsf(scaled) > kMaxFloat && fabsf(bias) < kInfinity ? copysignf(kMaxFloat, bias) : scaled;
}
// Score x of a key with this bias, as finish_score() rounds it. A NaN under -inf does not stay.
__device__ inline float with_bias(float x, float bias) {
  return bias == -kInfinity ? bias : __fadd_rn(x, scaled_bias(bias));
}

// A query head's sink in the log2 domain; -inf: none.
__device__ inline float sink_of(const ScoreParams& s, std::int64_t q_head) {
  return s.sinks ? load(s.sinks, s.sinks_type, q_head * s.sinks_stride) * kLog2e : -kInfinity;
}
__device__ inline float sink_of(const Head& head, const Row& row) {
  return sink_of(head.p.score, row.q_head);
}

// The scale of a row's query; 1 without scales. What is not finite becomes NaN, so that no key hides behind a score of
// -inf.
__device__ inline float query_scale(const Head& head, const Row& row) {
  if (!head.p.q_scale) return 1;
  const float x = head.p.q_scale[row_at(head.p.q_scale_stride, head, row)];
  return fmaf(x, 0, x);
}
// The factor of q.k, in the log2 domain.
__device__ inline float score_scale(const Head& head, const Row& row) {
  return head.p.score.scale_log2 * query_scale(head, row);
}

// What is subtracted from scores before 2^x: their maximum, or 0 where it is -inf.
__device__ inline float shift_of(float max) {
  return max == -kInfinity ? 0.f : max;
}

// The online softmax of every kernel: O and row_sum of a row are sums of weights 2^(score - row_max). After a block of
// keys whose largest score is `top`, row_max moves there, and sums of the blocks before are multiplied by
// rescale_factor(). Where weights of up to 2^threshold do no harm, row_max stays for as long as none is larger.
// (Kernels of codes, which round row_max to integers or predict it, say so where they do.)
__device__ inline float next_row_max(float row_max, float top, float threshold = 0) {
  if (threshold == 0) return fmaxf(row_max, top);
  return top > row_max + threshold ? top : row_max;
}
// The factor on sums relative to row_max `from`, to make them relative to `to`.
__device__ inline float rescale_factor(float from, float to) {
  return exp2_approx(from - shift_of(to));
}

// The lse of a row whose weights, relative to row_max, have this sum.
__device__ inline float lse_of(float row_max, float sum, float alibi_shift) {
  return sum == 0 ? -kInfinity : (row_max - alibi_shift + log2f(sum)) * kLn2;
}

// Finalizes a row whose weights, relative to its maximum, have this sum, with its sink: out is O * root_scale *
// root_scale / sum. root_scale is 1 unless the sink is so far above the maximum that fp32 cannot hold its weight.
struct FinalizedRow {
  float sum, root_scale, lse;
};
__device__ inline FinalizedRow finalize_row(float max, float sum, float sink, float alibi_shift) {
  const float row_max = shift_of(max), above = sink - row_max + alibi_shift;
  const float sink_lse = sink * kLn2 + sum * 0;  // NaN if sum is
  constexpr float kFar = 100;
  if (!(above <= kFar)) return {1, exp2_approx(above / -2) + (above - above), sink_lse};  // NaN if the sink is infinite
  const float all = sum + exp2_approx(above);
  return {all, 1, sum == 0 ? sink_lse : lse_of(row_max, all, alibi_shift)};
}

// A weight of -0 marks a hidden key. Times a finite value it adds nothing.
__device__ inline bool is_hidden(float weight) {
  return __float_as_uint(weight) == 0x80000000u;
}
__device__ inline float weight_of(float score, float row_max) {
  return score == -kInfinity ? -0.f : exp2_approx(score - row_max);
}

}  // namespace rapt::cuda
