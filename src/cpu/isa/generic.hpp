// SSE2, which every x86-64 has: 16 registers of 4 floats, no FMA.
#pragma once

#include <emmintrin.h>

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

inline constexpr int kFmaFlops = 2 * 4;
[[gnu::always_inline]] inline void fma_in_place(__m128& acc, __m128 a, __m128 b) {
  asm volatile("mulps %1, %0\n\taddps %2, %0" : "+x"(acc) : "x"(a), "x"(b));
}

}  // namespace rapt::cpu::RAPT_ISA

#include "cpu/isa/x86.hpp"
