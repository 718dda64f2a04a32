// The two matrix products of attention with query rows in the vector lanes: S^T = K Q^T and O^T += V^T P^T. The
// kernels read K and V in their own layout, one broadcast scalar at a time, so neither is packed or shuffled. A
// register tile has kR rows (keys of S^T, columns of V for O^T) of kV vectors (query rows), out of kW vectors that are
// adjacent in memory. qt and ot are Q and O transposed.
#pragma once

#include <bit>

#include "cpu/tile/prefetcher.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

// acc[i][v] += b[i][j] x[j][v] for j in [begin, end) and the vectors from kFrom on. Rows of x have kW vectors. kW is a
// template parameter because every pointer that has to be stepped costs an integer operation, which may take an FMA's
// port.
template <int kFrom, int kW, int kR, int kV>
[[gnu::always_inline]] inline void accumulate(vec (&acc)[kR][kV], const float* b, std::int64_t row, std::int64_t col,
                                              const float* x, std::int64_t begin, std::int64_t end) {
#pragma GCC unroll 4
  for (std::int64_t j = begin; j < end; ++j) {
    vec xv[kV];
#pragma GCC unroll 4
    for (int v = kFrom; v < kV; ++v) xv[v] = load(x + (j * kW + v) * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      const vec s(b[i * row + j * col]);
#pragma GCC unroll 4
      for (int v = kFrom; v < kV; ++v) acc[i][v] = fma(s, xv[v], acc[i][v]);
    }
  }
}

// s[key][lane] = sum over d of k[key][d] qt[d][lane] for kR keys. Each lane's maximum is folded into `block_max`. The
// sum starts at 0 and not at -m, because every addition would then round at the magnitude of m. Rows of qt and s have
// kW vectors.
template <int kW>
struct ScoresTile {
  const float* k;  // rows of k_stride
  std::int64_t k_stride, d;
  const float* qt;
  float* s;
  float* block_max;  // one row
  TilePrefetcher* prefetcher = nullptr;

  template <int kR, int kV>
  [[gnu::always_inline]] void run() const {
    static_assert(kR * kV + kV + 1 <= kRegisters, "accumulators, x and one broadcast must fit the registers");
    if (prefetcher) prefetcher->prefetch();
    vec acc[kR][kV];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) acc[i][v] = vec(0.f);
    accumulate<0, kW>(acc, k, k_stride, 1, qt, 0, d);
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) {
      vec largest = load(block_max + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kR; ++i) largest = xsimd::max(largest, acc[i][v]);
      store(block_max + v * kLanes, largest);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) store(s + (i * kW + v) * kLanes, acc[i][v]);
  }
  [[gnu::always_inline]] void advance(int rows) {
    k += rows * k_stride, s += rows * kW * kLanes;
  }
};

// ot[c][lane] = base[c][lane] + sum over keys of v[key][c] p[key][lane] for kR columns c. The sum over the keys is
// complete before it is added to `base`. Rows of p and ot have kW vectors.
template <int kW>
struct OutputTile {
  const float* v;  // rows of v_stride
  std::int64_t v_stride;
  const float* p;
  const std::int64_t* keys;  // [kW] number of keys that each vector of lanes reads, ascending
  const float* base;         // the output so far, in rows of base_stride; or, with 0, one row of zeros
  std::int64_t base_stride;
  float* ot;
  TilePrefetcher* prefetcher = nullptr;

  template <int kR, int kV>
  [[gnu::always_inline]] void run() const {
    static_assert(kV <= 3);
    if (prefetcher) prefetcher->prefetch();
    vec acc[kR][kV];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int u = 0; u < kV; ++u) acc[i][u] = vec(0.f);
    accumulate<0, kW>(acc, v, 1, v_stride, p, 0, keys[0]);
    if constexpr (kV > 1) accumulate<1, kW>(acc, v, 1, v_stride, p, keys[0], keys[1]);
    if constexpr (kV > 2) accumulate<2, kW>(acc, v, 1, v_stride, p, keys[1], keys[2]);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int u = 0; u < kV; ++u)
        store(ot + (i * kW + u) * kLanes, load(base + i * base_stride + u * kLanes) + acc[i][u]);
  }
  [[gnu::always_inline]] void advance(int rows) {
    v += rows, base += rows * base_stride, ot += rows * kW * kLanes;
  }
};

// Runs a tile over any number of rows (keys or columns): tiles of kR rows, then of the next lower powers of two. No
// pointer is __restrict: the compiler would hoist loads across rows and spill.
template <int kV, class Tile, int kR = rows_of_tile(kV)>
[[gnu::noinline]] void tiles(const Tile& first, std::int64_t rows) {
  Tile tile = first;
  for (; rows >= kR; rows -= kR, tile.advance(kR)) tile.template run<kR, kV>();
  if constexpr (kR > 1) {
    const Tile rest = tile;  // whose address is taken, so that `tile` can stay in registers
    if (rows > 0) tiles<kV, Tile, static_cast<int>(std::bit_floor(kR - 1U))>(rest, rows);
  }
}

}  // namespace rapt::cpu::RAPT_ISA
