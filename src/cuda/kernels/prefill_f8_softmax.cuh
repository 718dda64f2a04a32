// attention_prefill_f8's online softmax and stores: which rows are whose, scores to weights, results.
//
// The tensor cores give scores in fp16, two to a register. No exponential is computed, and no number converted: the
// code of an f8e4m3 number w is 8 (log2 w + 7), with the lowest three bits linear in w instead of log2 w. A score times
// a constant plus 1024, in fp16, has the rounded code of its weight in its lowest byte. So a weight is off by up to
// 2^(1/16), 4.4 %, for rounding, and up to 6.2 % too large, since 1 + f stands for 2^f.
//
// A row of queries is divided by a power of two where its scores might exceed fp16 for some keys.
#pragma once

#include <cuda_runtime.h>

#include "cuda/hopper/ptx.cuh"
#include "cuda/hopper/ptx_f8.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/fallback_rows.cuh"

namespace rapt::cuda {

template <int kSize_>
struct F8Config {
  static constexpr int kSize = kSize_;                // columns
  static constexpr int kGroups = 2, kGroupRows = 64;  // warpgroups that multiply; one thread of a third loads
  static constexpr int kRows = kGroups * kGroupRows, kKeys = 128, kStages = 4;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kBlocksPerPartial = 2;
  static constexpr int kScores = kKeys / 4, kWeights = kKeys / 8;  // registers
  static constexpr int kSums = (kSize + 8) / 2;                    // registers of O and of the sums of weights
  static constexpr int kQueryBytes = kRows * kSize, kKeyBytes = kKeys * kSize;
  static constexpr int kValueBytes = ((kSize + 8) * kKeys + 1023) / 1024 * 1024;  // the swizzle's unit
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kBarriers = 2 + 4 * kStages;
  static constexpr int kSharedBytes = kQueryBytes + kStages * kStageBytes + 8 * kBarriers;
};

struct PrefillF8Params {
  AttentionParams p;
  CUtensorMap q, k, v;   // v: [b hk][columns][keys]
  int tiles, all_tiles;  // tiles of a query head; of the call
  int window;            // row i sees keys [0, i + window), up to p.sk
  bool heads_first;      // the order of tiles: all heads in turn, longest first; else head by head
  bool pairs;            // results are stored as pairs of bf16
};

// A tile: kRows rows of a query head.
struct F8Tile {
  int b, q_head, row, blocks;

  template <class C>
  __device__ static F8Tile at(const PrefillF8Params& params, int number) {
    const AttentionParams& p = params.p;
    const int heads = static_cast<int>(p.b * p.hk * p.group);
    const int head = params.heads_first ? number % heads : number / params.tiles;
    const int tile = params.tiles - 1 - (params.heads_first ? number / heads : number % params.tiles);
    const int of_batch = static_cast<int>(p.hk * p.group), row = tile * C::kRows;
    const int keys = seen(params, min(row + C::kRows, static_cast<int>(p.sq)) - 1);
    return {head / of_batch, head % of_batch, row, max((keys + C::kKeys - 1) / C::kKeys, 1)};
  }
  // How many keys a row sees.
  __device__ static int seen(const PrefillF8Params& params, int row) {
    return max(min(row + params.window, static_cast<int>(params.p.sk)), 0);
  }
};

// The number of a thread block's n-th tile. Every other round goes backwards, as later tiles may be shorter.
__device__ inline int f8_tile_number(int n, int tiles) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return n * blocks + (n % 2 == 0 || (n + 1) * blocks > tiles ? block : blocks - 1 - block);
}
// A thread's share of the online softmax of its two rows, 8 apart. The four lanes of a quad share a row's keys.
//
// A score s becomes 1024 + c s + b in fp16: an integer code, whose weight is 2^(code / 8 - 7) at every multiple of 8. A
// shift moves only when a code would exceed kMaxCode: the largest score then gets code kTop.
template <class C>
struct PrefillF8Softmax {
  static constexpr float kCodeBias = 1024, kMaxCode = 125, kTop = 104;  // the largest f8e4m3 number has code 126
  static constexpr float kTopOctaves = kTop / 8, kMaxOctaves = 8000;    // the largest shift that fp16 holds
  // On average 1 + f exceeds 2^f, and the row sum of many keys with it: lse is lowered by half of that excess, so that
  // it is off by no more where keys are few.
  static constexpr float kMeanExcess = 0.02f;

