// Splits numbers into sums of bf16 components, and packs these into the tiles that the matrix unit multiplies: 16 rows
// of 32 components.
//
// One component holds a bf16 exactly, two an fp16 (8 + 3 bits).
#pragma once

#include "cpu/tile/dtype.hpp"
#include "cpu/tile/head.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr std::int64_t kTileRows = 16, kTileDepth = 32;  // of a tile of 16-bit elements
inline constexpr std::int64_t kTileBytes = 1024;

using u32vec = xsimd::batch<std::uint32_t, arch>;
[[gnu::always_inline]] inline u16vec load_u16vec(const bf16* p) {
  return u16vec::load_unaligned(&p->bits);
}
[[gnu::always_inline]] inline u16vec as_u16vec(vec x) {
  return u16vec((u16vec::register_type)cast_to_int(x).data);
}
[[gnu::always_inline]] inline void store_u16vec(bf16* p, u16vec x) {
  x.store_unaligned(&p->bits);
}

// The rows of B hold pairs. Where vectors multiply two rows at a time (bf16_mma_dots.hpp), kMergedRows rows are
// merged: the places of rows k and k + 1 hold, for each column, the pairs of both rows side by side; columns of a
// vector's first half are in the place of row k.
#if defined(RAPT_HAVE_DOTS)
inline constexpr int kMergedRows = kDotRows;
#else
inline constexpr int kMergedRows = 1;
#endif
template <int kRows>
[[gnu::always_inline]] inline void merge_rows(vec (&x)[kRows]) {
  if constexpr (kRows == 2 && kMergedRows == 2) merge_pairs(x[0], x[1]);
}

// The numbers that components can represent for the matrix unit: 0, and magnitudes in [kMin, kMax). The unit takes
// denormals for 0, in operands, products and sums. So no number's last component may be a denormal, and values, whose
// weights may be as small as 2^-39, must not be small. Products of queries and keys must not overflow, or scores may
// be NaN.
template <int kComponents>
struct RepresentableFactor {
  static constexpr float kMin = kComponents == 1 ? 0x1p-126f : 0x1p-100f, kMax = 0x1p57f;
};
template <int kComponents>
struct RepresentableValue {
  static constexpr float kMin = kComponents == 1 ? 0x1p-80f : 0x1p-88f, kMax = 0x1p127f;
};

// For keys whose rows begin with their values: both limits.
template <int kComponents>
struct RepresentableFactorAndValue {
  static constexpr float kMin = RepresentableValue<kComponents>::kMin, kMax = RepresentableFactor<kComponents>::kMax;
};

// Checks whether all elements of some rows are representable. Inf and NaN never are.
template <class Representable>
class RepresentableCheck {
 public:
  [[gnu::always_inline]] void add(vec x) {
    const u32vec size = u32vec((u32vec::register_type)cast_to_int(x).data) & u32vec(0x7fffffff);
    max_of_fp32_ = xsimd::max(max_of_fp32_, size);
    min_of_fp32_ = xsimd::min(min_of_fp32_, size - u32vec(1));  // 0 is large now
  }
  // 2 * kLanes elements of bf16.
  [[gnu::always_inline]] void add(u16vec x) {
    x = x & u16vec(0x7fff);
    max_ = xsimd::max(max_, x);
    min_ = xsimd::min(min_, x - u16vec(1));  // 0 is large now
  }
  [[gnu::always_inline]] bool failed() const {  // always_inline, or the minima and maxima would be kept in memory
    return xsimd::any(max_of_fp32_ >= u32vec(bits(Representable::kMax))) ||
           xsimd::any(min_of_fp32_ < u32vec(bits(Representable::kMin) - 1)) ||
           xsimd::any(max_ >= u16vec(upper(Representable::kMax))) ||
           xsimd::any(min_ < u16vec(static_cast<std::uint16_t>(upper(Representable::kMin) - 1)));
  }

 private:
  static std::uint32_t bits(float x) { return __builtin_bit_cast(std::uint32_t, x); }
  static std::uint16_t upper(float x) { return static_cast<std::uint16_t>(bits(x) >> 16); }
  u32vec max_of_fp32_ = u32vec(0), min_of_fp32_ = u32vec(0xffffffff);
  u16vec max_ = u16vec(0), min_ = u16vec(0xffff);
};

// The factor of a row's elements, asked for one vector after another: none, or the scale of the group, which has a
// whole number of vectors. (A product with more bits than the components is rounded.)
struct NoScale {
  vec operator()(vec x, std::int64_t) const { return x; }
};
struct GroupScales {
  const float* scale;
  std::int64_t stride, group;  // between scales; elements
  std::int64_t end = group;    // of the group that `scale` is of

  [[gnu::always_inline]] vec operator()(vec x, std::int64_t i) {
    if (i >= end) scale += stride, end += group;
    return x * vec(*scale);
  }
};

