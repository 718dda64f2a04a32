// SSE2, which every x86-64 has: 16 registers of 4 floats, no FMA.
#pragma once

#include <emmintrin.h>

#include "cpu/isa/types.hpp"
#include "cpu/isa/x86.hpp"

namespace rapt::cpu::RAPT_ISA {

using arch = xsimd::sse2;
using vec = xsimd::batch<float, arch>;
using ivec = xsimd::batch<std::int32_t, arch>;

inline constexpr int kRegisters = 16;
inline constexpr int kVecs = 2;
constexpr int rows_of_tile(int vecs) {
  return vecs == 1 ? 8 : 4;
}  // 4 x 2 accumulators + 2 of x + 1 broadcast + 2 products

[[gnu::always_inline]] inline vec fma(vec x, vec y, vec z) {
  return x * y + z;
}
[[gnu::always_inline]] inline ivec cast_to_int(vec x) {
  return ivec(_mm_castps_si128(x.data));
}
[[gnu::always_inline]] inline vec cast_to_float(ivec x) {
  return vec(_mm_castsi128_ps(x.data));
}
// Without an FMA the product's own rounding would take exp2 past 1 ulp. The upper halves of r and q multiply exactly,
// and what their sum with 1 rounds away is known.
[[gnu::always_inline]] inline vec one_plus_product(vec r, vec q) {
  const ivec upper_half(-4096);
  const vec rh = cast_to_float(cast_to_int(r) & upper_half), qh = cast_to_float(cast_to_int(q) & upper_half);
  const vec exact = rh * qh, sum = vec(1.f) + exact;
  return sum + ((exact - (sum - vec(1.f))) + (rh * (q - qh) + (r - rh) * q));
}

[[gnu::always_inline]] inline ivec load_u16(const std::uint16_t* p) {
  return ivec(_mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), _mm_setzero_si128()));
}
[[gnu::always_inline]] inline void store_u16(std::uint16_t* p, ivec x) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(x.data, x.data));
}
// fp16 by hand. Below its normal numbers a sum or difference of normal fp32 numbers does the shifting and rounding:
// no denormal is computed with, which FlushDenormals might take for 0.
[[gnu::always_inline]] inline vec load_any(const f16* p) {
  const ivec bits = load_u16(&p->bits), magnitude = (bits & ivec(0x7fff)) << 13;
  const ivec first_normal(0x400 << 13), infinity(0x7c00 << 13), rebias(112 << 23), quiet(0x400000);
  const vec two_to_minus_14(0x1p-14f);
  const ivec small = cast_to_int(cast_to_float(magnitude + rebias + first_normal) - two_to_minus_14);
  const ivec large = xsimd::select(magnitude > infinity, quiet, ivec(0)) | (magnitude + rebias + rebias);
  ivec wide = xsimd::select(first_normal > magnitude, small, magnitude + rebias);
  wide = xsimd::select(infinity > magnitude, wide, large);
  return cast_to_float(wide | ((bits & ivec(0x8000)) << 16));
}
template <class Bits>
[[gnu::always_inline]] inline vec widen_f16(Bits x) {
  f16 halves[4];
  __builtin_memcpy(halves, &x, sizeof(halves));
  return load_any(halves);
}
[[gnu::always_inline]] inline void store_any(f16* p, vec x) {
  const ivec bits = cast_to_int(x), magnitude = bits & ivec(0x7fffffff), sign = (bits >> 16) & ivec(-0x8000);
  const ivec first_normal(113 << 23), two_to_16(143 << 23), infinity(0x7f800000);
  const vec half(0.5f);  // its last bit is worth the smallest denormal
  const ivec small = cast_to_int(cast_to_float(magnitude) + half) - cast_to_int(half);
  const ivec odd = (magnitude >> 13) & ivec(1);
  ivec narrow = (magnitude - ivec(112 << 23) + ivec(0xfff) + odd) >> 13;
  narrow = xsimd::select(first_normal > magnitude, small, narrow);
  const ivec nan = ivec(0x7e00) | ((magnitude >> 13) & ivec(0x3ff));
  narrow = xsimd::select(two_to_16 > magnitude, narrow, xsimd::select(magnitude > infinity, nan, ivec(0x7c00)));
  store_u16(&p->bits, narrow | sign);
}

// 64-bit products of the lower halves of 64-bit lanes.
[[gnu::always_inline]] inline GccVector<std::uint64_t, 2> multiply_low(GccVector<std::uint64_t, 2> x,
                                                                       GccVector<std::uint64_t, 2> y) {
  return (GccVector<std::uint64_t, 2>)_mm_mul_epu32((__m128i)x, (__m128i)y);
}

inline constexpr int kFmaFlops = 2 * 4;
[[gnu::always_inline]] inline void fma_in_place(__m128& acc, __m128 a, __m128 b) {
  asm volatile("mulps %1, %0\n\taddps %2, %0" : "+x"(acc) : "x"(a), "x"(b));
}

}  // namespace rapt::cpu::RAPT_ISA
