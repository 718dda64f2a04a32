// AVX-512 F, BW, DQ, VL (x86-64-v4): 32 registers of 16 floats.
#pragma once

#include <immintrin.h>

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
[[gnu::always_inline]] inline ivec load_halves(const std::uint16_t* p) {
  return ivec(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
[[gnu::always_inline]] inline void store_halves(std::uint16_t* p, ivec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.data));
}
[[gnu::always_inline]] inline vec load_any(const f16* p) {
  return vec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
template <class Halves>
[[gnu::always_inline]] inline vec widen(Halves x) {
  return vec(_mm512_cvtph_ps(reinterpret_cast<__m256i>(x)));
}
[[gnu::always_inline]] inline void store_any(f16* p, vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.data, _MM_FROUND_TO_NEAREST_INT));
}

inline constexpr int kFmaFlops = 2 * 16;
[[gnu::always_inline]] inline void fma_in_place(__m512& acc, __m512 a, __m512 b) {
  asm volatile("vfmadd213ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
}

}  // namespace rapt::cpu::RAPT_ISA

#include "cpu/isa/x86.hpp"

namespace rapt::cpu::RAPT_ISA {

// vreduceps and vscalefps do the bit work of exp2.
[[gnu::always_inline]] inline vec exp2(vec x) {
  asm("" : "+v"(x.data));  // keep x in a register: vreduceps from memory made the loop 4 times slower on Zen 4
  const vec r(_mm512_reduce_ps(x.data, 0x08));  // 0x08: to nearest, exceptions suppressed
  const vec p = fma(r, exp2_slope(r), vec(1.f));
  return vec(_mm512_scalef_ps(p.data, (x - r).data));
}

[[gnu::always_inline]] inline vec exp2_minus_1(vec x) {
  const vec r(_mm512_reduce_ps(x.data, 0x08));
  const vec power(_mm512_scalef_ps(_mm512_set1_ps(1.f), (x - r).data));
  return fma(r * exp2_slope(r), power, power - vec(1.f));
}

}  // namespace rapt::cpu::RAPT_ISA
