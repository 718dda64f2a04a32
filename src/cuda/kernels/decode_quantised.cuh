// Attention of few rows over quantised keys and values: split-KV like attention_decode_f32, on tensor cores. K and V
// come to shared memory as they are. Every code is a number of bf16, exactly, and so is every query as one part, two or
// three; products are fp32, and what scales multiply is fp32, too: sums over a group's columns of K, and weights,
// before they are rounded to as many parts.
//
// A warp takes a step of the split's keys at a time through a ring of its own, so that no warp waits for another before
// the split is done. It computes S^T = K Q^T and O^T += V^T P^T, for up to 8 or 16 rows: what has 16 rows in a product
// is what is read. All m are integers: to change them multiplies by exact powers of two.
#pragma once

#include <cuda_runtime.h>

#include "cuda/hopper/rows.cuh"
#include "cuda/kernels/quantised_ring.cuh"

namespace rapt::cuda {

// x in parts, the largest first; leaves what they lack.
template <int kParts>
__device__ __forceinline__ void split(float& low, float& high, std::uint32_t (&parts)[kParts]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    parts[part] = pack<__nv_bfloat16>(low, high);
    low -= __uint_as_float(parts[part] << 16), high -= __uint_as_float(parts[part] & 0xffff0000u);
  }
}

// Rows of Q in parts, their columns in the order that codes come in; zeros where there are none. Where keys have zeros,
// sums of each group's columns: [groups][kRows].
template <class C>
__device__ void load_queries(const SplitBlock& block, const QuantisedSide& k, std::uint32_t q, float* sums) {
  const AttentionParams& p = block.head.p;
  const int lane = threadIdx.x % 32, d = static_cast<int>(p.d);
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < C::kRows; row += kQuantisedWarps) {
    const bool exists = block.row_begin + row < block.row_count;
    const std::int64_t from = exists ? row_at(p.q_stride, block.head, row_of(block.head, block.row_begin + row)) : 0;
    const auto at = [&](int column) {
      return exists && column < d ? load(p.q, p.q_type, from + column * p.q_stride.d) : 0.f;
    };
    for (int place = 2 * lane; place < C::kSize; place += 64) {
      constexpr int kChunk = C::Coding::kChunk;
      const int chunk = place / kChunk * kChunk, step = place % kChunk / 16;
      float low = at(chunk + C::Coding::column_at(step, place % 16));
      float high = at(chunk + C::Coding::column_at(step, place % 16 + 1));
      std::uint32_t parts[C::kParts];
      split(low, high, parts);
#pragma unroll
      for (int part = 0; part < C::kParts; ++part)
        store4(q + (part * C::kRows + row) * C::kQueryPitch + 2 * place, parts[part]);
    }
    if (!k.quant.zero) continue;
    for (int g = 0; g < k.groups; ++g) {
      float sum = 0;
      for (int i = g * k.group + lane; i < (g + 1) * k.group; i += 32) sum += at(i);
      for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
      if (lane == 0) sums[g * C::kRows + row] = sum;
    }
  }
}

// A warp's state. Lane i has keys i / 4 and i / 4 + 8 of each 16, and rows 2 (i % 4) and the next of each tile: element
// 2 h + b of a product is the h-th of these keys (or, of O^T, columns) and the b-th of the rows.
template <class C>
struct QuantisedRows {
  static constexpr int kTiles = C::kTiles, kSixteens = C::kSixteens, kParts = C::kParts;
  static constexpr int kScores = kSixteens * kTiles * 4;
  using Coding = typename C::Coding;
  using Sums = float[kSixteens][kTiles][kParts][4];

  const QuantisedParams& params;
  const std::uint32_t q;      // the block's Q
  const float* const q_sums;  // of its groups
  const int lane = threadIdx.x % 32;
  float o[C::kSize / 16][kTiles][4] = {};
  float m[kTiles][2], l[kTiles][2] = {}, rescale[kTiles][2];
  float s[kScores];  // scores of a step, then weights: 4 for each 16 keys and tile