  std::uint32_t c2[2], b2[2];    // c, and 1024 + b, in both halves
  float c[2];                    // c / 8: octaves for each unit of score
  float scale_correction[2];     // exact c over rounded c
  float row_max[2], rescale[2];  // the shift: octaves of the score whose code is kTop; the factor of its last move on O
  bool fallback[2];              // a score is NaN, or its shift exceeds fp16

  __device__ void begin(const float (&octaves)[2]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      c2[b] = broadcast_f16x2(8 * octaves[b]), b2[b] = broadcast_f16x2(kInfinity);
      c[b] = low_f16(c2[b]) / 8;
      scale_correction[b] = c[b] == 0 ? 1 : octaves[b] / c[b];
      fallback[b] = !is_finite(c[b]);
      row_max[b] = 0, rescale[b] = 1;
    }
  }

  // Scores to codes. Returns whether O must be rescaled before products with these codes are added.
  __device__ __forceinline__ bool softmax(std::uint32_t (&s)[C::kScores]) {
    std::uint32_t score_max[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) score_max[i % 2][i / 2] = s[i];
#pragma unroll
    for (int i = 4; i < C::kScores; ++i) score_max[i % 2][i / 2 % 2] = max_or_nan(score_max[i % 2][i / 2 % 2], s[i]);
    std::uint32_t code[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      score_max[b][0] = max_or_nan(score_max[b][0], score_max[b][1]);
      code[b] = fma2(score_max[b][0], c2[b], b2[b]);
    }
    const std::uint32_t code_max = max_or_nan(code[0], code[1]);
    constexpr float kMax = kCodeBias + kMaxCode;
    const bool over = __any_sync(~0u, !(low_f16(code_max) <= kMax) || !(high_f16(code_max) <= kMax));  // or NaN
    rescale[0] = rescale[1] = 1;
    if (over) {
#pragma unroll
      for (int b = 0; b < 2; ++b) update_shift(b, score_max[b][0], code[b]);
    }
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) s[i] = max2(fma2(s[i], c2[i % 2], b2[i % 2]), kOne2);
    return over;
  }
  // Packs four weights to a register, in the order of V's keys.
  __device__ static void pack_weights(const std::uint32_t (&s)[C::kScores], std::uint32_t (&weights)[C::kWeights]) {
#pragma unroll
    for (int i = 0; i < C::kWeights; ++i) {
      const int at = i / 4 * 8 + i / 2 % 2 * 4 + i % 2;
      weights[i] = __byte_perm(s[at], s[at + 2], 0x6420);
    }
  }
  // The lse of a row whose weights have this sum.
  __device__ float lse(int b, float sum) const {
    return sum == 0 ? -kInfinity
                    : (row_max[b] * scale_correction[b] - kTopOctaves + 7 + log2f(sum)) * kLn2 - kMeanExcess;
  }

  // Masks scores of keys from `key` on, for rows that see the first `seen` keys.
  __device__ __forceinline__ static void mask(std::uint32_t (&s)[C::kScores], const int (&seen)[2], int key) {
    // The distance to the last key that the row sees, plus a half. Times infinity it is the score's upper bound: Inf or
    // -Inf.
    std::uint32_t ahead[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float keys = static_cast<float>(max(min(seen[b] - 1 - key, 1000), -1000)) + 0.5f;
      ahead[b] = pack_f16x2(keys, keys - 1);
    }
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) {
      const std::uint32_t keys = fma2(ahead[i % 2], kOnes2, negative_in_f16(i / 2 * 8));
      s[i] = min2(s[i], fma2(keys, kInfinity2, kNegativeZero2));  // a NaN that is seen becomes Inf
    }
  }

 private:
  // -n, a multiple of 8 below 128, twice.
  __device__ static constexpr std::uint32_t negative_in_f16(int n) {
    if (n == 0) return 0x80008000;
    int exponent = 3;
    while (n >> exponent > 1) ++exponent;
    const auto half =
        static_cast<std::uint32_t>(0x8000 | (exponent + 15) << 10 | (n - (1 << exponent)) << (10 - exponent));
    return half | half << 16;
  }

  static constexpr std::uint32_t kOne2 = 0x64006400, kOnes2 = 0x3c003c00, kInfinity2 = 0x7c007c00,
                                 kNegativeZero2 = 0x80008000;

  __device__ static float over_quad(float x) {
    for (const int bit : {1, 2}) x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
    return x;
  }
  // Moves the row's shift if its own largest code asks for it: it may not depend on other rows of the warp.
  __device__ __forceinline__ void update_shift(int b, std::uint32_t score_max, std::uint32_t code) {
    const float first = low_f16(score_max), second = high_f16(score_max);
    fallback[b] |= !(first < kInfinity) || !(second < kInfinity);
    const float largest = over_quad(fmaxf(first, second));
    if (!(over_quad(fmaxf(low_f16(code), high_f16(code))) > kCodeBias + kMaxCode)) return;
    const float octaves = rintf(largest * c[b] * 64) / 64;
    fallback[b] |= !(fabsf(octaves) < kMaxOctaves);
    b2[b] = broadcast_f16x2(kCodeBias + 8 * (kTopOctaves - octaves));
    const float now = kTopOctaves - (low_f16(b2[b]) - kCodeBias) / 8;  // as rounded to fp16
    rescale[b] = exp2_approx(row_max[b] - now);
    row_max[b] = now;
  }

 public:
  __device__ static std::uint32_t pack_f16x2(float low, float high) {
    return pack<__half>(low, high);
  }
  __device__ static std::uint32_t broadcast_f16x2(float x) {
    return pack_f16x2(x, x);
  }
  __device__ static float low_f16(std::uint32_t pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xffff)));
  }
  __device__ static float high_f16(std::uint32_t pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  }
};

