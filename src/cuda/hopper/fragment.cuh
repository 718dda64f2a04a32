// Accumulator fragments of wgmma: reductions over a row, masking, and stores. Warp w of a warpgroup has rows 16 w to 16
// w + 15 of the 64, and lane i of it rows i / 4 and i / 4 + 8: element 4 j + 2 h + b of a product belongs to the h-th
// of these rows and column 8 j + 2 (i % 4) + b.
#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/hopper/tiles.cuh"

namespace rapt::cuda {

// Reduces over the four lanes that share a row.
template <class Combine>
__device__ float over_row(float x, Combine combine) {
  x = combine(x, __shfl_xor_sync(~0u, x, 1));
  return combine(x, __shfl_xor_sync(~0u, x, 2));
}

// The largest of a lane's first kCount numbers that belong to its h-th row.
template <int kCount, int kAll>
__device__ float max_of_row(const float (&s)[kAll], int h) {
  float max[4];  // four chains, or each instruction waits for the one before
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float pair = fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
    max[i % 4] = i < 4 ? pair : fmaxf(max[i % 4], pair);
  }
  return fmaxf(fmaxf(max[0], max[1]), fmaxf(max[2], max[3]));
}

// Bit i: `is` holds for row i of the warp's 16. Each lane gives it for its two rows.
__device__ inline unsigned rows_of_warp(const bool (&is)[2]) {
  const int lane = threadIdx.x % 32;
  // Four lanes share a row; lane i collects the bits of row i.
  const unsigned low = __ballot_sync(~0u, is[0]), high = __ballot_sync(~0u, is[1]);
  return __ballot_sync(~0u, lane < 16 && ((lane < 8 ? low : high) >> lane % 8 * 4 & 15) != 0);
}

// Stores two neighbouring columns of a row, of which `left` exist.
template <class T>
__device__ void store_pair(T* to, std::int64_t stride, int left, T low, T high) {
  if (left > 0) to[0] = low;
  if (left > 1) to[stride] = high;
}

// Stores the lane's share of the warp's rows of the output.
template <class C, int kOut>
__device__ void store_rows(const TileGrid& grid, const Tile<C>& tile, int warp_row, const float (&o)[kOut]) {
  constexpr int kSize = 2 * kOut;
  const AttentionParams& p = grid.p;
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // or the compiler computes addresses early, and spills them
  const bool odd = lane % 2, whole = grid.out_vector && p.dv == kSize;
  const std::int64_t stride = p.out_stride.d;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int64_t row = tile.row_info[warp_row + lane / 4 + 8 * h].out, out = row + lane % 4 * 2 * stride;
    const int left = row < 0 ? 0 : static_cast<int>(p.dv) - lane % 4 * 2;
    const auto low = [&](int j) { return o[j / 2 + 2 * h]; };
    const auto high = [&](int j) { return o[j / 2 + 2 * h + 1]; };
    const auto word = [&](int j) {
      return p.out_type == DType::f16 ? pack<__half>(low(j), high(j)) : pack<__nv_bfloat16>(low(j), high(j));
    };
    if (p.out_type == DType::f32) {
      float* const to = static_cast<float*>(p.out) + out;
      if (whole) {
#pragma unroll
        for (int j = 0; j < kSize; j += 8)
          if (row >= 0) *reinterpret_cast<float2*>(to + j) = make_float2(low(j), high(j));
      } else {
#pragma unroll
        for (int j = 0; j < kSize; j += 8) store_pair(to + j * stride, stride, left - j, low(j), high(j));
      }
    } else {
      auto* const to = static_cast<std::uint16_t*>(p.out) + out;
      if (whole) {
        // Neighbouring lanes exchange pairs, so that each stores four columns: even lanes from column j on, odd lanes
        // from j + 8.
#pragma unroll
        for (int j = 0; j < kSize; j += 16) {
          const std::uint32_t here = word(j), there = word(j + 8);
          const std::uint32_t got = __shfl_xor_sync(~0u, odd ? here : there, 1);
          const uint2 four = odd ? make_uint2(got, there) : make_uint2(here, got);
          if (row >= 0) *reinterpret_cast<uint2*>(to + j + (odd ? 6 : 0)) = four;
        }
      } else {
#pragma unroll
        for (int j = 0; j < kSize; j += 8)
          store_pair(to + j * stride, stride, left - j, static_cast<std::uint16_t>(word(j)),
                     static_cast<std::uint16_t>(word(j) >> 16));
      }
    }
  }
}