// to[component][i] = component of from[i * stride] for i < n, and 0 up to `padded`. Components are `component_stride`
// elements apart.
template <int kComponents, class T, class Representable, class Scale = NoScale>
[[gnu::always_inline]] inline void split_row(const T* from, std::int64_t stride, std::int64_t n, std::int64_t padded,
                                             bf16* to, std::int64_t component_stride,
                                             RepresentableCheck<Representable>& check, Scale scale = {}) {
  std::int64_t i = 0;
  for (; kComponents == 1 && stride == 1 && i + 2 * kLanes <= n; i += 2 * kLanes) {
    if constexpr (std::is_same_v<Scale, NoScale> && requires { load_u16vec(from); }) {
      const u16vec x = load_u16vec(from + i);
      check.add(x);
      store_u16vec(to + i, x);
    } else {  // (what becomes 0 here is not representable and found by the check)
      const vec first = scale(load_any(from + i / kPerUnit<T>), i),
                second = scale(load_any(from + (i + kLanes) / kPerUnit<T>), i + kLanes);
      check.add(first), check.add(second);
      store_bf16(to + i, first, second);
    }
  }
  const auto split = [&](vec x) __attribute__((always_inline)) {
    x = scale(x, i);
    check.add(x);
    for (int p = 0; p < kComponents; ++p) {
      store_any(to + p * component_stride + i, x);
      if (p + 1 < kComponents) x = x - load_any(to + p * component_stride + i);
    }
  };
  for (; stride == 1 && i + kLanes <= n; i += kLanes) split(load_any(from + i / kPerUnit<T>));
  for (; i < n; i += kLanes) {
    const std::int64_t at = i / kPerUnit<T>, units = (n + kPerUnit<T> - 1) / kPerUnit<T>;
    split(load_strided(from + at * stride, stride, min(kLanes / kPerUnit<T>, units - at)));
  }
  for (; i < padded; i += kLanes)
    for (int p = 0; p < kComponents; ++p) store_any(to + p * component_stride + i, vec(0.f));
}

// 32 rows as components: the address of each row's first component, and a bit for every row with an element that is
// not representable. Such rows have components of 0.
struct ComponentRows {
  const bf16* row[32];
  std::uint32_t not_representable = 0;
};

// Whether rows that are bf16 already may be read in place: `whole`, if they are whole rows of tiles; `in_parts`, if
// only tile_queries() and tile_values() read them, which read parts of 8 elements.
enum class InPlace { no, whole, in_parts };
inline constexpr std::int64_t kPartElements = 8;  // elements, 16 bytes

// n, the elements of a row, is a multiple of kPartElements.
template <class Representable>
bool rows_are_representable(const bf16* const (&row)[32], std::int64_t n) {
  RepresentableCheck<Representable> check;
  const std::int64_t whole = n / (2 * kLanes) * (2 * kLanes);
  for (const bf16* const from : row)
    for (std::int64_t i = 0; i < whole; i += 2 * kLanes) check.add(load_u16vec(from + i));
  for (std::int64_t i = whole; i < n; i += kPartElements)
    for (int r = 0; r < 32; r += kParts) check.add(as_u16vec(load_parts([&](int part) { return row[r + part] + i; })));
  return !check.failed();
}

// Copies a row of n elements, with zeros up to `padded`.
inline void copy_row(const bf16* from, std::int64_t n, std::int64_t padded, bf16* to) {
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) store_u16vec(to + i, load_u16vec(from + i));
  for (std::int64_t j = i; j < padded; j += 2 * kLanes) store_u16vec(to + j, u16vec(0));
  for (; i + kPartElements <= n; i += kPartElements) __builtin_memcpy(to + i, from + i, kPartElements * sizeof(bf16));
  for (; i < n; ++i) to[i] = from[i];
}

// Splits rows [0, rows) of n elements into to[component][32][padded]. Elements up to `padded` and rows after the last
// are 0; where rows stay in place, rows after the last repeat it. row_at(i) is the address of row i, scale_of(i) its
// factor.
template <int kComponents, class Representable, class RowAt, class ScaleOf>
[[gnu::noinline]] ComponentRows split_rows(const RowAt& row_at, std::int64_t stride, std::int64_t rows, std::int64_t n,
                                           std::int64_t padded, bf16* to, std::int64_t component_stride,
                                           InPlace in_place, ScaleOf scale_of) {
  using T = std::remove_cvref_t<decltype(*row_at(0))>;
  using Scale = decltype(scale_of(0));
  ComponentRows result;
  const auto split = [&](std::int64_t r, std::int64_t size, RepresentableCheck<Representable>& check) {
    result.row[r] = to + r * padded;
    const std::int64_t from = r < rows ? r : 0;
    split_row<kComponents>(row_at(from), stride, size, padded, to + r * padded, component_stride, check,
                           scale_of(from));
  };
  if constexpr (kComponents == 1 && std::is_same_v<T, bf16> && std::is_same_v<Scale, NoScale>) {
    if (stride == 1) {
      const bool stays = in_place == InPlace::whole ? n == padded && rows == 32
                                                    : in_place == InPlace::in_parts && n % kPartElements == 0;
      for (std::int64_t r = 0; r < rows; ++r) result.row[r] = row_at(r);
      for (std::int64_t r = rows; r < 32; ++r) result.row[r] = result.row[rows - 1];
      for (std::int64_t r = 0; !stays && r < 32; ++r) {
        copy_row(result.row[r], r < rows ? n : 0, padded, to + r * padded);
        result.row[r] = to + r * padded;
      }
      if (rows_are_representable<Representable>(result.row, stays ? n : padded)) return result;
    }
  }
  RepresentableCheck<Representable> all;
  for (std::int64_t r = 0; r < 32; ++r) split(r, r < rows ? n : 0, all);
  for (std::int64_t r = 0; all.failed() && r < rows; ++r) {  // finds which rows
    RepresentableCheck<Representable> one;
    split(r, n, one);
    if (!one.failed()) continue;
    result.not_representable |= std::uint32_t{1} << r;
    split(r, 0, one);
  }
  return result;
}
template <int kComponents, class Representable, class RowAt>
ComponentRows split_rows(const RowAt& row_at, std::int64_t stride, std::int64_t rows, std::int64_t n,
                         std::int64_t padded, bf16* to, std::int64_t component_stride, InPlace in_place) {
  return split_rows<kComponents, Representable>(row_at, stride, rows, n, padded, to, component_stride, in_place,
                                                [](std::int64_t) { return NoScale(); });
}

