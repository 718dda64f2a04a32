// A warp's mathematics of a step: S^T = K Q^T, the online softmax, and O^T += V^T P^T, for up to 8, 16 or 32 rows. Keys
// are the 16 rows of an mma product and queries its 8 columns, so that few queries leave no lane idle. 16-bit keys are
// multiplied as they are; codes are widened in registers, once for all queries.
//
// Every code is exact in bf16, and every query is the exact sum of one or three numbers of bf16. Products are summed in
// fp32. Scales multiply fp32 numbers: sums over columns of K, and weights before they are rounded to components. Where
// a row has several scales or zeros, they apply to one unit of 32 columns at a time.
//
// Instruction issue bounds it: a step takes some 830 instructions, of which 512 widen codes of 8-bit floats.
#pragma once

#include "cuda/hopper/fragment.cuh"
#include "cuda/kernels/decode_load.cuh"

namespace rapt::cuda {

// Two numbers as sums of kComponents numbers of bf16, the largest first; leaves their remainders in low and high.
template <int kComponents>
__device__ __forceinline__ void split_into_components(float& low, float& high,
                                                      std::uint32_t (&components)[kComponents]) {
#pragma unroll
  for (int component = 0; component < kComponents; ++component) {
    components[component] = pack<__nv_bfloat16>(low, high);
    low -= __uint_as_float(components[component] << 16), high -= __uint_as_float(components[component] & 0xffff0000u);
  }
}

// Lane i has keys i / 4 and i / 4 + 8 of each 16, and query rows 2 (i % 4) and 2 (i % 4) + 1 of each tile: element 2 h
// + b of a product belongs to the h-th of these keys (in O^T: columns) and the b-th of these rows.
template <class C>
struct DecodeSoftmax {
  static constexpr int kTiles = C::kTiles, kKeyTiles = C::kKeyTiles, kComponents = C::kComponents;
  static constexpr int kScores = kKeyTiles * kTiles * 4;
  static constexpr float kRescaleThreshold = 4;  // log2 of how much a weight may exceed 1
  using Coding = typename C::Coding;
  using Sums = float[kKeyTiles][kTiles][kComponents][4];
  using Weights = std::uint32_t[kKeyTiles][kTiles][kComponents][2];

  const DecodeParams& params;
  const Coding coding;
  const float* const q_sums;  // sums over units of columns of Q: [units][kRows]
  const int lane = threadIdx.x % 32;
  // Addresses that the lane reads: of Q; of K and V, from a tile on; of its keys' scales, from a step's scales on.
  std::uint32_t lane_query, lane_chunk, lane_scale;
  float o[C::kSize / 16][kTiles][4] = {};
  float shift[kTiles][2],
      row_sum[kTiles][2] = {};  // what scores are taken relative to; sums of weights over the lane's keys
  float s[kScores];             // scores of a step, then weights: 4 for each 16 keys and tile

