// Loads, stores, transposes: the few vector primitives xsimd 8.1 lacks, for any lane count.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/isa/isa.hpp"

namespace rapt::cpu::RAPT_ISA {

// load() and store() are for scratch, which is aligned fp32. Tensors are neither: functions with `any` or `strided` in
// their names take float, bf16 or f16, unaligned. Loads also take the types of convert8.hpp, where one i4x2 fills two
// lanes.
[[gnu::always_inline]] inline vec load(const float* p) {
  return vec::load_aligned(p);
}
[[gnu::always_inline]] inline void store(float* p, vec x) {
  x.store_aligned(p);
}
[[gnu::always_inline]] inline vec load_any(const float* p) {
  return vec::load_unaligned(p);
}
[[gnu::always_inline]] inline void store_any(float* p, vec x) {
  x.store_unaligned(p);
}

// Sets n floats of scratch to x, rounded up to whole vectors.
inline void fill(float* to, std::int64_t n, float x) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(to + i, vec(x));
}

// Loads elements [0, n) of a strided row, 0 < n <= kLanes; other lanes are 0. Reads nothing past element n - 1.
template <class T>
[[gnu::always_inline]] inline vec load_strided(const T* p, std::int64_t stride, std::int64_t n) {
  if (stride == 1 && n == kLanes) return load_any(p);
  alignas(64) T part[kLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) part[i] = p[i * stride];
  return load_any(part);
}
// load_strided() of contiguous rows that often end before a vector does. Not part of it: loops over whole vectors lose
// up to 8 % beside a masked load, even one that never runs.
template <class T>
[[gnu::always_inline]] inline vec load_first(const T* p, std::int64_t n) {
#if defined(RAPT_HAVE_MASKED_LOADS)
  if (n < kLanes) {
    alignas(64) T part[64 / sizeof(T)];  // written by one store, which the load of another type does not wait for
    load_first_bytes(p, n * static_cast<std::int64_t>(sizeof(T)), part);
    return load_any(part);
  }
#endif
  return load_strided(p, 1, n);
}
// One number in all lanes. By a whole vector in memory, since a load of what was stored in pieces waits for them.
template <class T>
[[gnu::always_inline]] inline vec load_same(const T* p) {
  const T number = *p;
  alignas(64) T part[kLanes];
  for (T& x : part) x = number;
  return load_any(part);
}
// load_strided() of rows that may repeat one number, as the gradient of a sum does: a branch more for others.
template <class T>
[[gnu::always_inline]] inline vec load_repeated(const T* p, std::int64_t stride, std::int64_t n) {
  return stride == 0 && n == kLanes ? load_same(p) : load_strided(p, stride, n);
}
template <class T>
[[gnu::always_inline]] inline void store_strided(T* p, std::int64_t stride, std::int64_t n, vec x) {
  if (stride == 1 && n == kLanes) return store_any(p, x);
  alignas(64) T part[kLanes];
  store_any(part, x);
  for (std::int64_t i = 0; i < n; ++i) p[i * stride] = part[i];
}

template <int kHalf, bool kHigh, class R, int... kLane>
[[gnu::always_inline]] inline R mix(R a, R b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(
      a, b,
      (kHigh ? (kLane & kHalf ? kLanes + kLane : kLane + kHalf) : (kLane & kHalf ? kLanes + kLane - kHalf : kLane))...);
}

// kLanes x kLanes transpose in log2(kLanes) steps.
template <int kHalf = kLanes / 2>
[[gnu::always_inline]] inline void transpose(vec (&rows)[kLanes]) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kHalf) continue;
    const auto a = rows[i].data, b = rows[i + kHalf].data;
    rows[i] = vec(mix<kHalf, false>(a, b, Lanes()));
    rows[i + kHalf] = vec(mix<kHalf, true>(a, b, Lanes()));
  }
  if constexpr (kHalf > 1) transpose<kHalf / 2>(rows);
}

// A vector as 128-bit parts. Transposing within parts takes fewer shuffles than transposing whole vectors, if loads
// put each part where it belongs.
inline constexpr int kParts = kLanes / 4;
template <class Bits, bool kUpper, int... kElement>
[[gnu::always_inline]] inline vec interleave_elements(vec a, vec b, std::integer_sequence<int, kElement...>) {
  using Elements = GccVector<Bits, sizeof...(kElement)>;
  constexpr int kCount = sizeof...(kElement), kPart = 16 / sizeof(Bits);
  return vec((vec::register_type)__builtin_shufflevector(
      (Elements)a.data, (Elements)b.data,
      (kElement / kPart * kPart + kUpper * kPart / 2 + kElement % kPart / 2 + (kElement & 1 ? kCount : 0))...));
}
// Interleaves the elements of a and b in the lower (kUpper: the upper) half of each part.
template <class Bits, bool kUpper>
[[gnu::always_inline]] inline vec interleave(vec a, vec b) {
  using Elements = std::make_integer_sequence<int, kLanes * 4 / sizeof(Bits)>;
  return interleave_elements<Bits, kUpper>(a, b, Elements());
}
// A vector whose part i is the 16 bytes at at(i).
template <class At>
[[gnu::always_inline]] inline vec load_parts(At at) {
#if defined(RAPT_HAVE_LOAD_PARTS)
  return load_parts(at(0), at(1), at(2), at(3));
#else
  alignas(64) float parts[kLanes];
  for (int i = 0; i < kParts; ++i) __builtin_memcpy(parts + 4 * i, at(i), 16);
  return load(parts);
#endif
}

// Lane i of the result is the sum of the lanes of x[i]. The order of summation is the same for all lanes.
template <int kHalf = kLanes / 2>
[[gnu::always_inline]] inline vec sums(vec (&x)[kLanes]) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
#pragma GCC unroll 16
  for (int i = 0; i < kHalf; ++i) {
    const auto a = x[i].data, b = x[i + kHalf].data;
    x[i] = vec(mix<kHalf, false>(a, b, Lanes())) + vec(mix<kHalf, true>(a, b, Lanes()));
  }
  if constexpr (kHalf > 1) return sums<kHalf / 2>(x);
  else return x[0];
}

template <int kStep, int... kLane>
[[gnu::always_inline]] inline vec rotated(vec x, std::integer_sequence<int, kLane...>) {
  return vec(__builtin_shufflevector(x.data, x.data, ((kLane + kStep) % kLanes)...));
}

// Combines each lane with all lanes a multiple of `period` away, so that lanes i and i % period are equal: sums bit
// for bit, maxima unless a lane is NaN. `period` is a power of two; with kLanes, x is returned as it is.
template <int kStep = kLanes / 2, class Combine>
[[gnu::always_inline]] inline vec over_period(vec x, std::int64_t period, Combine combine) {
  if (period > kStep) return x;
  x = combine(x, rotated<kStep>(x, std::make_integer_sequence<int, kLanes>()));
  if constexpr (kStep > 1) return over_period<kStep / 2>(x, period, combine);
  else return x;
}

}  // namespace rapt::cpu::RAPT_ISA
