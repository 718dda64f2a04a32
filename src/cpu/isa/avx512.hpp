// AVX-512 F, BW, DQ, VL (x86-64-v4): 32 registers of 16 floats.
#pragma once

#define RAPT_HAVE_SCALEF

#include <immintrin.h>

#include "cpu/isa/types.hpp"
#include "cpu/isa/x86.hpp"

namespace rapt::cpu::RAPT_ISA {

using arch = xsimd::avx512bw;
using vec = xsimd::batch<float, arch>;
using ivec = xsimd::batch<std::int32_t, arch>;

inline constexpr int kRegisters = 32;
inline constexpr int kVecs = 3;
constexpr int rows_of_tile(int vecs) {
  return vecs == 1 ? 16 : 8;
}  // 8 x 3 accumulators + 3 of x + 1 broadcast = 28

// xsimd 8.1's fma for AVX-512 is x * y + z, which -ffp-contract=off keeps apart.
[[gnu::always_inline]] inline vec fma(vec x, vec y, vec z) {
  return vec(_mm512_fmadd_ps(x.data, y.data, z.data));
}

[[gnu::always_inline]] inline ivec cast_to_int(vec x) {
  return ivec(_mm512_castps_si512(x.data));
}
[[gnu::always_inline]] inline vec cast_to_float(ivec x) {
  return vec(_mm512_castsi512_ps(x.data));
}
[[gnu::always_inline]] inline ivec load_u16(const std::uint16_t* p) {
  return ivec(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
[[gnu::always_inline]] inline void store_u16(std::uint16_t* p, ivec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.data));
}
[[gnu::always_inline]] inline vec load_any(const f16* p) {
  return vec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
template <class Bits>
[[gnu::always_inline]] inline vec widen_f16(Bits x) {
  return vec(_mm512_cvtph_ps(reinterpret_cast<__m256i>(x)));
}
[[gnu::always_inline]] inline void store_any(f16* p, vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.data, _MM_FROUND_TO_NEAREST_INT));
}

[[gnu::always_inline]] inline vec to_float(GccVector<std::int8_t, 16> x) {
  return vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x)));
}
[[gnu::always_inline]] inline GccVector<std::int16_t, 16> to_int16(GccVector<std::int8_t, 16> x) {
  return (GccVector<std::int16_t, 16>)_mm256_cvtepi8_epi16((__m128i)x);
}
// A lookup in a table of 16 numbers uses only the lowest four bits of each index.
[[gnu::always_inline]] inline vec widen_nibbles(const std::uint8_t* p) {
  std::int32_t low, high;
  __builtin_memcpy(&low, p, 4), __builtin_memcpy(&high, p + 4, 4);
  const __m512i nibbles = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xff00, high);
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512 number = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return vec(_mm512_permutexvar_ps(_mm512_srlv_epi32(nibbles, first), number));
}

// x less the nearest integer, and p * 2^n.
[[gnu::always_inline]] inline vec round_off(vec x) {
  return vec(_mm512_reduce_ps(x.data, 0x08));  // 0x08: to nearest, exceptions suppressed
}
[[gnu::always_inline]] inline vec scalef(vec p, vec n) {
  return vec(_mm512_scalef_ps(p.data, n.data));
}

// 16 bytes from each address. (Masked loads leave the port free that shuffles need.)
#define RAPT_HAVE_LOAD_PARTS
[[gnu::always_inline]] inline vec load_parts(const void* a, const void* b, const void* c, const void* d) {
  const auto part = [](const void* p) { return _mm_loadu_ps(static_cast<const float*>(p)); };
  __m512 x = _mm512_castps128_ps512(part(a));
  x = _mm512_mask_broadcast_f32x4(x, 0x00f0, part(b));
  x = _mm512_mask_broadcast_f32x4(x, 0x0f00, part(c));
  return vec(_mm512_mask_broadcast_f32x4(x, 0xf000, part(d)));
}

// Copies n bytes, 0 < n < 64, and zeros up to 64. Reads no other byte.
#define RAPT_HAVE_MASKED_LOADS
[[gnu::always_inline]] inline void load_first_bytes(const void* from, std::int64_t n, void* to) {
  _mm512_store_si512(to, _mm512_maskz_loadu_epi8(_bzhi_u64(~0ULL, static_cast<unsigned>(n)), from));
}

// 1 / x to 2^-14, exact for powers of 2.
#define RAPT_HAVE_RCP14
[[gnu::always_inline]] inline vec rcp14(vec x) {
  return vec(_mm512_rcp14_ps(x.data));
}

// 64-bit products of the lower halves of 64-bit lanes.
[[gnu::always_inline]] inline GccVector<std::uint64_t, 8> multiply_low(GccVector<std::uint64_t, 8> x,
                                                                       GccVector<std::uint64_t, 8> y) {
  return (GccVector<std::uint64_t, 8>)_mm512_mul_epu32((__m512i)x, (__m512i)y);
}

#define RAPT_HAVE_COMPRESS
[[gnu::always_inline]] inline std::int64_t compress(GccVector<std::int32_t, 16> x, GccVector<std::int32_t, 16> selected,
                                                    std::int32_t* to) {
  const __mmask16 mask = _mm512_movepi32_mask((__m512i)selected);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, (__m512i)x));
  return __builtin_popcount(mask);
}

inline constexpr int kFmaFlops = 2 * 16;
[[gnu::always_inline]] inline void fma_in_place(__m512& acc, __m512 a, __m512 b) {
  asm volatile("vfmadd213ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
}
// AVX512-VNNI, which not every CPU with AVX-512 has.
#define RAPT_HAVE_INT8_DOTS
[[gnu::always_inline]] inline void int8_dots_in_place(__m512i& acc, __m512i a, __m512i b) {
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
}

}  // namespace rapt::cpu::RAPT_ISA
