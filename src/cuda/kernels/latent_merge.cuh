// attention_latent's merge: each thread block of a cluster adds up the cluster's results of some of the rows, and
// stores them: to the output if no sequence has more than one split, else as partial results for attention_combine.
#pragma once

#include "cuda/kernels/latent_config.cuh"
#include "cuda/tile/fallback_rows.cuh"

namespace rapt::cuda {

// Merges a row's row_max and row_sum over the thread blocks that have keys, by one thread; and, if there is nothing to
// combine, works out its lse and what turns O into results.
__device__ __forceinline__ void merge_sums(const LatentParams& params, const Head& head,
                                           const SplitRows<kRows>& of_rows, int row, int sharers,
                                           std::uint32_t results_at, LatentResults& results) {
  const AttentionParams& p = params.p;
  float row_max[kMaxCluster], row_sum[kMaxCluster], top = -kInfinity, sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxCluster; ++i) {
    const std::uint32_t there = in_cluster(results_at + row * 4, min(i, sharers - 1));
    row_max[i] = i < sharers ? cluster_load4(there) : -kInfinity, row_sum[i] = cluster_load4(there + kRows * 4);
    top = fmaxf(top, row_max[i]);
  }
#pragma unroll
  for (int i = 0; i < kMaxCluster; ++i) {
    const float factor = rescale_factor(row_max[i], top);
    if (i < sharers) sum = fmaf(row_sum[i], factor, sum);
    results.factor[row][i] = factor;
  }
  results.top[row] = top, results.sum[row] = sum;
  if (params.writes_output) {  // the same bits as attention_combine makes of a single split
    Row found;
    found.token = of_rows.token[row], found.q_head = of_rows.q_head[row];
    const FinalizedRow f = finalize_row(top, sum, sink_of(head, found), alibi_shift_log2(head, found));
    results.root_scale[row] = f.root_scale, results.output_scale[row] = f.sum == 0 ? 0.f : 1 / f.sum;
    results.out[row] = of_rows.row_at(head, row, p.out_stride);
    if (p.lse) p.lse[of_rows.row_at(head, row, p.lse_stride)] = f.lse;
  }
}

// Called by the math warps of thread block `rank` of `sharers`. `out` and `results_at`: where each thread block has
// left its O and LatentResults, as shared addresses; `block_out` and `results` are this block's own.
template <class T>
__device__ void merge(const LatentParams& params, const SplitBlock& block, LatentShared& shared, int sharers, int rank,
                      std::uint32_t out, const std::uint8_t* block_out, std::uint32_t results_at,
                      LatentResults& results) {
  constexpr int kFours = kLatentMaxValueHeadDim / 128;
  const AttentionParams& p = params.p;
  const Head& head = block.head;
  const SplitRows<kRows>& of_rows = shared.rows;
  const int rows = min(kRows, block.row_count - block.row_begin), thread = threadIdx.x - 128;
  if (const int row = rank + thread * sharers; row < rows)
    merge_sums(params, head, of_rows, row, sharers, results_at, results);
  named_sync(kMathBarrier, kMathThreads);

  const int lane = threadIdx.x % 32, column = 4 * lane, size = static_cast<int>(p.dv);
  const int first = rank + thread / 32 * sharers, step = kMathWarps * sharers;
  unsigned fallback = 0;  // bit i: the warp's i-th row falls back
  int number = -1;
#pragma unroll 2
  for (int row = first; row < rows; row += step) {
    ++number;
    float4 sum[kFours] = {};
#pragma unroll 1
    for (int i = 0; i < sharers; ++i) {
      const float factor = results.factor[row][i];
      float4 o[kFours];
      if (i == rank) {
#pragma unroll
        for (int n = 0; n < kFours; ++n)
          o[n] = *reinterpret_cast<const float4*>(block_out + row * kOutPitch + lane * 16 + n * 512);
      } else {
        const std::uint32_t there = in_cluster(out + row * kOutPitch + lane * 16, i);
#pragma unroll
        for (int n = 0; n < kFours; ++n) o[n] = cluster_load16(there + n * 512);
      }
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        const float4& x = o[n];
        sum[n].x = fmaf(factor, x.x, sum[n].x), sum[n].y = fmaf(factor, x.y, sum[n].y);
        sum[n].z = fmaf(factor, x.z, sum[n].z), sum[n].w = fmaf(factor, x.w, sum[n].w);
      }
    }
    const float top = results.top[row], row_sum = results.sum[row];
    if (!params.writes_output) {
      float* const to = params.partials.at(head, block.row_begin + row, block.split);
      const int stats_offset = static_cast<int>(PartialResults::stats_offset(p));
#pragma unroll
      for (int n = 0; n < kFours; ++n)
        if (column + 128 * n < stats_offset) keep16(to + column + 128 * n, sum[n]);
      if (lane == 0) *reinterpret_cast<float2*>(to + stats_offset) = make_float2(top, row_sum);
      continue;
    }
    const float root_scale = results.root_scale[row], output_scale = results.output_scale[row];
    const std::int64_t to = results.out[row];
    float nan_or_0[4] = {row_sum * 0};
    if (root_scale != 1) {
#pragma unroll
      for (float4& x : sum)
        x = make_float4(x.x * root_scale * root_scale, x.y * root_scale * root_scale, x.z * root_scale * root_scale,
                        x.w * root_scale * root_scale);
    }
    const auto add = [&](int i, float x) { nan_or_0[i] = fmaf(x, 0, nan_or_0[i]); };
    if (params.out_vector) {
      const bool is_half = p.out_type == DType::f16;
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        if (column + 128 * n >= size) break;
        float4& x = sum[n];
        add(0, x.x), add(1, x.y), add(2, x.z), add(3, x.w);
        x.x *= output_scale, x.y *= output_scale, x.z *= output_scale, x.w *= output_scale;
        if (p.out_type == DType::f32) {
          *reinterpret_cast<float4*>(static_cast<float*>(p.out) + to + column + 128 * n) = x;
        } else {
          *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(p.out) + to + column + 128 * n) =
              is_half ? make_uint2(pack<__half>(x.x, x.y), pack<__half>(x.z, x.w))
                      : make_uint2(pack<__nv_bfloat16>(x.x, x.y), pack<__nv_bfloat16>(x.z, x.w));
        }
      }
    } else {
      // Through the row's place in this thread block's O, so that lanes store neighbouring columns. Other thread blocks
      // read only rows that they merge.
      const std::uint32_t row_slot = out + row * kOutPitch;
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        store8(row_slot + lane * 16 + n * 512, sum[n].x, sum[n].y);
        store8(row_slot + lane * 16 + n * 512 + 8, sum[n].z, sum[n].w);
      }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < size; i += 32) {
        const float x = load4(row_slot + i * 4);
        add(0, x);
        store(p.out, p.out_type, to + i * p.out_stride.d, x * output_scale);
      }
    }
    const float any_nan = nan_or_0[0] + nan_or_0[1] + (nan_or_0[2] + nan_or_0[3]);
    const bool falls_back = __any_sync(~0u, any_nan != 0) || (top != -kInfinity && fabsf(top) >= kHugeScore);
    if (falls_back) fallback |= 1u << number;
  }
  __syncwarp();  // the rows have been stored before they are stored again
#pragma unroll 1
  for (int row = block.row_begin + first; fallback != 0; fallback >>= 1, row += step)
    if (fallback & 1)
      recompute_rows<T, kLatentMaxValueHeadDim, true>(p, static_cast<int>(head.b), static_cast<int>(head.hk), row, 1);
}

}  // namespace rapt::cuda
