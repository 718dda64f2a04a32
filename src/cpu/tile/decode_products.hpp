// The products of attention_decode, for each type of the rows that they read: elements of the cache in place, or
// packed floats. The rest of the kernel is the same for every type and compiled once.
#pragma once

#include "cpu/tile/decode_mma.hpp"
#include "cpu/tile/dtype.hpp"

namespace rapt::cpu::RAPT_ISA {

// The products of one query block and keys [begin, end) of a block.
struct Products {
  // s[key][row] = q . k. A tile may write scores past the last key; these repeat the last key's.
  void (*dots)(std::int64_t rows, const float* q, std::int64_t q_stride, std::int64_t d, const std::byte* const* k,
               const RowScales& scales, std::int64_t begin, std::int64_t end, float* s, std::int64_t s_stride,
               Prefetcher& prefetcher);
  // o[row] += sum of p[key][row] v.
  void (*add)(std::int64_t rows, const float* p, std::int64_t p_stride, const std::byte* const* v,
              const RowScales& scales, std::int64_t dv, std::int64_t begin, std::int64_t end, float* o,
              std::int64_t o_stride, Prefetcher& prefetcher);
  // Widens kLanes elements of key j's row.
  void (*widen)(const std::byte* row, const RowScales& scales, std::int64_t j, std::int64_t column, float* to);
};

// The column of V and out that vector c of O starts at. The last vector overlaps the one before instead of reading
// past the row. (Q's last vector does not overlap: load_tail() has zeros there, or products would count twice.)
inline std::int64_t column_of(std::int64_t c, std::int64_t dv) {
  return min(c, dv - kLanes);
}

template <class Reader>
void dots_of(std::int64_t rows, const float* q, std::int64_t q_stride, std::int64_t d, const std::byte* const* k,
             const RowScales& scales, std::int64_t begin, std::int64_t end, float* s, std::int64_t s_stride,
             Prefetcher& shared) {
  Prefetcher prefetcher = shared;  // in registers
  with_row_tiles(
      rows, [&](auto tile_rows, std::int64_t r) __attribute__((always_inline)) {
        using Tile = DotsTile<Reader, decltype(tile_rows)::value>;
        const Tile tile{q + r * q_stride, d};
        for (std::int64_t j = begin; j < end; j += Tile::kKeys) {
          const std::byte* rest[Tile::kKeys];
          const bool whole = end - j >= Tile::kKeys;
          for (int x = 0; !whole && x < Tile::kKeys; ++x) rest[x] = k[min(j + x, end - 1)];
          tile.run(scales, whole ? k + j : rest, j, s + j * s_stride + r, s_stride, prefetcher);
        }
      });
  shared = prefetcher;
}

template <class Reader>
void add_of(std::int64_t rows, const float* p, std::int64_t p_stride, const std::byte* const* v,
            const RowScales& scales, std::int64_t dv, std::int64_t begin, std::int64_t end, float* o,
            std::int64_t o_stride, Prefetcher& shared) {
  Prefetcher prefetcher = shared;  // in registers
  with_row_tiles(
      rows, [&](auto tile_rows, std::int64_t r) __attribute__((always_inline)) {
        constexpr int kR = decltype(tile_rows)::value;
        constexpr int kC = kRegisters / (2 * kR) < 8 ? kRegisters / (2 * kR) : 8;
        float* const out = o + r * o_stride;
        const std::int64_t whole = dv / kLanes * kLanes;
        std::int64_t c = 0;
        const auto strip = [&](auto vectors, std::int64_t at) __attribute__((always_inline)) {
          add_values<Reader, kR, decltype(vectors)::value>(scales, p + r, p_stride, v, at, begin, end, out + c,
                                                           o_stride, prefetcher);
        };
        for (; c + kC * kLanes <= whole; c += kC * kLanes) strip(std::integral_constant<int, kC>(), c);
        // Then as many vectors at once as remain: each column is a dependent chain of sums.
        if constexpr (kC > 4)
          if (c + 4 * kLanes <= whole) strip(std::integral_constant<int, 4>(), c), c += 4 * kLanes;
        if constexpr (kC > 2)
          if (c + 2 * kLanes <= whole) strip(std::integral_constant<int, 2>(), c), c += 2 * kLanes;
        for (; c < o_stride; c += kLanes) strip(std::integral_constant<int, 1>(), column_of(c, dv));
      });
  shared = prefetcher;
}

template <class Reader>
void widen_of(const std::byte* row, const RowScales& scales, std::int64_t j, std::int64_t column, float* to) {
  store(to, Reader(scales, column, j).load(reinterpret_cast<const typename Reader::Element*>(row), 0));
}

template <class Reader>
inline constexpr Products kProducts = {dots_of<Reader>, add_of<Reader>, widen_of<Reader>};

// For rows without scales, or with one scale a row.
inline const Products& products_of(DType dtype) {
  return *with_cache_type(dtype, [](auto element) { return &kProducts<AsStored<decltype(element)>>; });
}

// For rows of n elements in groups that have a scale each.
inline bool has_products_of_groups(DType dtype, const Quantization& quant, std::int64_t n) {
  const bool whole_vectors = n % kLanes == 0 && quant.group % kMinGroup == 0;
  const bool takes_zero_points = dtype == DType::i8 || dtype == DType::i4x2;
  static_assert(kMinGroup % kLanes == 0);
  return whole_vectors && (quant.group & (quant.group - 1)) == 0 && (takes_zero_points || !quant.zero);
}
inline const Products& products_of_groups(DType dtype, bool zeros) {
  switch (dtype) {
    case DType::i8:
      return zeros ? kProducts<Dequantized<std::int8_t, true>> : kProducts<Dequantized<std::int8_t, false>>;
    case DType::i4x2:
      return zeros ? kProducts<Dequantized<i4x2, true>> : kProducts<Dequantized<i4x2, false>>;
    case DType::f8e4m3:
      return kProducts<Dequantized<e4m3, false>>;
    default:
      return kProducts<Dequantized<e5m2, false>>;
  }
}

}  // namespace rapt::cpu::RAPT_ISA
