// Products of small matrices in scratch. Vector lanes run along the rows of b and c; elements of a are broadcast.
#pragma once

#include "cpu/tile/mma.hpp"

namespace rapt::cpu::RAPT_ISA {

// A matrix of floats. Rows are aligned and padded to whole vectors.
struct Matrix {
  float* data;
  std::int64_t stride;  // floats from row to row

  float* operator[](std::int64_t row) const { return data + row * stride; }
  Matrix from(std::int64_t row) const { return {(*this)[row], stride}; }
};
// Rows are an odd number of cache lines long: an even number would map them to few sets of L1, and products that read
// a column would miss.
constexpr std::int64_t matrix_stride(std::int64_t columns) {
  constexpr std::int64_t kLine = 16;
  return ((columns + kLine - 1) / kLine | 1) * kLine;
}

// A tile of c[i][n] (+)= sum over j < k of a[i][j] b[j][n]; with kTransposed of a[j][i].
template <bool kTransposed, bool kAdds>
struct ProductTile {
  Matrix a, b, c;
  std::int64_t k;

  template <int kR, int kV>
  [[gnu::always_inline]] void run() const {
    static_assert(kR * kV + kV + 1 <= kRegisters, "accumulators, b and one broadcast must fit the registers");
    vec acc[kR][kV];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) acc[i][v] = kAdds ? load(c[i] + v * kLanes) : vec(0.f);
    const float *of_a = a.data, *of_b = b.data;
    for (std::int64_t j = 0; j < k; ++j) {
      vec x[kV];
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) x[v] = load(of_b + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kR; ++i) {
        const vec s(kTransposed ? of_a[i] : of_a[i * a.stride]);
#pragma GCC unroll 4
        for (int v = 0; v < kV; ++v) acc[i][v] = fma(s, x[v], acc[i][v]);
      }
      of_a += kTransposed ? a.stride : 1, of_b += b.stride;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) store(c[i] + v * kLanes, acc[i][v]);
  }
  [[gnu::always_inline]] void advance(int rows) {
    a.data += kTransposed ? rows : rows * a.stride, c.data += rows * c.stride;
  }
};

// c [m][n] (+)= a [m][k] b [k][n]. With kTransposed, a is stored as [k][m]. n is rounded up to whole vectors.
template <bool kTransposed, bool kAdds>
void multiply(const Matrix& a, const Matrix& b, const Matrix& c, std::int64_t m, std::int64_t n, std::int64_t k) {
  ProductTile<kTransposed, kAdds> tile{a, b, c, k};
  const auto multiply_columns = [&](auto vectors) {
    constexpr int kV = decltype(vectors)::value;
    tiles<kV>(tile, m);
    tile.b.data += kV * kLanes, tile.c.data += kV * kLanes;
  };
  // Four vectors are computed as two and two: a single vector would have too few independent sums to hide the latency
  // of fma.
  std::int64_t rest = (n + kLanes - 1) / kLanes;
  if constexpr (kVecs >= 3)
    for (; rest >= 3 && rest != 4; rest -= 3) multiply_columns(std::integral_constant<int, 3>());
  for (; rest >= 2; rest -= 2) multiply_columns(std::integral_constant<int, 2>());
  if (rest > 0) multiply_columns(std::integral_constant<int, 1>());
}

// to [columns][rows] = from [rows][columns]^T. Both are padded to whole vectors; rows past the last become 0.
inline void transpose(const Matrix& from, std::int64_t rows, std::int64_t columns, const Matrix& to) {
  for (std::int64_t i = 0; i < rows; i += kLanes)
    for (std::int64_t c = 0; c < columns; c += kLanes) {
      vec x[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) x[j] = i + j < rows ? load(from[i + j] + c) : vec(0.f);
      transpose(x);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) store(to[c + j] + i, x[j]);
    }
}

}  // namespace rapt::cpu::RAPT_ISA