// A head's scales: octaves for each unit of q k^T, and of values. What is not finite becomes NaN.
struct HeadScales {
  float of_scores, of_values;

  __device__ HeadScales(const AttentionParams& p, int b, int q_head, int hk) {
    const auto scale = [b](const float* data, const Strides& s, int head) {
      const float x = data ? data[b * s.b + head * s.h] : 1.f;
      return fmaf(x, 0, x);
    };
    of_scores = p.score.scale_log2 * scale(p.q_scale, p.q_scale_stride, q_head) *
                scale(p.k_quant.scale, p.k_quant.scale_stride, hk);
    of_values = scale(p.v_quant.scale, p.v_quant.scale_stride, hk);
  }
};

// Scales a warpgroup's queries by powers of two so that no score exceeds fp16, and negates them if `negative`, so that
// larger scores have larger weights. Returns the divisors of the thread's two rows. A score is at most the length of
// its query times the length of the longest key, 448 sqrt(columns).
template <class C>
__device__ __forceinline__ void fit_queries(std::uint32_t q, bool negative, float (&divided)[2]) {
  constexpr int kChunks = C::kSize / 32;  // 16-byte chunks of a thread, which shares a row with its neighbour
  constexpr float kMaxScore = 65000, kMaxCode = 448;
  constexpr float kMax = kMaxScore * kMaxScore / (kMaxCode * kMaxCode * C::kSize);
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int row = thread / 2, first = thread % 2 * kChunks;
  const auto place = [&](int chunk) {
    return q + row * C::kSize + ((first + chunk) ^ (C::kSize == 128 ? row % 8 : row / 2 % 4)) * 16;
  };
  std::uint32_t codes[kChunks][4];
  float squares = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float4 x = load16(place(chunk));
    memcpy(codes[chunk], &x, sizeof x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t pair = f16_of_codes(codes[chunk][i / 2] >> i % 2 * 16);
      const float low = PrefillF8Softmax<C>::low_f16(pair), high = PrefillF8Softmax<C>::high_f16(pair);
      squares = fmaf(low, low, fmaf(high, high, squares));
    }
  }
  squares += __shfl_xor_sync(~0u, squares, 1);
  const float by = squares > kMax ? exp2_approx(ceilf(0.5f * log2f(squares / kMax))) : 1.f;
  if (__any_sync(~0u, by > 1 || negative)) {
    const std::uint32_t factor = PrefillF8Softmax<C>::broadcast_f16x2(negative ? -1 / by : 1 / by);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint4 x;
      std::uint32_t* const words = &x.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto times = [&](std::uint32_t two_codes) {
          return codes_of_f16(fma2(f16_of_codes(two_codes), factor, 0x80008000));
        };
        words[i] = times(codes[chunk][i]) | times(codes[chunk][i] >> 16) << 16;
      }
      store16(place(chunk), x);
    }
    fence_async_proxy();
  }
  divided[0] = __shfl_sync(~0u, by, lane / 4 * 2), divided[1] = __shfl_sync(~0u, by, lane / 4 * 2 + 16);
}

