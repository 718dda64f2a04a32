// attention_latent's stores where a thread block has all keys of its rows, and nothing is merged: from registers.
#pragma once

#include "cuda/kernels/latent_softmax.cuh"
#include "cuda/tile/fallback_rows.cuh"

namespace rapt::cuda {

// Stores O and lse, by the math warps: each its rows and its half of the columns. O goes through the place of the
// weights, 32 columns of a warp at a time, so that lanes store 16 bytes. The same bits as merge() stores.
template <class T, bool kByTma>
__device__ __forceinline__ void store_rows(const LatentParams& params, const SplitBlock& block, LatentShared& shared,
                                           LatentSoftmax<T, kByTma>& math) {
  constexpr int kColumns = 32, kRowBytes = 2 * kColumns;
  const AttentionParams& p = params.p;
  const Head& head = block.head;
  const int rows = block.row_count - block.row_begin, lane = math.lane;
  const int warp = threadIdx.x / 32 - 4;
  const std::uint32_t staging = math.p + warp * (16 * kRowBytes);
  float factor[2], nan_or_0[2];
#pragma unroll
  for (float& x : math.o) x += 0.f;  // -0 becomes 0, as in merge()'s sums
  std::uint16_t* to[2];              // of the lane's two rows, which it also stores
  bool exists[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = math.row(h);
    exists[h] = r < rows;
    to[h] = static_cast<std::uint16_t*>(p.out) + shared.rows.row_at(head, r, p.out_stride);
    Row row;
    row.token = shared.rows.token[r], row.q_head = shared.rows.q_head[r];
    const float top = math.row_max[h] - math.kShift, sum = shared.row_sum[0][r] + shared.row_sum[1][r];
    const FinalizedRow f = finalize_row(top, sum, sink_of(head, row), alibi_shift_log2(head, row));
    nan_or_0[h] = sum * 0 + (top != -kInfinity && fabsf(top) >= kHugeScore ? NAN : 0.f);
    factor[h] = f.sum == 0 ? 0.f : 1 / f.sum;
    if (f.root_scale != 1)
#pragma unroll
      for (int n = 2 * h; n < math.kOut; n += 4)
        math.o[n] = math.o[n] * f.root_scale * f.root_scale,
        math.o[n + 1] = math.o[n + 1] * f.root_scale * f.root_scale;
    if (p.lse && math.half == 0 && lane % 4 == 0 && exists[h]) p.lse[shared.rows.row_at(head, r, p.lse_stride)] = f.lse;
  }
  const auto place = [&](int row, int chunk) { return staging + row * kRowBytes + (chunk ^ (row / 2 % 4)) * 16; };
#pragma unroll
  for (int part = 0; part < kLatentMaxValueHeadDim / 2 / kColumns; ++part) {
    const int first = math.half * (kLatentMaxValueHeadDim / 2) + part * kColumns;
    if (first >= p.dv) break;
    std::uint32_t packed[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const float a = math.o[part * kColumns / 2 + 2 * i], b = math.o[part * kColumns / 2 + 2 * i + 1];
      float& nan = nan_or_0[i % 2];
      nan = fmaf(a, 0, nan), nan = fmaf(b, 0, nan);
      packed[i] = pack<T>(a * factor[i % 2], b * factor[i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_matrices(place(lane % 16, 2 * i + lane / 16), packed[4 * i], packed[4 * i + 1], packed[4 * i + 2],
                     packed[4 * i + 3]);
    __syncwarp();
    const int column = first + lane % 4 * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 x = load16(place(lane / 4 + 8 * h, lane % 4));
      if (exists[h] && column < p.dv) *reinterpret_cast<float4*>(to[h] + column) = x;
    }
    __syncwarp();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (const int r = math.row(h); nan_or_0[h] != 0 && exists[h]) atomicOr(&shared.fallback[r / 32], 1u << r % 32);
  named_sync(kMathBarrier, kMathThreads);  // rows have been stored before they are stored again
  constexpr int kWarpRows = kRows / kMathWarps;
  const int of_warp = warp * kWarpRows;
  unsigned fallback = shared.fallback[of_warp / 32] >> of_warp % 32 & ((1u << kWarpRows) - 1);
#pragma unroll 1
  for (int row = block.row_begin + of_warp; fallback != 0; fallback >>= 1, ++row)
    if (fallback & 1)
      recompute_rows<T, kLatentMaxValueHeadDim, true>(p, static_cast<int>(head.b), static_cast<int>(head.hk), row, 1);
}

}  // namespace rapt::cuda
