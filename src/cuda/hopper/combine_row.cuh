// Rows from their partial results over splits of their keys,
//   m = max m_i,  l = sum 2^(m_i - m) l_i,  out = sum 2^(m_i - m) o_i / l.
//
// Partial results know hidden keys by weights of 0, but 0 times NaN is NaN, and scores of 2^20 and more have lost
// digits: rows whose results are not finite, or which had such scores, are fallback rows.
#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/hopper/splits.cuh"
#include "cuda/tile/fallback_rows.cuh"

namespace rapt::cuda {

constexpr int kCombineWarps = 8;  // that a row with more splits has
static_assert(kMaxSplits <= 32 * kCombineWarps, "a thread for each split");

// The sums of a row of up to kMaxSize columns, by a thread block's kWarps warps, kCombineWarps of them; or by one,
// where splits are no more than that: then the bits are the same. Of O those of each warp, which relate to `top`, as
// `l` does.
template <int kMaxSize, int kWarps>
struct RowSums {
  alignas(16) float o[kWarps][kMaxSize];
  float of_warp[kWarps], factor[kWarps * 32];

  __device__ static int thread() { return threadIdx.x % (32 * kWarps); }
  __device__ static void sync() {
    if constexpr (kWarps == 1) __syncwarp();
    else __syncthreads();
  }
  __device__ static bool any(bool x) {
    if constexpr (kWarps == 1) return __any_sync(~0u, x);
    else return __syncthreads_or(x);
  }

  // Over all of the row's threads, the same for each.
  template <class Combine>
  __device__ float over_row(float x, Combine combine) {
    for (int bit = 16; bit > 0; bit /= 2) x = combine(x, __shfl_xor_sync(~0u, x, bit));
    sync();
    if (thread() % 32 == 0) of_warp[thread() / 32] = x;
    sync();
    x = of_warp[0];
    for (int warp = 1; warp < kWarps; ++warp) x = combine(x, of_warp[warp]);
    return x;
  }

  // From partial results. Each warp sums so many in their order; one warp alone, too, those that several would.
  __device__ void add_splits(const AttentionParams& p, const Partials& partials, const float* partial, int count,
                             float& top, float& l) {
    const int warp = thread() / 32, each = (count + kCombineWarps - 1) / kCombineWarps;
    const bool exists = thread() < count;
    const float* const own = partial + thread() * partials.floats + Partials::m_at(p);
    const float m = exists ? own[0] : -kInfinity;
    l = exists ? own[1] : 0;
    top = over_row(m, Max());
    factor[thread()] = exp2_approx(m - shift_of(top));
    l = over_row(l * factor[thread()], Sum());
    for (int column = 4 * (thread() % 32); column < p.dv; column += 128) {
      float4 sum = make_float4(0, 0, 0, 0);
      const auto add = [&](int i, auto combine) {
        const float4 x = *reinterpret_cast<const float4*>(partial + i * partials.floats + column);
        const float f = factor[i];
        sum =
            make_float4(combine(f, x.x, sum.x), combine(f, x.y, sum.y), combine(f, x.z, sum.z), combine(f, x.w, sum.w));
      };
      if constexpr (kWarps == 1) {
#pragma unroll 8
        for (int i = 0; i < count; ++i)
          add(i, [](float f, float x, float sum) { return __fadd_rn(sum, __fmul_rn(f, x)); });
      } else {
#pragma unroll 8
        for (int i = warp * each; i < min(count, (warp + 1) * each); ++i) add(i, fmaf);
      }
      *reinterpret_cast<float4*>(&o[warp][column]) = sum;
    }
    sync();
  }

  __device__ float column(int i) const {
    float sum = 0;
    for (const auto& of_warp : o) sum += of_warp[i];
    return sum;
  }
  // Out and lse.
  __device__ void store_row(const Head& head, const Row& row, float top, float l) const {
    const AttentionParams& p = head.p;
    const Finish f = finish_row(top, l, sink_of(head, row), alibi_shift_log2(head, row));
    const float inverse = 1 / f.sum;
    const std::int64_t out = row_at(p.out_stride, head, row);
    for (int i = thread(); i < p.dv; i += 32 * kWarps)
      store(p.out, p.out_type, out + i * p.out_stride.d, f.sum == 0 ? 0.f : column(i) * f.half * f.half * inverse);
    if (p.lse && thread() == 0) p.lse[row_at(p.lse_stride, head, row)] = f.lse;
  }
};

// Out and lse of row `row` of the sequence and kv head, from what its splits have left of it. False: it is a fallback
// row, for attend_rows() in the end: a call from here would take registers even where there are none.
template <int kMaxSize, int kWarps>
__device__ bool combine_row(const AttentionParams& p, const Partials& partials, const Head& head, int row, int splits,
                            RowSums<kMaxSize, kWarps>& sums) {
  float top, l;
  sums.add_splits(p, partials, partials.at(head, row, 0), splits, top, l);
  bool bad = (top != -kInfinity && fabsf(top) >= kHugeScore) || !is_finite(l);
  for (int i = sums.thread(); i < p.dv; i += 32 * kWarps) bad |= !is_finite(sums.column(i));
  bad = sums.any(bad);
  if (!bad) sums.store_row(head, row_of(head, row), top, l);
  return !bad;
}

// What attention_combine does, to the bit, for the rows of a sequence and kv head whose splits are the cluster's. Four
// warps of each of its thread blocks call this, numbered by `warp`, and each does a row at a time.
template <class T, int kMaxSize>
__device__ void combine_in_cluster(const AttentionParams& p, const Partials& partials, const Head& head, int warp,
                                   RowSums<kMaxSize, 1>& sums) {
  const int rows = split_rows(head), splits = SplitKeys(head, partials.rule).count;
  const int step = 4 * static_cast<int>(cluster_size());
  unsigned bad = 0;  // of the warp's rows
  int first = 4 * static_cast<int>(cluster_rank()) + warp;
#pragma unroll 1
  for (int i = 0, row = first; row < rows; ++i, row += step)
    if (!combine_row(p, partials, head, row, splits, sums)) bad |= 1u << i;
#pragma unroll 1
  for (; bad != 0; bad >>= 1, first += step)
    if (bad & 1) attend_rows<T, kMaxSize, true>(p, static_cast<int>(head.b), static_cast<int>(head.hk), first, 1);
}

}  // namespace rapt::cuda
