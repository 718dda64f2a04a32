// Rows in a warpgroup's registers, as wgmma leaves them. Of the 64, warp w has rows 16 w and on, and lane i of it rows
// i / 4 and i / 4 + 8: element 4 j + 2 h + b of a product is in the h-th of them and column 8 j + 2 (i % 4) + b.
#pragma once

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/schedule.cuh"

namespace rapt::cuda {

// Over the four lanes that share rows.
template <class Combine>
__device__ float over_row(float x, Combine combine) {
  x = combine(x, __shfl_xor_sync(~0u, x, 1));
  return combine(x, __shfl_xor_sync(~0u, x, 2));
}

// Of the h-th row's numbers in a lane.
template <int kCount>
__device__ float max_of_row(const float (&s)[kCount], int h) {
  float top[4];  // four at a time, or each waits for the one before
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float pair = fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
    top[i % 4] = i < 4 ? pair : fmaxf(top[i % 4], pair);
  }
  return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
}

inline bool is_vector(const void* data, const Strides& s, std::int64_t size) {
  const std::int64_t each = 16 / size;
  return s.d == 1 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && s.b % each == 0 && s.h % each == 0 &&
         s.s % each == 0;
}

static_assert(kGroupRows == kSimtRows, "a warpgroup's rows are a tile of attention_simt");

// Sets a warp's part of `redo`, which has a bit for each row. Out of line, or all that does not change from tile to
// tile is worked out early and takes registers.
static __device__ __noinline__ void set_redo(std::uint16_t* redo, const AttentionParams& p, const Place& tile, int row,
                                             unsigned bits) {
  redo[4 * Tiling<kGroupRows>::number(p, tile.b, tile.hk, row) + row / 16 % 4] = static_cast<std::uint16_t>(bits);
}

// Notes the rows that attention_simt must do again: `bad` of the lane's two, of the warp that begins with row `own`.
__device__ inline void mark_rows(std::uint16_t* redo, const AttentionParams& p, const Place& tile, int own,
                                 const bool (&bad)[2]) {
  const int lane = threadIdx.x % 32;
  // Four lanes have a row between them; lane i collects those of row i of the warp's 16.
  const unsigned low = __ballot_sync(~0u, bad[0]), high = __ballot_sync(~0u, bad[1]);
  const unsigned rows = __ballot_sync(~0u, lane < 16 && ((lane < 8 ? low : high) >> lane % 8 * 4 & 15) != 0);
  if (lane == 0 && tile.row + own / kGroupRows * kGroupRows < tile.rows) set_redo(redo, p, tile, tile.row + own, rows);
}

// Two neighbouring columns of a row to `to`, of which `left` are there.
template <class T>
__device__ void store_pair(T* to, std::int64_t stride, int left, T low, T high) {
  if (left > 0) to[0] = low;
  if (left > 1) to[stride] = high;
}

// The lane's share of the warp's rows of the output; `vector`: they are contiguous and aligned to 16 bytes.
template <class C, int kOut>
__device__ void store_rows(const AttentionParams& p, bool vector, const Tile<C>& tile, int own,
                           const float (&o)[kOut]) {
  constexpr int kSize = 2 * kOut;
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // or addresses are worked out long before, and wait in spilled registers
  const bool odd = lane % 2, whole = vector && p.dv == kSize;
  const std::int64_t step = p.out_stride.d;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int64_t row = tile.of_row[own + lane / 4 + 8 * h].out, out = row + lane % 4 * 2 * step;
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
        for (int j = 0; j < kSize; j += 8) store_pair(to + j * step, step, left - j, low(j), high(j));
      }
    } else {
      auto* const to = static_cast<std::uint16_t*>(p.out) + out;
      if (whole) {
        // Neighbours trade, for four columns in a row each: even lanes those from j on, odd ones from j + 8.
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
          store_pair(to + j * step, step, left - j, static_cast<std::uint16_t>(word(j)),
                     static_cast<std::uint16_t>(word(j) >> 16));
      }
    }
  }
}

}  // namespace rapt::cuda