// Stores the warp's rows, in C::Element, to the place of its rows of Q in shared memory, which nobody reads any more:
// in panels of columns, for TMA to store.
template <class C, int kOut>
__device__ __forceinline__ void store_rows_to_shared(std::uint32_t first_row, const float (&o)[kOut]) {
  using T = typename C::Element;
  const int lane = threadIdx.x % 32;
  constexpr int kChunks = C::kPanel / 8;
  const std::uint32_t row = first_row + lane % 16 * C::kRowBytes;
#pragma unroll
  for (int j = 0; j < 2 * kOut; j += 16) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack<T>(o[j / 2 + 2 * i], o[j / 2 + 2 * i + 1]);
    const int place = chunk_place<C::kRowBytes>(lane % 8, (j / 8 + lane / 16) % kChunks);
    store_matrices(row + j / C::kPanel * (C::kRows * C::kRowBytes) + place * 16, words[0], words[1], words[2],
                   words[3]);
  }
  fence_async_proxy();
  __syncwarp();
}

// Calls finish(j, four) for all scores, where `four` are a lane's scores of columns [j, j + 8). Registers cannot be
// indexed: each pass handles the first four and shifts the others down, so that the code of `finish` exists once.
template <int kScores, class Finish>
__device__ __forceinline__ void for_each_four(float (&s)[kScores], Finish finish) {
#pragma unroll 1
  for (int j = 0; j < 2 * kScores; j += 8) {
    float four[4] = {s[0], s[1], s[2], s[3]};
    finish(j, four);
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = i + 4 < kScores ? s[i + 4] : four[i + 4 - kScores];
  }
}

// The warp's first row in its tile: each warpgroup of 128 threads has 64 rows.
template <class C>
__device__ int first_row_of_warp() {
  return static_cast<int>(threadIdx.x / 32 * 16) - C::kLoadThreads / 2;
}

// Online softmax: a lane's share of O and of the statistics of its two rows, while its warpgroup goes through their key
// blocks.
template <class C>
struct SoftmaxState {
  static constexpr int kScores = C::kKeys / 2, kOut = C::kColumns / 2;

  const int lane, warp_row, column;  // warp_row: first row of the warp; column: the lane's first of each eight
  float o[kOut];
  float row_max[2], row_sum[2], rescale[2];  // the shift; the sum of weights over the lane's columns; the factor of the
                                             // shift's last move on O and row_sum

  __device__ SoftmaxState() : lane(threadIdx.x % 32), warp_row(first_row_of_warp<C>()), column(lane % 4 * 2) {}
  __device__ int row(int h) const { return warp_row + lane / 4 + 8 * h; }

  // Before a tile's first block: the sink counts like a key's score.
  __device__ void begin(const TileGrid& grid, const TileOf<C>& tile) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max[h] = tile.sink(grid, row(h));
      row_sum[h] = lane % 4 == 0 && row_max[h] != -kInfinity ? C::kOne : 0.f;
    }
  }
  // Moves row h's shift to `max`, usually the largest score of a block, if that exceeds the shift by more than
  // kRescaleThreshold. Returns the addend of scores before 2^x.
  __device__ float update_shift(int h, float max) {
    const float before = row_max[h];
    row_max[h] = next_row_max(before, max, C::kRescaleThreshold);
    rescale[h] = rescale_factor(before, row_max[h]);
    return C::kShift - shift_of(row_max[h]);
  }
};

}  // namespace rapt::cuda
