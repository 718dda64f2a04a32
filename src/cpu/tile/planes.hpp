// Rows as sums of bf16 planes, and the tiles that the matrix unit multiplies: 16 rows of 32 16-bit elements.
//
// One plane holds a bf16, two an fp16 (8 + 3 bits), three an fp32 (8 + 8 + 8 bits), all of them exactly.
#pragma once

#include "cpu/tile/panel.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr std::int64_t kTileRows = 16, kTileDepth = 32;  // of a tile of 16-bit elements
inline constexpr std::int64_t kTileBytes = 1024;

// 2 * kLanes elements of 16 bits.
using halves = xsimd::batch<std::uint16_t, arch>;
[[gnu::always_inline]] inline halves load_halves_pair(const bf16* p) {
  return halves::load_unaligned(&p->bits);
}
[[gnu::always_inline]] inline void store_halves_pair(bf16* p, halves x) {
  x.store_unaligned(&p->bits);
}

// What the matrix unit may be given. It takes denormals for 0, in operands, planes, products and sums, so values that
// meet weights from 2^-39 up must not be small, and of no number may the last plane be a denormal. Products of queries
// and keys must not overflow, or the scores may be NaN.
template <int kPlanes>
struct UsualFactor {
  static constexpr float kLowest = kPlanes == 1 ? 0x1p-126f : 0x1p-100f, kHighest = 0x1p57f;
};
template <int kPlanes>
struct UsualValue {
  static constexpr float kLowest = kPlanes == 1 ? 0x1p-80f : 0x1p-88f, kHighest = 0x1p127f;
};

// Looks for elements that are neither 0 nor usual; Inf and NaN are not.
template <class Usual>
class Inspector {
 public:
  [[gnu::always_inline]] void see(vec x) {
    const vec size = xsimd::abs(x);
    const auto usual = (size >= vec(Usual::kLowest)) & (size < vec(Usual::kHighest));
    unusual_ = unusual_ | !(usual | (size == vec(0.f)));
  }
  // 2 * kLanes elements of bf16.
  [[gnu::always_inline]] void see(halves x) {
    x = x & halves(0x7fff);
    largest_ = xsimd::max(largest_, x);
    smallest_ = xsimd::min(smallest_, x - halves(1));  // 0 is large now
  }
  bool found() const {
    return xsimd::any(unusual_) || xsimd::any(largest_ >= halves(upper(Usual::kHighest))) ||
           xsimd::any(smallest_ < halves(static_cast<std::uint16_t>(upper(Usual::kLowest) - 1)));
  }

 private:
  static std::uint16_t upper(float x) { return static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, x) >> 16); }
  typename vec::batch_bool_type unusual_ = vec(0.f) != vec(0.f);
  halves largest_ = halves(0), smallest_ = halves(0xffff);
};

// to[plane][i] = planes of from[i * stride] for i < n, 0 up to `padded`; `plane` elements from one plane to the next.
template <int kPlanes, class T, class Usual>
[[gnu::always_inline]] inline void split_row(const T* from, std::int64_t stride, std::int64_t n, std::int64_t padded,
                                             bf16* to, std::int64_t plane, Inspector<Usual>& inspector) {
  std::int64_t i = 0;
  if constexpr (kPlanes == 1 && std::is_same_v<T, bf16>) {
    for (; stride == 1 && i + 2 * kLanes <= n; i += 2 * kLanes) {
      const halves x = load_halves_pair(from + i);
      inspector.see(x);
      store_halves_pair(to + i, x);
    }
  }
  for (; i < n; i += kLanes) {
    vec x = load_strided(from + i * stride, stride, min(kLanes, n - i));
    inspector.see(x);
    for (int p = 0; p < kPlanes; ++p) {
      store_any(to + p * plane + i, x);
      if (p + 1 < kPlanes) x = x - load_any(to + p * plane + i);
    }
  }
  for (; i < padded; i += kLanes)
    for (int p = 0; p < kPlanes; ++p) store_any(to + p * plane + i, vec(0.f));
}