  __device__ DecodeSoftmax(const DecodeParams& params, std::uint32_t q, const float* q_sums)
      : params(params), coding{params.code_offset}, q_sums(q_sums) {
    const int row = lane % 16;
    lane_query = q + lane % 8 * C::kQueryPitch + lane / 8 * 16;
    lane_chunk = row * C::kRowBytes + (lane / 16 ^ KvRing<C>::swizzle(row)) * 16;
    lane_scale = lane / 4 * 4;
    // Keeps these in registers, where there are enough, instead of recomputing them in every step.
    if (kTiles == 1) asm volatile("" : "+r"(lane_query), "+r"(lane_chunk), "+r"(lane_scale));
    for (auto& tile : shift) tile[0] = tile[1] = -kMaxFloat;
  }
  // The row_max to store for a row whose weights have this sum; -inf if it has seen no key.
  __device__ float row_max(int tile, int b, float sum) const {
    return shift[tile][b] == -kMaxFloat && !(sum > 0) ? -kInfinity : shift[tile][b] - C::kShift;
  }
  __device__ void add_16bit_values(std::uint32_t slot) {
    std::uint32_t weights[kKeyTiles][kTiles][2];
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          weights[i][tile][h] =
              transpose(pack<typename C::Element>(s[score(i, tile, 2 * h)], s[score(i, tile, 2 * h + 1)]));
#pragma unroll
    for (int column = 0; column < C::kSize / 16; ++column)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        std::uint32_t x[4];
        load_columns((slot + lane_chunk ^ 32 * column) + 16 * i * C::kRowBytes, x);
        const std::uint32_t a[4] = {x[0], x[2], x[1], x[3]};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          multiply<typename C::Element>(o[column][tile], a, weights[i][tile][0], weights[i][tile][1]);
      }
  }
  __device__ int row(int tile, int b) const {
    return 8 * tile + lane % 4 * 2 + b;
  }
  __device__ int key(int sixteen, int h) const {
    return 16 * sixteen + lane / 4 + 8 * h;
  }
  __device__ int column(int i, int h) const {
    if constexpr (C::kIs16Bit) return 16 * i + lane / 4 + 8 * h;
    else return i / Coding::kSteps * Coding::kChunk + Coding::column_of_product(i % Coding::kSteps) + h;
  }
  __device__ static constexpr int score(int sixteen, int tile, int n) {
    return (sixteen * kTiles + tile) * 4 + n;
  }
  template <class Combine>
  __device__ static float reduce_over_keys(float x, Combine combine) {
    for (const int bit : {4, 8, 16}) x = combine(x, __shfl_xor_sync(~0u, x, bit));
    return x;
  }
  // Loads a number for each of the lane's keys. What is not finite becomes NaN, so that no key hides behind a score of
  // -inf.
  __device__ void load_numbers(std::uint32_t from, int group, float (&x)[kKeyTiles][2]) const {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float y = load4(from + group * (C::kStepKeys * 4) + lane_scale + (16 * i + 8 * h) * 4);
        x[i][h] = fmaf(y, 0, y);
      }
  }

  // s = K Q^T of a step.
  __device__ __forceinline__ void multiply_keys(std::uint32_t slot) {
    Sums sums = {};
    const DecodeOperand& k = params.k;
    const bool grouped = k.grouped;
#pragma unroll
    for (float& x : s) x = 0;
    constexpr int kPairsAtOnce =
        kTiles == 1 ? C::kChunks / 2 : 1;  // with more rows, one at a time is less code and no slower
#pragma unroll kPairsAtOnce
    for (int pair = 0; pair < C::kChunks / 2; ++pair) {
      std::uint32_t codes[kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
        load_matrices((slot + lane_chunk ^ 32 * pair) + 16 * i * C::kRowBytes, codes[i]);
#pragma unroll
      for (int unit = 0; unit < Coding::kSteps; ++unit) {  // of 32 columns
        const int number = pair * Coding::kSteps + unit;
        std::uint32_t queries[kTiles][kComponents][4];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int component = 0; component < kComponents; ++component)
            load_matrices(lane_query + (component * C::kRows + 8 * tile) * C::kQueryPitch + 64 * number,
                          queries[tile][component]);
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int i = 0; i < kKeyTiles; ++i) {
            const int chunk = Coding::kSteps == 1 ? step : unit, first = Coding::kSteps == 1 ? 0 : 2 * step;
            std::uint32_t low[Coding::kPairs], high[Coding::kPairs];
            coding.widen(codes[i][2 * chunk], low), coding.widen(codes[i][2 * chunk + 1], high);
            const std::uint32_t a[4] = {low[first], high[first], low[first + 1], high[first + 1]};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
              for (int component = 0; component < kComponents; ++component)
                multiply(sums[i][tile][component], a, queries[tile][component][2 * step],
                         queries[tile][component][2 * step + 1]);
          }
        if (grouped) add_unit(slot, number, sums, k.group_of_unit[number], k.zeros);
      }
    }
    if (!grouped) add_unit(slot, 0, sums, 0, false);
  }
  // s = K Q^T of a step of 16-bit keys.
  __device__ __forceinline__ void multiply_16bit_keys(std::uint32_t slot) {
    float sums[kKeyTiles][kTiles][4] = {};
#pragma unroll
    for (int unit = 0; unit < C::kSize / kGroupUnit; ++unit) {
      std::uint32_t queries[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        load_matrices(lane_query + 8 * tile * C::kQueryPitch + 64 * unit, queries[tile]);
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          std::uint32_t a[4];
          load_matrices((slot + lane_chunk ^ 32 * (2 * unit + step)) + 16 * i * C::kRowBytes, a);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile)
            multiply<typename C::Element>(sums[i][tile], a, queries[tile][2 * step], queries[tile][2 * step + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < 4; ++n) s[score(i, tile, n)] = sums[i][tile][n];
  }
  // s += scale * (sums - zero * sum of q) over a unit of columns, or over all columns where a key has one scale.
  __device__ __forceinline__ void add_unit(std::uint32_t slot, int unit, Sums& sums, int group, bool zeros) {
    const DecodeOperand& k = params.k;
    float scale[kKeyTiles][2];
    load_numbers(slot + k.scale_at, group, scale);
#pragma unroll
    for (auto& of_keys : sums)
#pragma unroll
      for (auto& of_tile : of_keys)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int component = kComponents - 1; component > 0; --component)
            of_tile[component - 1][n] += of_tile[component][n], of_tile[component][n] = 0;
    if (zeros) {
      float zero[kKeyTiles][2];
      load_numbers(slot + k.zero_at, group, zero);
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float& sum = sums[i][tile][0][n];
            sum = fmaf(-zero[i][n / 2], q_sums[unit * C::kRows + row(tile, n % 2)], sum);
          }
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float &x = s[score(i, tile, n)], &sum = sums[i][tile][0][n];
          x = fmaf(sum, scale[i][n / 2], x), sum = 0;
        }
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& x : s) x *= factor;
  }
  // Multiplies scores by the scales of queries.
  __device__ __forceinline__ void scale_rows(const float* scale) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
          s[score(i, tile, b)] *= scale[row(tile, b)], s[score(i, tile, 2 + b)] *= scale[row(tile, b)];
  }

  // Scores to weights. A shift moves only where a weight would exceed 2^kRescaleThreshold: seldom, after a row's first
  // step. With codes, shifts are integers, so that a move multiplies by exact powers of two. Otherwise the shift is the
  // largest score itself, whose weight is then 2^kShift exactly: a key that outweighs all others gives exactly its
  // value.
  __device__ __forceinline__ void softmax() {
    float top[kTiles][2];
    bool above = false;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          const float pair = fmaxf(s[score(i, tile, b)], s[score(i, tile, 2 + b)]);
          top[tile][b] = i == 0 ? pair : fmaxf(top[tile][b], pair);
        }
        above |= top[tile][b] > shift[tile][b] + kRescaleThreshold;
      }
    if (__any_sync(~0u, above)) update_shifts(top);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float sum;
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int n = b; n < 4; n += 2) {
            float& x = s[score(i, tile, n)];
            x = exp2_approx(x - (shift[tile][b] - C::kShift));
            sum = i + n == b ? x : sum + x;
          }
        row_sum[tile][b] += sum;
      }
  }
  __device__ __forceinline__ void update_shifts(const float (&top)[kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float rescale[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float from = shift[tile][b], all = reduce_over_keys(top[tile][b], Max());
        if (all > from + kRescaleThreshold) shift[tile][b] = C::kIs16Bit ? all : ceilf(all);
        rescale[b] = exp2_approx(from - shift[tile][b]);
        row_sum[tile][b] *= rescale[b];
      }
#pragma unroll
      for (auto& of_columns : o)
#pragma unroll
        for (int n = 0; n < 4; ++n) of_columns[tile][n] *= rescale[n % 2];
    }
  }

  // P as operands, for a unit of V's columns, or for all columns where a value has one scale. Adds what the zeros of V
  // contribute to O, from the rounded weights: then a weight's rounding error multiplies (code - zero) only.
  __device__ __forceinline__ void exponentiate(std::uint32_t slot, int unit, Weights& weights) {
    const DecodeOperand& v = params.v;
    const int group = unit == 0 ? 0 : v.group_of_unit[unit];
    float scale[kKeyTiles][2];
    load_numbers(slot + v.scale_at, group, scale);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float low = s[score(i, tile, 2 * h)] * scale[i][h], high = s[score(i, tile, 2 * h + 1)] * scale[i][h];
          std::uint32_t components[kComponents];
          split_into_components(low, high, components);
#pragma unroll
          for (int component = 0; component < kComponents; ++component)
            weights[i][tile][component][h] = transpose(components[component]);
        }
    if (!v.grouped || !v.zeros) return;
    float zero[kKeyTiles][2];
    load_numbers(slot + v.zero_at, group, zero);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float of_zeros[2] = {};
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float low = s[score(i, tile, 2 * h)] * scale[i][h], high = s[score(i, tile, 2 * h + 1)] * scale[i][h];
          float low_left = low, high_left = high;
          std::uint32_t components[kComponents];
          split_into_components(low_left, high_left, components);
          of_zeros[0] = fmaf(low_left - low, zero[i][h], of_zeros[0]);
          of_zeros[1] = fmaf(high_left - high, zero[i][h], of_zeros[1]);
        }
      for (float& x : of_zeros) x = reduce_over_keys(x, Sum());
