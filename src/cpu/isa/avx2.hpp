// AVX2 + FMA (x86-64-v3): 16 registers of 8 floats.
#pragma once

#include <immintrin.h>

namespace rapt::cpu::RAPT_ISA {

using arch = xsimd::fma3<xsimd::avx2>;  // plain xsimd::avx2 does not fuse
using vec = xsimd::batch<float, arch>;
using ivec = xsimd::batch<std::int32_t, arch>;

inline constexpr int kRegisters = 16;
inline constexpr int kVecs = 3;
constexpr int rows_of_tile(int vecs) {
  return vecs == 1 ? 8 : 4;
}  // 4 x 3 accumulators + 3 of x + 1 broadcast = 16: nothing to spare

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
inline constexpr int kFmaFlops = 2 * 8;
[[gnu::always_inline]] inline void fma_in_place(__m256& acc, __m256 a, __m256 b) {
  asm volatile("vfmadd213ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
}

}  // namespace rapt::cpu::RAPT_ISA

#include "cpu/isa/x86.hpp"
