// The two matrix products of attention for a few query rows, bound by reading K and V. Vector lanes run along d and
// dv, so that a single row fills them, and each key is loaded (and widened) once for up to 4 rows, or 8.
#pragma once

#include "cpu/tile/deinterleave.hpp"
#include "cpu/tile/dtype.hpp"
#include "cpu/tile/head.hpp"
#include "cpu/tile/prefetcher.hpp"

namespace rapt::cpu::RAPT_ISA {

// Query rows of a tile: 4, or 8 where the registers hold that many sums.
inline constexpr int kRowsOfTile = 4, kMaxRowsOfTile = kLanes == 16 ? 8 : kRowsOfTile;

// The largest number of keys of a block and of a tile.
inline constexpr std::int64_t kKeysOfBlock = 64, kMaxKeysOfTile = 16;

// The number of cache lines in n vectors of T, at least one.
template <class T>
constexpr int lines_of(int n) {
  const int bytes = n * kLanes * static_cast<int>(sizeof(T)) / static_cast<int>(kPerUnit<T>);
  return bytes < 64 ? 1 : bytes / 64;
}

// The smallest group that is dequantised in place.
inline constexpr std::int64_t kMinGroup = 16;

// The scales and zeros of a block's keys.
struct RowScales {
  float *scale, *zero;  // [group][kKeysOfBlock], then kMaxKeysOfTile more: a tile reads past the last key
  int group_log2;       // log2 of the elements of a group
};

// A reader of kLanes elements from column i on, of the rows of keys j, j + 1, ...: this one for elements without
// scales.
template <class T>
struct AsStored {
  using Element = T;
  AsStored(const RowScales&, std::int64_t i, std::int64_t) : first_(i / kPerUnit<T>) {}
  // `row` is that of key j + x.
  [[gnu::always_inline]] vec load(const T* row, int) const { return load_any(row + first_); }

 private:
  std::int64_t first_;
};
// A reader that gives (code - zero) * scale. Groups are whole vectors.
template <class T, bool kHasZero>
struct Dequantized {
  using Element = T;
  Dequantized(const RowScales& scales, std::int64_t i, std::int64_t j)
      : first_(i / kPerUnit<T>),
        scale_(scales.scale + (i >> scales.group_log2) * kKeysOfBlock + j),
        zero_(scales.zero + (i >> scales.group_log2) * kKeysOfBlock + j) {}
  [[gnu::always_inline]] vec load(const T* row, int x) const {
    const vec code = load_any(row + first_);
    return (kHasZero ? code - vec(zero_[x]) : code) * vec(scale_[x]);
  }

 private:
  std::int64_t first_;
  const float *scale_, *zero_;
};

// Whether this reader deinterleaves the whole pairs of vectors of a row (deinterleave.hpp).
template <class Reader>
inline constexpr bool kDeinterleaves = std::is_same_v<Reader, AsStored<bf16>>;

// Calls f(integral_constant<int, n>, row) for tiles of 8, 4, 2 and 1 rows. Three are done as four, and seven as eight:
// scratch has room for the extra row.
template <class F>
[[gnu::always_inline]] inline void with_row_tiles(std::int64_t rows, F f) {
  std::int64_t r = 0;
  if constexpr (kMaxRowsOfTile == 8)
    for (; rows - r >= 7; r += 8) f(std::integral_constant<int, 8>(), r);
  for (; rows - r >= 3; r += 4) f(std::integral_constant<int, 4>(), r);
  if (rows - r == 2) f(std::integral_constant<int, 2>(), r);
  if (rows - r == 1) f(std::integral_constant<int, 1>(), r);
}

// The last n % kLanes of n >= kLanes elements in the upper lanes, 0 below.
template <class T>
[[gnu::always_inline]] inline vec load_tail(const T* row, std::int64_t n) {
  alignas(64) static constexpr std::int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const ivec covered(static_cast<std::int32_t>(kLanes - n % kLanes));
  const ivec x = cast_to_int(load_any(row + (n - kLanes) / kPerUnit<T>));
  return cast_to_float(xsimd::select(covered > ivec::load_aligned(kLane), ivec(0), x));
}

// Writes a row of d >= kLanes elements to a tile of queries for DotsTile, [ceil(d / kLanes)][rows][kLanes]. `to` is the
// row's first vector there.
inline void put_query(const float* row, std::int64_t d, std::int64_t rows, float* to) {
  for (std::int64_t c = 0; c < d; c += kLanes, to += rows * kLanes)
    store(to, c + kLanes <= d ? load(row + c) : load_tail(row, d));
}

// s[key][row] = q[row] . k[key] for kR rows and so many keys that their scores fill vectors; a few keys at a time,
// enough sums to cover the latency of an FMA.
template <class Reader, int kR>
struct DotsTile {
  using T = typename Reader::Element;
  static constexpr int kAtOnce = (kLanes == 16 && kR > 1 ? 16 : 8) / kR;
  static constexpr int kKeys = (kLanes < 8 ? 8 : kLanes) / kR;
  static_assert(kKeys <= kMaxKeysOfTile);
  const float* q;  // [ceil(d / kLanes)][kR][kLanes]; the last d % kLanes elements in the upper lanes, as load_tail()
  std::int64_t d;