// Planes of 32 rows: where the first plane of each row lies, and a bit for every row that has no planes. Those are 0.
struct PlaneRows {
  const bf16* row[32];
  std::uint32_t unusual = 0;
};

// Splits rows [0, rows) of n elements into to[plane][32][padded], zeros after the last. `row_at(i)` is where row i
// lies. With `in_place` rows that are planes already stay where they are.
template <int kPlanes, class Usual, class RowAt>
[[gnu::noinline]] PlaneRows split_rows(RowAt row_at, std::int64_t stride, std::int64_t rows, std::int64_t n,
                                       std::int64_t padded, bf16* to, std::int64_t plane, bool in_place) {
  using T = std::remove_cvref_t<decltype(*row_at(0))>;
  constexpr bool kIsPlane = kPlanes == 1 && std::is_same_v<T, bf16>;
  in_place = in_place && kIsPlane && stride == 1 && n == padded && rows == 32;
  PlaneRows planes;
  const auto split = [&](std::int64_t r, std::int64_t size, Inspector<Usual>& inspector) {
    planes.row[r] = to + r * padded;
    split_row<kPlanes>(row_at(r < rows ? r : 0), stride, size, padded, to + r * padded, plane, inspector);
  };
  Inspector<Usual> all;
  for (std::int64_t r = 0; r < 32; ++r) {
    if (!in_place) {
      split(r, r < rows ? n : 0, all);
    } else if constexpr (kIsPlane) {
      planes.row[r] = row_at(r);
      for (std::int64_t i = 0; i < n; i += 2 * kLanes) all.see(load_halves_pair(planes.row[r] + i));
    }
  }
  for (std::int64_t r = 0; all.found() && r < rows; ++r) {  // which rows?
    Inspector<Usual> one;
    split(r, n, one);
    if (!one.found()) continue;
    planes.unusual |= std::uint32_t{1} << r;
    split(r, 0, one);
  }
  return planes;
}

// 32 rows of queries -> tiles [padded / 32][2][16 pairs of columns][16 rows], rows in the lanes; of the plane that lies
// `plane` elements behind the first.
[[gnu::noinline]] inline void tile_queries(const PlaneRows& planes, std::int64_t plane, std::int64_t padded,
                                           char* tiles) {
  for (std::int64_t k = 0; k < padded; k += kTileDepth)
    for (std::int64_t half = 0; half < 2; ++half, tiles += kTileBytes)
      for (std::int64_t r0 = 0; r0 < kTileRows; r0 += kLanes)
        for (std::int64_t j0 = 0; j0 < kTileRows; j0 += kLanes) {
          vec t[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) {
            const bf16* at = planes.row[half * kTileRows + r0 + i] + plane + k + 2 * j0;
            t[i] = load_any(reinterpret_cast<const float*>(at));
          }
          transpose(t);
#pragma GCC unroll 16
          for (int j = 0; j < kLanes; ++j) store(reinterpret_cast<float*>(tiles) + (j0 + j) * kTileRows + r0, t[j]);
        }
}

// 32 rows (keys) of values -> tiles [padded / 16][16 columns][32 keys], likewise.
[[gnu::noinline]] inline void tile_values(const PlaneRows& planes, std::int64_t plane, std::int64_t padded,
                                          char* tiles) {
  for (std::int64_t c = 0; c < padded; c += kTileRows, tiles += kTileBytes)
    for (std::int64_t c0 = 0; c0 < kTileRows; c0 += kLanes)
      for (std::int64_t j0 = 0; j0 < kTileRows; j0 += kLanes) {
        vec t[kLanes];
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) {
          const std::int64_t at = plane + c + c0;
          t[j] = truncate_to_bf16_pairs(load_any(planes.row[2 * (j0 + j)] + at),
                                        load_any(planes.row[2 * (j0 + j) + 1] + at));
        }
        transpose(t);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(tiles) + (c0 + i) * kTileRows + j0, t[i]);
      }
}

}  // namespace rapt::cpu::RAPT_ISA