  __device__ QuantisedRows(const QuantisedParams& params, std::uint32_t q, const float* q_sums)
      : params(params), q(q), q_sums(q_sums) {
    for (auto& tile : m) tile[0] = tile[1] = -kInfinity;
  }
  __device__ int row(int tile, int b) const { return 8 * tile + lane % 4 * 2 + b; }
  __device__ int key(int sixteen, int h) const { return 16 * sixteen + lane / 4 + 8 * h; }
  __device__ int column(int i, int h) const {
    return i / Coding::kSteps * Coding::kChunk + Coding::column_of_product(i % Coding::kSteps) + h;
  }
  __device__ static constexpr int score(int sixteen, int tile, int n) { return (sixteen * kTiles + tile) * 4 + n; }
  template <class Combine>
  __device__ static float over_keys(float x, Combine combine) {
    for (const int bit : {4, 8, 16}) x = combine(x, __shfl_xor_sync(~0u, x, bit));
    return x;
  }
  // Where the lane's row of two chunks, of 16 keys each, lies in a tile.
  __device__ std::uint32_t chunks_at(std::uint32_t tile, int chunk) const {
    const int row = lane % 16, place = (lane / 16 ^ CodeRing<C>::turn(row)) * 16;
    return tile + row * C::kRowBytes + (16 * chunk ^ place);
  }
  // A number for each of the lane's keys. What is not finite becomes NaN: no key hides behind a score of -inf.
  __device__ void load_numbers(std::uint32_t from, int group, float (&x)[kSixteens][2]) const {
#pragma unroll
    for (int i = 0; i < kSixteens; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float y = load4(from + (group * C::kStepKeys + key(i, h)) * 4);
        x[i][h] = fmaf(y, 0, y);
      }
  }

  // s = K Q^T of a step.
  __device__ __forceinline__ void multiply_keys(std::uint32_t slot) {
    const QuantisedSide& k = params.k;
    Sums sums = {};
#pragma unroll
    for (float& x : s) x = 0;
    int left = k.group, group = 0;
#pragma unroll
    for (int pair = 0; pair < C::kChunks / 2; ++pair) {
      if (2 * pair * Coding::kChunk >= k.columns) break;
      std::uint32_t codes[kSixteens][4];
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) load_matrices(chunks_at(slot, 2 * pair) + 16 * i * C::kRowBytes, codes[i]);
#pragma unroll
      for (int unit = 0; unit < Coding::kSteps; ++unit) {  // of 32 columns
        const int first_step = 2 * (pair * Coding::kSteps + unit);
        if (unit > 0 && 16 * first_step >= k.columns) break;
        std::uint32_t queries[kTiles][kParts][4];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int part = 0; part < kParts; ++part)
            load_matrices(
                q + (part * C::kRows + 8 * tile + lane % 8) * C::kQueryPitch + 32 * first_step + lane / 8 * 16,
                queries[tile][part]);
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int i = 0; i < kSixteens; ++i) {
            const int chunk = Coding::kSteps == 1 ? step : unit, first = Coding::kSteps == 1 ? 0 : 2 * step;
            std::uint32_t low[Coding::kPairs], high[Coding::kPairs];
            Coding::widen(codes[i][2 * chunk], low), Coding::widen(codes[i][2 * chunk + 1], high);
            const std::uint32_t a[4] = {low[first], high[first], low[first + 1], high[first + 1]};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
              for (int part = 0; part < kParts; ++part)
                multiply(sums[i][tile][part], a, queries[tile][part][2 * step], queries[tile][part][2 * step + 1]);
          }
        left -= kGroupUnit;
        if (left > 0 || k.groups <= 1) continue;
        add_group(slot, group, sums);
        left = k.group, ++group;
      }
    }
    if (k.groups <= 1) add_group(slot, 0, sums);
  }
  __device__ __forceinline__ void add_group(std::uint32_t slot, int group, Sums& sums) {
    const QuantisedSide& k = params.k;
    float scale[kSixteens][2];
#pragma unroll
    for (auto& of_keys : scale) of_keys[0] = of_keys[1] = 1;
    if (k.groups > 0) load_numbers(slot + k.scale_at, group, scale);
#pragma unroll
    for (auto& of_keys : sums)
#pragma unroll
      for (auto& of_tile : of_keys)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int part = kParts - 1; part > 0; --part) of_tile[part - 1][n] += of_tile[part][n], of_tile[part][n] = 0;
    if (k.quant.zero) {
      float zero[kSixteens][2];
      load_numbers(slot + k.zero_at, group, zero);
#pragma unroll
      for (int i = 0; i < kSixteens; ++i)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int n = 0; n < 4; ++n)
            sums[i][tile][0][n] =
                fmaf(-zero[i][n / 2], q_sums[group * C::kRows + row(tile, n % 2)], sums[i][tile][0][n]);
    }