// Stores the thread's part of a row, the b-th of its two; NaN if it is a fallback row, which no other row is. Returns
// whether it is one. Called by all lanes of a quad.
template <class C>
__device__ __forceinline__ bool store_f8_row(const PrefillF8Params& params, const F8Tile& tile, int row, int b,
                                             const float (&sums)[C::kSums], const PrefillF8Softmax<C>& rows,
                                             float of_values) {
  const AttentionParams& p = params.p;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float sum = sums[C::kSums - 4 + 2 * b];
  const bool exists = row < p.sq, empty = F8Tile::seen(params, row) == 0;
  const float factor = empty ? 0 : of_values / sum;
  bool trusted = !rows.fallback[b] && is_finite(factor);
  float x[C::kSize / 4];
#pragma unroll
  for (int i = 0; i < C::kSize / 4; ++i) {
    x[i] = sums[i / 2 * 4 + 2 * b + i % 2] * factor;
    trusted &= is_finite(x[i]);
  }
  for (const int bit : {1, 2}) trusted &= __shfl_xor_sync(~0u, static_cast<int>(trusted), bit) != 0;
  trusted |= empty;
  if (!exists) return false;
  const std::int64_t out = tile.b * p.out_stride.b + tile.q_head * p.out_stride.h + row * p.out_stride.s;
#pragma unroll
  for (int i = 0; i < C::kSize / 4; i += 2) {
    const float first = !trusted ? nanf("") : empty ? 0 : x[i], second = !trusted ? nanf("") : empty ? 0 : x[i + 1];
    const std::int64_t at = out + (i * 4 + lane % 4 * 2) * p.out_stride.d;
    if (params.pairs) {
      static_cast<std::uint32_t*>(p.out)[at / 2] = pack<__nv_bfloat16>(first, second);
    } else {
      store(p.out, p.out_type, at, first), store(p.out, p.out_type, at + p.out_stride.d, second);
    }
  }
  if (p.lse && lane % 4 == 0)
    p.lse[tile.b * p.lse_stride.b + tile.q_head * p.lse_stride.h + row * p.lse_stride.s] =
        empty ? -kInfinity : rows.lse(b, sum);
  return !trusted;
}

// Recomputes the warp's fallback rows, in those of the thread block's tiles n for which bit n % 32 is set. `first`: the
// warp's first row in each tile.
template <class C>
__device__ __noinline__ void recompute_f8_fallback_rows(const PrefillF8Params& params, int first,
                                                        unsigned fallback_tiles) {
  const AttentionParams& p = params.p;
  const int lane = static_cast<int>(threadIdx.x) % 32, group = static_cast<int>(p.group);
  for (int n = 0, number; (number = f8_tile_number(n, params.all_tiles)) < params.all_tiles; ++n) {
    if ((fallback_tiles >> n % 32 & 1) == 0) continue;
    const F8Tile tile = F8Tile::at<C>(params, number);
    const int row = tile.row + first + lane;
    bool fallback = false;
    if (lane < 16 && row < p.sq) {
      const float x =
          load(p.out, p.out_type, tile.b * p.out_stride.b + tile.q_head * p.out_stride.h + row * p.out_stride.s);
      fallback = x != x;
    }
#pragma unroll 1
    for (unsigned rows = __ballot_sync(~0u, fallback); rows != 0; rows &= rows - 1) {
      const int number = (tile.row + first + __ffs(static_cast<int>(rows)) - 1) * group + tile.q_head % group;
      recompute_rows<void, kPrefillF8MaxHeadDim, false>(p, tile.b, tile.q_head / group, number, 1);
    }
  }
}

}  // namespace rapt::cuda
