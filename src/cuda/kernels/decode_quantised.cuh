// Attention of few rows over quantised keys and values: split-KV like attention_decode_f32, on tensor cores. A warp
// takes a step of the split's keys at a time through a ring of its own, so that no warp waits for another before the
// split is done.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels/kernels.hpp"
#include "cuda/kernels/quantised_rows.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

// A warp's share of the block's rows of Q, zeros past the last column: first read, all at once, and later put into
// shared memory in components, their columns in the order that codes come in. Past the last row it is there once more:
// nobody takes its results.
template <class C>
struct QueryLoader {
  static constexpr int kOwn = C::kRows / kQuantisedWarps, kPairs = C::kSize / 64;  // rows; pairs of a lane's columns
  const DType type;
  std::uint32_t bits[kOwn][kPairs][2];

  __device__ static unsigned row(unsigned i) { return threadIdx.x / 32 + i * kQuantisedWarps; }
  __device__ static unsigned place(unsigned n) { return threadIdx.x % 32 * 2 + 64 * n; }

  __device__ explicit QueryLoader(const SplitBlock& block) : type(block.head.p.q_type) {
    if (C::kComponents > 1 && type == DType::f32) read<std::uint32_t>(block);
    else if (C::kComponents == 1 && type == DType::f8e4m3) read<std::uint8_t>(block);
    else read<std::uint16_t>(block);
  }
  __device__ void store(std::uint32_t q) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const auto& [even, odd] = bits[i][n];
        std::uint32_t components[C::kComponents];
        if constexpr (C::kComponents == 1) {
          components[0] = __byte_perm(even, odd, 0x5410);
        } else {
          float low = number(even), high = number(odd);
          split(low, high, components);
        }
#pragma unroll
        for (int component = 0; component < C::kComponents; ++component)
          store4(q + (component * C::kRows + row(i)) * C::kQueryPitch + 2 * place(n), components[component]);
      }
  }

 private:
  // Queries of f8e4m3 are numbers of bf16 exactly.
  __device__ static std::uint32_t in_bf16(std::uint8_t code) {
    return __float_as_uint(code_of_byte(code, DType::f8e4m3)) >> 16;
  }
  template <class Bits>
  __device__ static Bits in_bf16(Bits x) {
    return x;
  }
  __device__ float number(std::uint32_t x) const {
    return type == DType::f32 ? __uint_as_float(x) : __half2float(__ushort_as_half(static_cast<std::uint16_t>(x)));
  }
  template <class Bits>
  __device__ __forceinline__ void read(const SplitBlock& block) {
    const AttentionParams& p = block.head.p;
    const auto* const data = static_cast<const Bits*>(p.q);
    const auto last_column = static_cast<unsigned>(p.d - 1);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int r = min(block.row_begin + static_cast<int>(row(i)), block.row_count - 1);
      const Bits* const from = data + row_at(p.q_stride, block.head, block.row(r));
#pragma unroll
      for (int n = 0; n < kPairs; ++n)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          constexpr unsigned kChunk = C::Coding::kChunk;
          const unsigned at = place(n) + b;
          const unsigned column = at / kChunk * kChunk + C::Coding::column_at(at % kChunk / 16, at % 16);
          const std::uint32_t x = in_bf16(from[min(column, last_column) * p.q_stride.d]);
          bits[i][n][b] = column <= last_column ? x : 0;
        }
    }
  }
};

// Sums of each unit's columns of the rows of Q, for keys with zeros: [units][kRows].
template <class C>
__device__ void sum_queries(std::uint32_t q, float* sums) {
  for (int i = threadIdx.x; i < C::kSize / kGroupUnit * C::kRows; i += kQuantisedThreads) {
    float sum = 0;
#pragma unroll
    for (int component = C::kComponents - 1; component >= 0; --component)
#pragma unroll 4
      for (int pair = 0; pair < kGroupUnit / 2; ++pair) {
        const int unit = i / C::kRows, row = component * C::kRows + i % C::kRows;
        const auto two = __float_as_uint(load4(q + row * C::kQueryPitch + unit * 2 * kGroupUnit + 4 * pair));
        sum += __uint_as_float(two << 16), sum += __uint_as_float(two & 0xffff0000u);
      }
    sums[i] = sum;
  }
}