#pragma unroll
    for (int i = 0; i < kSixteens; ++i)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float& x = s[score(i, tile, n)];
          x = fmaf(sums[i][tile][0][n], scale[i][n / 2], x), sums[i][tile][0][n] = 0;
        }
  }

  // From scores to weights.
  __device__ __forceinline__ void softmax() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float top = -kInfinity;
#pragma unroll
        for (int i = 0; i < kSixteens; ++i) top = fmaxf(top, fmaxf(s[score(i, tile, b)], s[score(i, tile, 2 + b)]));
        top = fmaxf(m[tile][b], ceilf(over_keys(top, Max())));
        rescale[tile][b] = exp2_approx(m[tile][b] - shift_of(top));
        m[tile][b] = top;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kSixteens; ++i)
#pragma unroll
          for (int n = b; n < 4; n += 2) {
            float& x = s[score(i, tile, n)];
            x = exp2_approx(x - shift_of(top));
            sum += x;
          }
        l[tile][b] = fmaf(l[tile][b], rescale[tile][b], sum);
      }
  }

  // The weights of a group of V's columns, as operands, and what its zeros take from each row: from the weights as they
  // are rounded, so that what a weight is off by multiplies (code - zero) alone.
  __device__ __forceinline__ void weigh(std::uint32_t slot, int group,
                                        std::uint32_t (&weights)[kSixteens][kTiles][kParts][2],
                                        float (&of_zeros)[kTiles][2]) const {
    const QuantisedSide& v = params.v;
    float scale[kSixteens][2], zero[kSixteens][2];
#pragma unroll
    for (auto& of_keys : scale) of_keys[0] = of_keys[1] = 1;
    if (v.groups > 0) load_numbers(slot + v.scale_at, group, scale);
    if (v.quant.zero) load_numbers(slot + v.zero_at, group, zero);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      of_zeros[tile][0] = of_zeros[tile][1] = 0;
#pragma unroll
      for (int i = 0; i < kSixteens; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float low = s[score(i, tile, 2 * h)] * scale[i][h], high = s[score(i, tile, 2 * h + 1)] * scale[i][h];
          float low_left = low, high_left = high;
          std::uint32_t parts[kParts];
          split(low_left, high_left, parts);
          if (v.quant.zero) {
            of_zeros[tile][0] = fmaf(low_left - low, zero[i][h], of_zeros[tile][0]);
            of_zeros[tile][1] = fmaf(high_left - high, zero[i][h], of_zeros[tile][1]);
          }
#pragma unroll
          for (int part = 0; part < kParts; ++part) weights[i][tile][part][h] = transpose(parts[part]);
        }
      if (v.quant.zero)
        for (float& x : of_zeros[tile]) x = over_keys(x, Sum());
    }
  }
  // O^T = O^T * rescale + V^T P^T.
  __device__ __forceinline__ void add_values(std::uint32_t slot) {
    const QuantisedSide& v = params.v;
    std::uint32_t weights[kSixteens][kTiles][kParts][2];
    float of_zeros[kTiles][2];
    weigh(slot, 0, weights, of_zeros);
    int left = v.group, group = 0;
#pragma unroll
    for (int pair = 0; pair < C::kChunks / 2; ++pair) {
      if (2 * pair * Coding::kChunk >= v.columns) break;
      std::uint32_t codes[kSixteens][4];
#pragma unroll
      for (int i = 0; i < kSixteens; ++i)
        load_columns(chunks_at(slot + C::kTileBytes, 2 * pair) + 16 * i * C::kRowBytes, codes[i]);
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        if (Coding::kChunk * chunk % kGroupUnit == 0 && pair + chunk > 0) {
          if (chunk > 0 && (2 * pair + chunk) * Coding::kChunk >= v.columns) break;
          left -= kGroupUnit;
          if (left <= 0) weigh(slot, ++group, weights, of_zeros), left = v.group;
        }
        std::uint32_t low[kSixteens][Coding::kPairs], high[kSixteens][Coding::kPairs];
#pragma unroll
        for (int i = 0; i < kSixteens; ++i)
          Coding::widen(codes[i][2 * chunk], low[i]), Coding::widen(codes[i][2 * chunk + 1], high[i]);
#pragma unroll
        for (int step = 0; step < Coding::kSteps; ++step)
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            // The step's own first: the rounding of a sum grows with its terms.
            float sum[4] = {of_zeros[tile][0], of_zeros[tile][1], of_zeros[tile][0], of_zeros[tile][1]};
#pragma unroll
            for (int part = kParts - 1; part >= 0; --part)
#pragma unroll
              for (int i = 0; i < kSixteens; ++i) {
                const std::uint32_t a[4] = {low[i][2 * step], low[i][2 * step + 1], high[i][2 * step],
                                            high[i][2 * step + 1]};
                multiply(sum, a, weights[i][tile][part][0], weights[i][tile][part][1]);
              }
            float(&to)[4] = o[(2 * pair + chunk) * Coding::kSteps + step][tile];
#pragma unroll
            for (int n = 0; n < 4; ++n) to[n] = fmaf(to[n], rescale[tile][n % 2], sum[n]);
          }
      }
    }
  }
};