#pragma unroll
      for (int i = 2 * unit; i < 2 * unit + 2; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) o[i][tile][n] += of_zeros[n % 2];
    }
  }
  // O^T += V^T P^T.
  __device__ __forceinline__ void add_values(std::uint32_t slot) {
    const bool grouped = params.v.grouped;
    Weights weights;
    exponentiate(slot, 0, weights);
#pragma unroll
    for (int pair = 0; pair < C::kChunks / 2; ++pair) {
      std::uint32_t codes[kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
        load_columns((slot + lane_chunk ^ 32 * pair) + 16 * i * C::kRowBytes, codes[i]);
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const int first = (2 * pair + chunk) * Coding::kChunk;
        if (first > 0 && first % kGroupUnit == 0 && grouped) exponentiate(slot, first / kGroupUnit, weights);
        std::uint32_t low[kKeyTiles][Coding::kPairs], high[kKeyTiles][Coding::kPairs];
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
          coding.widen(codes[i][2 * chunk], low[i]), coding.widen(codes[i][2 * chunk + 1], high[i]);
#pragma unroll
        for (int step = 0; step < Coding::kSteps; ++step)
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            float(&to)[4] = o[(2 * pair + chunk) * Coding::kSteps + step][tile];
            // With components, the step's own sum first: the rounding error of a sum grows with its length.
            float sum[4] = {};
#pragma unroll
            for (int component = kComponents - 1; component >= 0; --component)
#pragma unroll
              for (int i = 0; i < kKeyTiles; ++i) {
                const std::uint32_t a[4] = {low[i][2 * step], low[i][2 * step + 1], high[i][2 * step],
                                            high[i][2 * step + 1]};
                multiply(kComponents > 1 ? sum : to, a, weights[i][tile][component][0], weights[i][tile][component][1]);
              }
#pragma unroll
            for (int n = 0; n < 4 && kComponents > 1; ++n) to[n] += sum[n];
          }
      }
    }
  }
};

}  // namespace rapt::cuda
