// Combines the partial results of a row over the splits of its keys:
//   row_max = max row_max_i,  row_sum = sum 2^(row_max_i - row_max) row_sum_i,
//   out = sum 2^(row_max_i - row_max) o_i / row_sum.
//
// Each thread has four columns of a row. Combining comes last, when its time goes to memory and to instructions that
// are in no cache: so all loads come first, and the code is short.
//
// In partial results hidden keys have weights of 0, but 0 times NaN is NaN; and scores of 2^20 and more have lost
// digits. Rows whose results are not finite, or that had such scores, are fallback rows.
#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/hopper/splits.cuh"
#include "cuda/tile/fallback_rows.cuh"

namespace rapt::cuda {

constexpr int kCombineWarps = 8;        // warps that combine a row of many splits together, each a group of splits
constexpr int kMaxCombinedSplits = 32;  // splits that a warp combines: a lane for each
static_assert(kMaxSplits <= kMaxCombinedSplits * kCombineWarps);
constexpr int kMaxCombineCluster = 8;  // thread blocks of a cluster that combine

// A row's largest score, its sum of weights relative to that, and four columns of O.
struct RowSums {
  float row_max, row_sum;
  float4 o;
};

// Sums up a row, by a warp: row_max and row_sum of all its splits; O, from `column` on if that `exists`, of splits
// [first, end), up to kMaxCombinedSplits. Each group of splits_per_warp splits is summed by itself first, so that bits
// do not depend on how many warps do the row. kAtOnce splits are loaded at a time.
template <int kAtOnce>
__device__ __forceinline__ RowSums sum_row(const AttentionParams& p, const PartialResults& partials, const float* row,
                                           int splits, int first, int end, int splits_per_warp, int column,
                                           bool exists) {
  const int lane = threadIdx.x % 32, floats = static_cast<int>(partials.floats);
  const float* const numbers = row + PartialResults::stats_offset(p);  // row_max and row_sum of the first split
  const auto m_and_l = [&](int i) { return *reinterpret_cast<const float2*>(numbers + i * floats); };
  const float2 of_lane = lane < splits ? m_and_l(lane) : make_float2(-kInfinity, 0);
  const float m_of_lane = first + lane < end ? numbers[(first + lane) * floats] : -kInfinity;
  float4 o[kAtOnce];
  const auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      o[i] = exists && from + i < end ? *reinterpret_cast<const float4*>(row + (from + i) * floats + column)
                                      : make_float4(0, 0, 0, 0);
  };
  load(first);
  RowSums all = {of_lane.x, 0, {0, 0, 0, 0}};
#pragma unroll 1
  for (int i = lane + 32; i < splits; i += 32) all.row_max = fmaxf(all.row_max, m_and_l(i).x);
  all.row_max = over_lanes(all.row_max, Max());
  const auto factor = [to = all.row_max](float row_max) { return rescale_factor(row_max, to); };
  all.row_sum = of_lane.y * factor(of_lane.x);
#pragma unroll 1
  for (int i = lane + 32; i < splits; i += 32) all.row_sum = fmaf(m_and_l(i).y, factor(m_and_l(i).x), all.row_sum);
  all.row_sum = over_lanes(all.row_sum, Sum());

  const float factor_of_lane = factor(m_of_lane);
  float4 group = make_float4(0, 0, 0, 0);
  int remaining = splits_per_warp;
#pragma unroll 1
  for (int from = first; from < end;) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float f = __shfl_sync(~0u, factor_of_lane, from + i - first);
      const auto add = [f](float& sum, float x) { sum = fmaf(f, x, sum); };
      add(group.x, o[i].x), add(group.y, o[i].y), add(group.z, o[i].z), add(group.w, o[i].w);
      if (--remaining > 0) continue;
      all.o.x += group.x, all.o.y += group.y, all.o.z += group.z, all.o.w += group.w;
      group = make_float4(0, 0, 0, 0), remaining = splits_per_warp;
    }
    if ((from += kAtOnce) < end) load(from);
  }
  all.o.x += group.x, all.o.y += group.y, all.o.z += group.z, all.o.w += group.w;
  return all;
}