// In: four vectors, each with a row of four 32-bit elements in every 128-bit part. Out: four vectors with a column in
// every part.
[[gnu::always_inline]] inline void transpose_parts(vec (&x)[4]) {
  using Column = std::uint32_t;
  using Columns = std::uint64_t;
  const vec y[4] = {interleave<Column, false>(x[0], x[1]), interleave<Column, false>(x[2], x[3]),
                    interleave<Column, true>(x[0], x[1]), interleave<Column, true>(x[2], x[3])};
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    x[i] = interleave<Columns, false>(y[i], y[i + 1]);
    x[i + 1] = interleave<Columns, true>(y[i], y[i + 1]);
  }
}

// 32 query rows of n elements -> tiles [padded / 32][2][16 pairs of columns][16 rows], rows in the lanes, pairs
// merged. Columns past the last part with elements are 0. `component` is the offset in elements of the component to
// pack.
[[gnu::noinline]] inline void tile_queries(const ComponentRows& rows, std::int64_t component, std::int64_t n,
                                           std::int64_t padded, char* tiles) {
  auto* to = reinterpret_cast<float*>(tiles);
  for (std::int64_t k = 0; k < padded; k += kTileDepth)
    for (std::int64_t half = 0; half < 2; ++half)
      for (std::int64_t column = k; column < k + kTileDepth;
           column += kPartElements, to += kPartElements / 2 * kTileRows) {
        if (column >= n) {
          for (std::int64_t i = 0; i < kPartElements / 2 * kTileRows; i += kLanes) store(to + i, vec(0.f));
          continue;
        }
        for (std::int64_t r = 0; r < kTileRows; r += kLanes) {
          vec x[4];
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i)
            x[i] = load_parts(
                [&](int part) { return rows.row[half * kTileRows + r + 4 * part + i] + component + column; });
          transpose_parts(x);
#pragma GCC unroll 2
          for (int i = 0; i < 4; i += 2) {
            vec pairs[2] = {x[i], x[i + 1]};
            merge_rows(pairs);
            store(to + i * kTileRows + r, pairs[0]);
            store(to + (i + 1) * kTileRows + r, pairs[1]);
          }
        }
      }
}

// 32 rows (keys) of n values -> tiles [n / 16, rounded up][16 columns][32 keys], likewise. Columns past the last part
// with elements are left as they are. A pair is two keys kApart apart: 1 (neighbours) or 16.
template <std::int64_t kApart = 1>
[[gnu::noinline]] inline void tile_values(const ComponentRows& rows, std::int64_t component, std::int64_t n,
                                          char* tiles) {
  auto* to = reinterpret_cast<float*>(tiles);
  for (std::int64_t column = 0; column < n; column += kPartElements, to += kPartElements * kTileRows)
    for (std::int64_t first = 0; first < kTileRows; first += kLanes) {  // of the pairs
      vec low[4], high[4];                                              // columns 0 to 3, and 4 to 7
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const auto key = [&](int part, int odd) __attribute__((always_inline)) {
          const std::int64_t pair = first + 4 * part + i;
          return rows.row[kApart == 1 ? 2 * pair + odd : pair + kApart * odd] + component + column;
        };
        const vec even = load_parts([&](int part) { return key(part, 0); }),
                  odd = load_parts([&](int part) { return key(part, 1); });
        low[i] = interleave<std::uint16_t, false>(even, odd), high[i] = interleave<std::uint16_t, true>(even, odd);
      }
      transpose_parts(low), transpose_parts(high);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        store(to + i * kTileRows + first, low[i]);
        store(to + (4 + i) * kTileRows + first, high[i]);
      }
    }
}

}  // namespace rapt::cpu::RAPT_ISA
