// Rows as sums of bf16 planes, and the tiles that the matrix unit multiplies: 16 rows of 32 16-bit elements.
//
// One plane holds a bf16, two an fp16 (8 + 3 bits), three an fp32 (8 + 8 + 8 bits), all of them exactly.
#pragma once

#include "cpu/tile/panel.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr std::int64_t kTileRows = 16, kTileDepth = 32;  // of a tile of 16-bit elements
inline constexpr std::int64_t kTileBytes = 1024;

// The matrix unit takes denormals for 0; below this the last plane of a number may be one.
template <int kPlanes>
inline constexpr float kLeastNumber = kPlanes == 1 ? 0x1p-126f : 0x1p-100f;

// dst[plane][i] = planes of src[i * stride] for i < n, 0 up to `padded`. Returns false if some element has no planes
// because it is too small. (Inf and NaN, and what rounds to Inf, need no check: they turn the output into NaN.)
template <int kPlanes, class T>
[[gnu::always_inline]] inline bool split_row(const T* src, std::int64_t stride, std::int64_t n, std::int64_t padded,
                                             bf16* dst, std::int64_t plane) {
  auto tiny = vec(0.f) != vec(0.f);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    vec x = load_strided(src + i * stride, stride, least(kLanes, n - i));
    const vec size = xsimd::abs(x);
    tiny = tiny | ((size < vec(kLeastNumber<kPlanes>)) & (size != vec(0.f)));
    for (int p = 0; p < kPlanes; ++p) {
      bf16* to = dst + p * plane + i;
      store_any(to, x);
      if (p + 1 < kPlanes) x = x - load_any(to);
    }
  }
  for (int p = 0; p < kPlanes; ++p)
    for (std::int64_t i = round_up(n, kLanes); i < padded; i += kLanes) store_any(dst + p * plane + i, vec(0.f));
  return !xsimd::any(tiny);
}

// Rows [0, rows) of n elements, zeros up to 32 rows of `padded` elements: planes[plane][32][padded]. Returns a bit for
// every row that has no planes.
template <int kPlanes, class RowAt>
[[gnu::noinline]] std::uint32_t split_rows(RowAt row_at, std::int64_t stride, std::int64_t rows, std::int64_t n,
                                           std::int64_t padded, bf16* planes, std::int64_t plane) {
  std::uint32_t bad = 0;
  for (std::int64_t r = 0; r < 32; ++r) {
    const bool good = split_row<kPlanes>(r < rows ? row_at(r) : row_at(0), stride, r < rows ? n : 0, padded,
                                            planes + r * padded, plane);
    bad |= static_cast<std::uint32_t>(!good) << r;
  }
  return bad;
}

// 32 rows of queries -> tiles [padded / 32][2][16 pairs of columns][16 rows], rows in the lanes.
[[gnu::noinline]] inline void tile_queries(const bf16* rows, std::int64_t padded, char* tiles) {
  for (std::int64_t k = 0; k < padded; k += kTileDepth)
    for (std::int64_t half = 0; half < 2; ++half, tiles += kTileBytes)
      for (std::int64_t r0 = 0; r0 < kTileRows; r0 += kLanes)
        for (std::int64_t j0 = 0; j0 < kTileRows; j0 += kLanes) {
          vec t[kLanes];
          for (int i = 0; i < kLanes; ++i) {
            const bf16* at = rows + (half * kTileRows + r0 + i) * padded + k + 2 * j0;
            t[i] = load(reinterpret_cast<const float*>(at));
          }
          transpose(t);
          for (int j = 0; j < kLanes; ++j) store(reinterpret_cast<float*>(tiles) + (j0 + j) * kTileRows + r0, t[j]);
        }
}

// 32 rows (keys) of values -> tiles [padded / 16][16 columns][32 keys].
[[gnu::noinline]] inline void tile_values(const bf16* rows, std::int64_t padded, char* tiles) {
  for (std::int64_t c = 0; c < padded; c += kTileRows, tiles += kTileBytes)
    for (std::int64_t c0 = 0; c0 < kTileRows; c0 += kLanes)
      for (std::int64_t j0 = 0; j0 < kTileRows; j0 += kLanes) {
        vec t[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          const bf16* at = rows + 2 * (j0 + j) * padded + c + c0;
          t[j] = pair_words(load_any(at), load_any(at + padded));
        }
        transpose(t);
        for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(tiles) + (c0 + i) * kTileRows + j0, t[i]);
      }
}

}  // namespace rapt::cpu::RAPT_ISA