template <class C>
__global__ void __launch_bounds__(kQuantisedThreads, C::kBlocks)
    decode_quantised(const __grid_constant__ QuantisedParams params) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ SplitRows<C::kRows> rows;
  __shared__ WarpResults<kQuantisedWarps, C::kRows> results;
  __shared__ float q_sums[C::kSize / kGroupUnit * C::kRows];
  const AttentionParams& p = params.p;
  let_next_start();
  const SplitBlock block(p, params.partials, params.tiles, C::kRows);
  if (!block.exists) return;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, end = block.end;
  const int ring_bytes = C::kStages * params.slot_bytes;
  const std::uint32_t rings = shared_address(shared), q = rings + kQuantisedWarps * ring_bytes;
  const CodeRing<C> ring(params, block, rings + warp * ring_bytes);
  // The warp's n-th step begins with this key.
  const int first_step = block.begin / C::kStepKeys;
  const auto key_at_step = [&](int n) { return (first_step + n * kQuantisedWarps + warp) * C::kStepKeys; };
  const auto load = [&](int n, int slot, const RowPlace& at) {
    if (key_at_step(n) < end) ring.load(slot, at);
    copy_commit();
  };
#pragma unroll 1
  for (int n = 0; n < C::kStages; ++n) load(n, n, ring.place(key_at_step(n)));
  rows.find(block);
  load_queries<C>(block, params.k, q, q_sums);
  __syncthreads();
  const int all_from = __reduce_max_sync(~0u, rows.from[lane % C::kRows]);
  const int all_to = __reduce_min_sync(~0u, rows.to[lane % C::kRows]);

  QuantisedRows<C> own(params, q, q_sums);
#pragma unroll 1
  for (int n = 0, slot = 0; key_at_step(n) < end; ++n) {
    const int key = key_at_step(n);
    const RowPlace next = ring.place(key_at_step(n + C::kStages));  // before it is wanted: it may be in a table
    copy_wait<C::kStages - 1>();
    __syncwarp();
    own.multiply_keys(ring.slot(slot));
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
    own.add_values(ring.slot(slot));
    __syncwarp();
    load(n + C::kStages, slot, next);
    if (++slot == C::kStages) slot = 0;
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
  results.store(block, params.partials, 1, reinterpret_cast<const float*>(shared), C::kSize, ring_bytes / 4);
}

}  // namespace rapt::cuda
