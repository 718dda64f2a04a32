// Products of small matrices in scratch: lanes along the rows of b and c, one broadcast element of a at a time.
#pragma once

#include "cpu/tile/mma.hpp"

namespace rapt::cpu::RAPT_ISA {

// Rows of a matrix, `stride` floats apart.
struct Rows {
  const float* data;
  std::int64_t stride;
};

// Tiles of c[i][n] (+)= sum over j < k of a[i][j] b[j][n]; of a^T, whose rows lie as columns, with kTransposed.
template <bool kTransposed, bool kAdds>
struct ProductTile {
  const float* a;
  std::int64_t a_stride;
  const float* b;
  std::int64_t b_stride;
  float* c;
  std::int64_t c_stride, k;

  template <int kR, int kV>
  [[gnu::always_inline]] void run() const {
    static_assert(kR * kV + kV + 1 <= kRegisters, "accumulators, b and one broadcast must fit the registers");
    vec acc[kR][kV];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) acc[i][v] = kAdds ? load(c + i * c_stride + v * kLanes) : vec(0.f);
    const float *of_a = a, *of_b = b;
    for (std::int64_t j = 0; j < k; ++j) {
      vec x[kV];
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) x[v] = load(of_b + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kR; ++i) {
        const vec s(kTransposed ? of_a[i] : of_a[i * a_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < kV; ++v) acc[i][v] = fma(s, x[v], acc[i][v]);
      }
      of_a += kTransposed ? a_stride : 1, of_b += b_stride;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) store(c + i * c_stride + v * kLanes, acc[i][v]);
  }
  [[gnu::always_inline]] void advance(int rows) {
    a += kTransposed ? rows : rows * a_stride, c += rows * c_stride;
  }
};

// c [m][n] (+)= a [m][k] b [k][n], where a may be given as [k][m]; n is filled up to whole vectors.
template <bool kTransposed, bool kAdds>
void multiply(const Rows& a, const Rows& b, float* c, std::int64_t c_stride, std::int64_t m, std::int64_t n,
              std::int64_t k) {
  ProductTile<kTransposed, kAdds> tile{a.data, a.stride, b.data, b.stride, c, c_stride, k};
  const auto panel = [&](auto vectors) {
    constexpr int kV = decltype(vectors)::value;
    tiles<kV>(tile, m);
    tile.b += kV * kLanes, tile.c += kV * kLanes;
  };
  // Four vectors are two panels of two: a single one would keep few sums under way.
  std::int64_t rest = (n + kLanes - 1) / kLanes;
  if constexpr (kVecs >= 3)
    for (; rest >= 3 && rest != 4; rest -= 3) panel(std::integral_constant<int, 3>());
  for (; rest >= 2; rest -= 2) panel(std::integral_constant<int, 2>());
  if (rest > 0) panel(std::integral_constant<int, 1>());
}

// to [columns][rows] = the transpose of from [rows][columns]; columns are whole vectors, and rows are filled up to
// whole vectors with zeros.
inline void transpose_rows(const Rows& from, std::int64_t rows, std::int64_t columns, float* to,
                           std::int64_t to_stride) {
  for (std::int64_t i = 0; i < rows; i += kLanes)
    for (std::int64_t c = 0; c < columns; c += kLanes) {
      vec x[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) x[j] = i + j < rows ? load(from.data + (i + j) * from.stride + c) : vec(0.f);
      transpose(x);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) store(to + (c + j) * to_stride + i, x[j]);
    }
}

}  // namespace rapt::cpu::RAPT_ISA
