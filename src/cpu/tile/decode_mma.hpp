// The two matrix products of attention for a few query rows, bound by reading K and V: lanes run along d and dv, so
// that a single row fills them, and every key is loaded (and widened) once for up to 4 rows.
#pragma once

#include "cpu/tile/panel.hpp"
#include "cpu/tile/prefetcher.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr int kRowsOfTile = 4;

// Lines of memory in n vectors of T, at least one.
template <class T>
constexpr int lines_of(int n) {
  const int bytes = n * kLanes * static_cast<int>(sizeof(T));
  return bytes < 64 ? 1 : bytes / 64;
}

// Calls f(integral_constant<int, n>, row) for tiles of 4, 2 and 1 rows. Three are done as four: there is a row more.
template <class F>
[[gnu::always_inline]] inline void with_row_tiles(std::int64_t rows, F f) {
  std::int64_t r = 0;
  for (; rows - r >= 3; r += 4) f(std::integral_constant<int, 4>(), r);
  if (rows - r == 2) f(std::integral_constant<int, 2>(), r);
  if (rows - r == 1) f(std::integral_constant<int, 1>(), r);
}

// The last n % kLanes of n >= kLanes elements in the upper lanes, 0 below.
template <class T>
[[gnu::always_inline]] inline vec load_tail(const T* row, std::int64_t n) {
  alignas(64) static constexpr std::int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const ivec covered(static_cast<std::int32_t>(kLanes - n % kLanes));
  const ivec x = cast_to_int(load_any(row + n - kLanes));
  return cast_to_float(xsimd::select(covered > ivec::load_aligned(kLane), ivec(0), x));
}

// s[key][row] = q[row] . k[key] for kR rows and so many keys that their scores fill vectors; a few keys at a time,
// enough sums to cover the latency of an FMA.
template <class T, int kR>
struct DotsTile {
  static constexpr int kAtOnce = (kLanes == 16 && kR > 1 ? 16 : 8) / kR;
  static constexpr int kKeys = (kLanes < 8 ? 8 : kLanes) / kR;
  const float* q;  // [ceil(d / kLanes)][kR][kLanes]; the last d % kLanes elements in the upper lanes, as load_tail()
  std::int64_t d;

  [[gnu::always_inline]] void run(const T* const (&k)[kKeys], float* s, Prefetcher& prefetcher) const {
    vec total[kKeys * kR];
#pragma GCC unroll 2
    for (int first = 0; first < kKeys; first += kAtOnce) {
      vec acc[kAtOnce][kR];
#pragma GCC unroll 8
      for (int x = 0; x < kAtOnce; ++x)
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) acc[x][r] = vec(0.f);
      const auto step = [&](auto load_key, const float* qv) __attribute__((always_inline)) {
        vec key[kAtOnce];
#pragma GCC unroll 8
        for (int x = 0; x < kAtOnce; ++x) key[x] = load_key(k[first + x]);
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) {
          vec row = load(qv + r * kLanes);
          keep_in_register(row);  // rather than load it again for every key
#pragma GCC unroll 8
          for (int x = 0; x < kAtOnce; ++x) acc[x][r] = fma(row, key[x], acc[x][r]);
        }
      };
      const std::int64_t whole = d / kLanes * kLanes;
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        step([i](const T* x) { return load_any(x + i); }, q + i * kR);
        prefetcher.prefetch(lines_of<T>(kAtOnce));
      }
      if (whole < d) step([this](const T* x) { return load_tail(x, d); }, q + whole * kR);
#pragma GCC unroll 8
      for (int x = 0; x < kAtOnce; ++x)
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) total[(first + x) * kR + r] = acc[x][r];
    }
#pragma GCC unroll 2
    for (int u = 0; u < kKeys * kR; u += kLanes) {
      vec part[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) part[i] = total[u + i];
      alignas(64) float result[kLanes];
      store(result, sums(part));
#pragma GCC unroll 16
      for (int x = 0; x < kLanes / kR; ++x)
        __builtin_memcpy(s + (u / kR + x) * kLanes, result + x * kR, kR * sizeof(float));
    }
  }
};

// o[row][0 .. kC vectors) += sum over keys of p[key][row] v[key][...] for kR rows; v[key] is a row of T.
template <class T, int kR, int kC>
[[gnu::always_inline]] inline void add_values(const float* p, const std::byte* const* v, std::int64_t column,
                                              std::int64_t begin, std::int64_t end, float* o, std::int64_t o_stride,
                                              Prefetcher& prefetcher) {
  vec acc[kR][kC];
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kC; ++c) acc[r][c] = vec(0.f);
  for (std::int64_t j = begin; j < end; ++j) {
    vec x[kC];
#pragma GCC unroll 8
    for (int c = 0; c < kC; ++c) x[c] = load_any(reinterpret_cast<const T*>(v[j]) + column + c * kLanes);
    prefetcher.prefetch(lines_of<T>(kC));
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r) {
      const vec weight(p[j * kLanes + r]);
#pragma GCC unroll 8
      for (int c = 0; c < kC; ++c) acc[r][c] = fma(weight, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kC; ++c) {
      float* const at = o + r * o_stride + c * kLanes;
      store(at, load(at) + acc[r][c]);
    }
}

}  // namespace rapt::cpu::RAPT_ISA
