// The two matrix products of attention with lanes = queries: S^T = K Q^T and O^T += V^T P^T. K and V are read in their
// natural layout, one broadcast scalar at a time; nothing is packed or shuffled.
#pragma once

#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

// Which product a tile computes. scores: b[row][col] is K (rows are keys, columns run along d); the accumulators start
// from init[lane], minus the reference of the softmax, and the largest score of each lane is folded into `extra`.
// output: b is V^T (rows are columns of V, columns are keys); the accumulators start from init[row][lane], the partial
// sum of the block so far, and `extra`, the output of earlier blocks in rows like init's, is added at the end: sums of
// sums, so that rounding grows with the block and the number of blocks, not with their product.
enum class Product { scores, output };

// out[i][lane] = init + sum_j b[i][j] x[j][lane] over kR rows, kV vectors of lanes and n columns j. `x` and `out` have
// rows of `width` floats, `init` and `extra` rows of `init_row` and `extra_row` (0: the same for all).
// `out` is not __restrict: with it compilers hoist loads across rows and spill.
template <Product kProduct, int kR, int kV>
[[gnu::always_inline]] inline void tile(const float* b, std::int64_t stride, const float* x, std::int64_t n,
                                        std::int64_t width, const float* init, std::int64_t init_row, float* extra,
                                        std::int64_t extra_row, float* out) {
  static_assert(kR * kV + kV + 1 <= kRegisters, "accumulators, x and one broadcast must fit the registers");
  constexpr bool kScores = kProduct == Product::scores;
  const std::int64_t row = kScores ? stride : 1, col = kScores ? 1 : stride;
  vec acc[kR][kV];
#pragma GCC unroll 16
  for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) acc[i][v] = load(init + i * init_row + v * kLanes);
#pragma GCC unroll 4
  for (std::int64_t j = 0; j < n; ++j) {
    vec xv[kV];
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) xv[v] = load(x + j * width + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      const vec s(b[i * row + j * col]);
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) acc[i][v] = fma(s, xv[v], acc[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kV; ++v) {
    if constexpr (kScores) {
      vec top = load(extra + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kR; ++i) top = xsimd::max(top, acc[i][v]);
      store(extra + v * kLanes, top);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) {
      if constexpr (!kScores) acc[i][v] = load(extra + i * extra_row + v * kLanes) + acc[i][v];
      store(out + i * width + v * kLanes, acc[i][v]);
    }
}

// Any number of rows: tiles of kR, then of kR / 2, ...
template <Product kProduct, int kV, int kR = rows_of_tile(kV)>
[[gnu::noinline]] void tiles(const float* b, std::int64_t stride, std::int64_t rows, const float* x, std::int64_t n,
                             std::int64_t width, const float* init, std::int64_t init_row, float* extra,
                             std::int64_t extra_row, float* out) {
  const std::int64_t step = kProduct == Product::scores ? kR * stride : kR;
  for (; rows >= kR; rows -= kR, b += step, init += kR * init_row, extra += kR * extra_row, out += kR * width)
    tile<kProduct, kR, kV>(b, stride, x, n, width, init, init_row, extra, extra_row, out);
  if constexpr (kR > 1) {
    if (rows > 0) tiles<kProduct, kV, kR / 2>(b, stride, rows, x, n, width, init, init_row, extra, extra_row, out);
  }
}

}  // namespace rapt::cpu::RAPT_ISA