  // The keys are those from j on of the block. s: of the first one, each `s_stride` further than the one before.
  [[gnu::always_inline]] void run(const RowScales& scales, const std::byte* const* k, std::int64_t j, float* s,
                                  std::int64_t s_stride, Prefetcher& prefetcher) const {
    vec total[kKeys * kR];
#pragma GCC unroll 2
    for (int first = 0; first < kKeys; first += kAtOnce) {
      const T* row_of_key[kAtOnce];
      vec acc[kAtOnce][kR];
#pragma GCC unroll 8
      for (int x = 0; x < kAtOnce; ++x) row_of_key[x] = reinterpret_cast<const T*>(k[first + x]);
#pragma GCC unroll 8
      for (int x = 0; x < kAtOnce; ++x)
#pragma GCC unroll 8
        for (int r = 0; r < kR; ++r) acc[x][r] = vec(0.f);
      const auto step = [&](auto load_key, const float* qv) __attribute__((always_inline)) {
        vec key[kAtOnce];
#pragma GCC unroll 8
        for (int x = 0; x < kAtOnce; ++x) key[x] = load_key(row_of_key[x], first + x);
#pragma GCC unroll 8
        for (int r = 0; r < kR; ++r) {
          vec row = load(qv + r * kLanes);
          keep_in_register(row);  // rather than load it again for every key
#pragma GCC unroll 8
          for (int x = 0; x < kAtOnce; ++x) acc[x][r] = fma(row, key[x], acc[x][r]);
        }
      };
      const std::int64_t whole = d / kLanes * kLanes;
      std::int64_t i = 0;
      if constexpr (kDeinterleaves<Reader>) {
        for (; i < deinterleaved(d); i += 2 * kLanes) {
          const float *const even = q + i * kR, *const odd = even + kLanes * kR;
          if constexpr (kR <= 2) {  // key by key: registers do not hold all of them
            const auto add = [&](vec key, const float* qv, vec(&sums)[kR]) __attribute__((always_inline)) {
#pragma GCC unroll 2
              for (int r = 0; r < kR; ++r) sums[r] = fma(load(qv + r * kLanes), key, sums[r]);
            };
#pragma GCC unroll 8
            for (int x = 0; x < kAtOnce; ++x) {
              vec pairs = load_pairs(row_of_key[x] + i);
              keep_in_register(pairs);
              add(even_elements(pairs), even, acc[x]);
              add(odd_elements(pairs), odd, acc[x]);
              if (x % (kAtOnce / 2) == 0) prefetcher.prefetch(lines_of<T>(kAtOnce));
            }
          } else {
            step([&](const T* row, int) { return even_elements(load_pairs(row + i)); }, even);
            prefetcher.prefetch(lines_of<T>(kAtOnce));
            step([&](const T* row, int) { return odd_elements(load_pairs(row + i)); }, odd);
            prefetcher.prefetch(lines_of<T>(kAtOnce));
          }
        }
      }
      for (; i < whole; i += kLanes) {
        const Reader reader(scales, i, j);
        step([&](const T* row, int x) { return reader.load(row, x); }, q + i * kR);
        prefetcher.prefetch(lines_of<T>(kAtOnce));
      }
      if constexpr (std::is_same_v<Reader, AsStored<T>>) {
        if (whole < d) step([&](const T* row, int) { return load_tail(row, d); }, q + whole * kR);
      }
#pragma GCC unroll 8
      for (int x = 0; x < kAtOnce; ++x)
#pragma GCC unroll 8
        for (int r = 0; r < kR; ++r) total[(first + x) * kR + r] = acc[x][r];
    }
#pragma GCC unroll 2
    for (int u = 0; u < kKeys * kR; u += kLanes) {
      vec part[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) part[i] = total[u + i];
      const vec scores = sums(part);
      if (s_stride == kR) {
        store_any(s + u, scores);
        continue;
      }
      alignas(64) float result[kLanes];
      store(result, scores);
#pragma GCC unroll 16
      for (int x = 0; x < kLanes / kR; ++x)
        __builtin_memcpy(s + (u / kR + x) * s_stride, result + x * kR, kR * sizeof(float));
    }
  }
};

// o[row][0 .. kC vectors) += sum over keys of p[key][row] v[key][...] for kR rows.
template <class Reader, int kR, int kC>
[[gnu::always_inline]] inline void add_values(const RowScales& scales, const float* p, std::int64_t p_stride,
                                              const std::byte* const* v, std::int64_t column, std::int64_t begin,
                                              std::int64_t end, float* o, std::int64_t o_stride,
                                              Prefetcher& prefetcher) {
  using T = typename Reader::Element;
  vec acc[kR][kC];
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kC; ++c) acc[r][c] = vec(0.f);
  p += begin * p_stride;
  for (std::int64_t j = begin; j < end; ++j, p += p_stride) {
    const T* const row = reinterpret_cast<const T*>(v[j]);
    vec x[kC];
    if constexpr (kDeinterleaves<Reader> && kC > 1) {
#pragma GCC unroll 8
      for (int c = 0; c < kC; c += 2) {
        const vec pairs = load_pairs(row + column + c * kLanes);
        x[c] = even_elements(pairs), x[c + 1] = odd_elements(pairs);
      }
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < kC; ++c) x[c] = Reader(scales, column + c * kLanes, j).load(row, 0);
    }
    prefetcher.prefetch(lines_of<T>(kC));
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
      const vec weight(p[r]);
#pragma GCC unroll 8
      for (int c = 0; c < kC; ++c) acc[r][c] = fma(weight, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kC; ++c) {
      float* const at = o + r * o_stride + c * kLanes;
      store(at, load(at) + acc[r][c]);
    }
}

}  // namespace rapt::cpu::RAPT_ISA