// What turns a row's sums into results, and the offsets of those.
struct RowFinalizer {
  float sink, alibi_shift;
  std::int64_t out, lse;

  __device__ static RowFinalizer of(const Head& head, int number) {
    const Row row = row_of(head, number);
    const AttentionParams& p = head.p;
    return {sink_of(head, row), alibi_shift_log2(head, row), row_at(p.out_stride, head, row),
            p.lse ? row_at(p.lse_stride, head, row) : 0};
  }
  // Stores out, from `column` on if that `exists`, and lse. False: it is a fallback row.
  __device__ __forceinline__ bool store(const AttentionParams& p, const RowSums& sums, int column, bool exists) const {
    const FinalizedRow f = finalize_row(sums.row_max, sums.row_sum, sink, alibi_shift);
    const float output_scale = 1 / f.sum;
    bool trusted = (sums.row_max == -kInfinity || fabsf(sums.row_max) < kHugeScore) && is_finite(sums.row_sum);
    const auto finish = [&](float x, int i) {
      trusted &= is_finite(x) || column + i >= p.dv;
      return f.sum == 0 ? 0.f : x * f.root_scale * f.root_scale * output_scale;
    };
    const float4 x = make_float4(finish(sums.o.x, 0), finish(sums.o.y, 1), finish(sums.o.z, 2), finish(sums.o.w, 3));
    if (exists) store_columns(p.out, p.out_type, out + column * p.out_stride.d, p.out_stride.d, x, p.dv - column);
    if (p.lse && column == 0) p.lse[lse] = f.lse;
    return trusted;
  }
};

// Combines row `row` of a sequence and kv head, of up to kMaxCombinedSplits splits, by a warp. False: it is a fallback
// row; the caller recomputes it at its end, since a call here would take registers.
template <int kAtOnce>
__device__ __forceinline__ bool combine_row(const AttentionParams& p, const PartialResults& partials, const Head& head,
                                            int row, int splits) {
  const RowFinalizer end = RowFinalizer::of(head, row);
  bool trusted = true;
  const int splits_per_warp = (splits + kCombineWarps - 1) / kCombineWarps;
  const float* const partial = partials.at(head, row, 0);
#pragma unroll 1
  for (int first = 0; first < p.dv; first += 128) {
    const int column = first + static_cast<int>(threadIdx.x % 32) * 4;
    const RowSums all =
        sum_row<kAtOnce>(p, partials, partial, splits, 0, splits, splits_per_warp, column, column < p.dv);
    trusted &= end.store(p, all, column, column < p.dv);
  }
  return __all_sync(~0u, trusted);
}

// attention_combine, to the bit, for the rows of a sequence and kv head whose splits are the cluster's, up to
// kMaxCombinedSplits. Called by four warps of each of its thread blocks, numbered by `warp`; each does a row at a time.
template <class T, int kMaxSize>
__device__ void combine_in_cluster(const AttentionParams& p, const PartialResults& partials, const Head& head,
                                   int splits, int warp) {
  const int rows = decode_rows(head);
  const int step = 4 * static_cast<int>(cluster_size());
  unsigned fallback = 0;  // bit i: the warp's i-th row falls back
  int first = 4 * static_cast<int>(cluster_rank()) + warp;
#pragma unroll 1
  for (int i = 0, row = first; row < rows; ++i, row += step)
    if (!combine_row<8>(p, partials, head, row, splits)) fallback |= 1u << i;
  __syncwarp();  // the rows have been stored before they are stored again
#pragma unroll 1
  for (; fallback != 0; fallback >>= 1, first += step)
    if (fallback & 1)
      recompute_rows<T, kMaxSize, true>(p, static_cast<int>(head.b), static_cast<int>(head.hk), first, 1);
}

}  // namespace rapt::cuda
