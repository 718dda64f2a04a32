// AVX2 + FMA + F16C (x86-64-v3): 16 registers of 8 floats.
#pragma once

#include <immintrin.h>

#include "cpu/isa/types.hpp"
#include "cpu/isa/x86.hpp"

namespace rapt::cpu::RAPT_ISA {

using arch = xsimd::fma3<xsimd::avx2>;  // plain xsimd::avx2 does not fuse
using vec = xsimd::batch<float, arch>;
using ivec = xsimd::batch<std::int32_t, arch>;

inline constexpr int kRegisters = 16;
inline constexpr int kVecs = 3;
constexpr int rows_of_tile(int vecs) {
  return vecs == 1 ? 8 : vecs == 2 ? 6 : 4;
}  // 4 x 3 accumulators + 3 of x + 1 broadcast = 16: nothing to spare; the sums of 4 x 2 would wait for each other

[[gnu::always_inline]] inline vec fma(vec x, vec y, vec z) {
  return vec(_mm256_fmadd_ps(x.data, y.data, z.data));
}
[[gnu::always_inline]] inline vec one_plus_product(vec r, vec q) {
  return fma(r, q, vec(1.f));
}
[[gnu::always_inline]] inline ivec cast_to_int(vec x) {
  return ivec(_mm256_castps_si256(x.data));
}
[[gnu::always_inline]] inline vec cast_to_float(ivec x) {
  return vec(_mm256_castsi256_ps(x.data));
}
[[gnu::always_inline]] inline ivec load_u16(const std::uint16_t* p) {
  return ivec(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
[[gnu::always_inline]] inline void store_u16(std::uint16_t* p, ivec x) {
  const __m128i low = _mm256_castsi256_si128(x.data), high = _mm256_extracti128_si256(x.data, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(low, high));
}
[[gnu::always_inline]] inline vec load_any(const f16* p) {
  return vec(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
template <class Bits>
[[gnu::always_inline]] inline vec widen_f16(Bits x) {
  return vec(_mm256_cvtph_ps(reinterpret_cast<__m128i>(x)));
}
[[gnu::always_inline]] inline void store_any(f16* p, vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.data, _MM_FROUND_TO_NEAREST_INT));
}
[[gnu::always_inline]] inline vec to_float(GccVector<std::int8_t, 8> x) {
  return vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x))));
}
[[gnu::always_inline]] inline GccVector<std::int16_t, 8> to_int16(GccVector<std::int8_t, 8> x) {
  return (GccVector<std::int16_t, 8>)_mm_cvtepi8_epi16(_mm_cvtsi64_si128((long long)x));
}
[[gnu::always_inline]] inline vec widen_nibbles(const std::uint8_t* p) {
  std::int32_t nibbles;
  __builtin_memcpy(&nibbles, p, 4);
  const __m256i to_top = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
  return vec(_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(nibbles), to_top), 28)));
}

// 64-bit products of the lower halves of 64-bit lanes.
[[gnu::always_inline]] inline GccVector<std::uint64_t, 4> multiply_low(GccVector<std::uint64_t, 4> x,
                                                                       GccVector<std::uint64_t, 4> y) {
  return (GccVector<std::uint64_t, 4>)_mm256_mul_epu32((__m256i)x, (__m256i)y);
}

inline constexpr int kFmaFlops = 2 * 8;
[[gnu::always_inline]] inline void fma_in_place(__m256& acc, __m256 a, __m256 b) {
  asm volatile("vfmadd213ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
}
// AVX-VNNI, which not every CPU with AVX2 has.
#define RAPT_HAVE_INT8_DOTS
[[gnu::always_inline]] inline void int8_dots_in_place(__m256i& acc, __m256i a, __m256i b) {
  asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
}

}  // namespace rapt::cpu::RAPT_ISA