template <class C>
__global__ void __launch_bounds__(kQuantisedThreads, C::kBlocks)
    decode_quantised(const __grid_constant__ QuantisedParams params) {
  extern __shared__ __align__(256) std::uint8_t shared[];
  __shared__ SplitRows<C::kRows> rows;
  __shared__ WarpResults<kQuantisedWarps, C::kRows> results;
  __shared__ float q_sums[C::kSize / kGroupUnit * C::kRows], q_scales[C::kRows];
  const AttentionParams& p = params.p;
  let_next_start();
  const SplitBlock block(p, params.partials, params.grid, C::kRows);
  if (!block.exists) return;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const std::uint32_t rings = shared_address(shared), q = rings + kQuantisedWarps * C::kSlots * params.slot_bytes;
  const QueryLoader<C> queries(block);  // before keys, or they come behind these
  const CodeRing<C> ring(params, block, rings);

  // The ring has K and V of the warp's steps in turn. As soon as one is read, the next that is not there yet comes to
  // its place: of an odd number of slots, V to K's and K to V's.
  constexpr int kAhead = C::kSlots / 2 * kQuantisedWarps * C::kStepKeys, kStride = kQuantisedWarps * C::kStepKeys;
  constexpr bool kOdd = C::kSlots % 2 != 0;
  const int end = ring.end;
  int key = (ring.begin / C::kStepKeys + warp) * C::kStepKeys;  // the first of a step
  std::uint32_t slot = ring.data;
#pragma unroll 1
  for (int i = 0, step = key; i < C::kSlots; i += 2, step += kStride) {
    const RowPlace at = ring.place(step);
    ring.template load<false>(slot, step, at), slot = ring.after(slot);
    if (i + 1 < C::kSlots) ring.template load<true>(slot, step, at), slot = ring.after(slot);
  }
  RowPlace later = ring.place(key + kAhead);
  rows.find(block);
  if (C::kComponents == 1 && p.q_scale && threadIdx.x < C::kRows)
    q_scales[threadIdx.x] =
        query_scale(block.head, block.row(min(block.row_begin + static_cast<int>(threadIdx.x), block.row_count - 1)));
  queries.store(q);
  __syncthreads();
  if (params.k.quant.zero) {
    sum_queries<C>(q, q_sums);
    __syncthreads();
  }
  const int all_from = __reduce_max_sync(~0u, rows.from[lane % C::kRows]);
  const int all_to = __reduce_min_sync(~0u, rows.to[lane % C::kRows]);

  QuantisedRows<C> own(params, q, q_sums);
  const auto wait = [] {  // for the tile in `slot`
    copy_wait<C::kSlots - 1>();
    __syncwarp();
  };
  const auto replace = [&](auto values, int step, const RowPlace& at) {
    __syncwarp();
    ring.template load<values>(slot, step, at);
    slot = ring.after(slot);
  };
#pragma unroll 1
  for (; key < end; key += kStride) {
    const RowPlace soon = later;
    later = ring.place(key + kAhead + kStride);  // before it is wanted: it may be in a table
    wait();
    own.multiply_keys(slot);
    replace(std::bool_constant<kOdd>(), key + kAhead, soon);
    if (C::kComponents == 1 && p.q_scale) own.scale_rows(q_scales);
#pragma unroll
    for (float& x : own.s) x *= p.score.scale_log2;
    if (params.modified || key < all_from || key + C::kStepKeys > all_to) {
      for_each_four(own.s, [&](int place, float(&four)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = own.row(place / 8 % C::kTiles, e % 2), j = key + own.key(place / 8 / C::kTiles, e / 2);
          if (j < rows.from[row] || j >= rows.to[row]) four[e] = -kInfinity;
          else if (params.modified) four[e] = rows.finish(block.head, row, block.first_key + j, four[e]);
        }
      });
    }
    own.softmax();
    wait();
    own.add_values(slot);
    replace(std::bool_constant<!kOdd>(), kOdd ? key + kAhead + kStride : key + kAhead, kOdd ? later : soon);
  }
  copy_wait<0>();

  // The warps' results together.
#pragma unroll
  for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float sum = own.over_keys(own.l[tile][b], Sum());
      if (lane < 4) results.m[warp][own.row(tile, b)] = own.m[tile][b], results.l[warp][own.row(tile, b)] = sum;
    }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < C::kTiles; ++tile)
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int row = own.row(tile, b);
      const float factor = exp2_approx(own.m[tile][b] - shift_of(results.top(0, 1, row)));
#pragma unroll
      for (int i = 0; i < C::kSize / 16; ++i)  // [kRows][kSize], where keys were
#pragma unroll
        for (int h = 0; h < 2; ++h)
          store4(ring.data + 4 * (row * C::kSize + own.column(i, h)),
                 __float_as_uint(own.o[i][tile][2 * h + b] * factor));
    }
  __syncthreads();
  results.store(block, params.partials, 1, reinterpret_cast<const float*>(shared), C::kSize, ring.bytes / 4);
}

}  // namespace rapt::cuda
