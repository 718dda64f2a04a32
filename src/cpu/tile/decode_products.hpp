// attention_decode's products by the type of the rows that they read: elements of the cache in place, or packed floats.
// All else of the kernel is the same for every type, and compiled once.
#pragma once

#include "cpu/tile/decode_mma.hpp"
#include "cpu/tile/dtype.hpp"

namespace rapt::cpu::RAPT_ISA {

// The products of one panel with keys [begin, end) of a block.
struct Products {
  // s[key][row] = q . k, and what a tile computes past the last key.
  void (*dots)(std::int64_t rows, const float* q, std::int64_t q_stride, std::int64_t d, const std::byte* const* k,
               std::int64_t begin, std::int64_t end, float* s, Prefetcher& prefetcher);
  // o[row] += sum of p[key][row] v.
  void (*add)(std::int64_t rows, const float* p, const std::byte* const* v, std::int64_t dv, std::int64_t begin,
              std::int64_t end, float* o, std::int64_t o_stride, Prefetcher& prefetcher);
  // kLanes elements of a row.
  void (*widen)(const std::byte* row, std::int64_t column, float* to);
};

// The column at which a vector of O starts in V and out: the last one covers some columns again rather than read past
// the row. (Q's last vector does not: load_tail() has zeros there, or products would count twice.)
inline std::int64_t column_of(std::int64_t c, std::int64_t dv) {
  return min(c, dv - kLanes);
}

template <class T>
void dots_of(std::int64_t rows, const float* q, std::int64_t q_stride, std::int64_t d, const std::byte* const* k,
             std::int64_t begin, std::int64_t end, float* s, Prefetcher& shared) {
  Prefetcher prefetcher = shared;  // in registers
  with_row_tiles(
      rows, [&](auto tile_rows, std::int64_t r) __attribute__((always_inline)) {
        using Tile = DotsTile<T, decltype(tile_rows)::value>;
        const Tile tile{q + r * q_stride, d};
        for (std::int64_t j = begin; j < end; j += Tile::kKeys) {
          const T* of_tile[Tile::kKeys];
          for (int x = 0; x < Tile::kKeys; ++x) of_tile[x] = reinterpret_cast<const T*>(k[min(j + x, end - 1)]);
          tile.run(of_tile, s + j * kLanes + r, prefetcher);
        }
      });
  shared = prefetcher;
}

template <class T>
void add_of(std::int64_t rows, const float* p, const std::byte* const* v, std::int64_t dv, std::int64_t begin,
            std::int64_t end, float* o, std::int64_t o_stride, Prefetcher& shared) {
  Prefetcher prefetcher = shared;  // in registers
  with_row_tiles(
      rows, [&](auto tile_rows, std::int64_t r) __attribute__((always_inline)) {
        constexpr int kR = decltype(tile_rows)::value;
        constexpr int kC = kRegisters / (2 * kR) < 8 ? kRegisters / (2 * kR) : 8;
        float* const out = o + r * o_stride;
        const std::int64_t whole = dv / kLanes * kLanes;
        std::int64_t c = 0;
        const auto strip = [&](auto vectors, std::int64_t at) __attribute__((always_inline)) {
          add_values<T, kR, decltype(vectors)::value>(p + r, v, at, begin, end, out + c, o_stride, prefetcher);
        };
        for (; c + kC * kLanes <= whole; c += kC * kLanes) strip(std::integral_constant<int, kC>(), c);
        for (; c < o_stride; c += kLanes) strip(std::integral_constant<int, 1>(), column_of(c, dv));
      });
  shared = prefetcher;
}

template <class T>
void widen_of(const std::byte* row, std::int64_t column, float* to) {
  store(to, load_any(reinterpret_cast<const T*>(row) + column));
}

template <class T>
inline constexpr Products kProducts = {dots_of<T>, add_of<T>, widen_of<T>};
template <>
inline constexpr Products kProducts<i4x2> = {};  // always packed

inline const Products& products_of(DType dtype) {
  return *with_cache_type(dtype, [](auto element) { return &kProducts<decltype(element)>; });
}

}  // namespace rapt::cpu::RAPT_ISA
