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

// Flushes denormal results to 0 while it lives; denormal inputs keep their value.
class FlushDenormals {
 public:
  FlushDenormals() { _mm_setcsr(saved_ | _MM_FLUSH_ZERO_ON); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_ = _mm_getcsr();
};

// xsimd 8.1's fma for AVX-512 is x * y + z, which -ffp-contract=off keeps apart.
[[gnu::always_inline]] inline vec fma(vec x, vec y, vec z) {
  return vec(_mm512_fmadd_ps(x.data, y.data, z.data));
}

// (2^r - 1) / r for r in [0, 1): degree 6 minimax for 2^r, relative error 2.0e-9.
[[gnu::always_inline]] inline vec exp2_slope(vec r) {
  vec q = fma(r, vec(0x1.c54174p-13f), vec(0x1.46d64ep-10f));
  q = fma(r, q, vec(0x1.3d0b92p-7f));
  q = fma(r, q, vec(0x1.c68912p-5f));
  q = fma(r, q, vec(0x1.ebfd58p-3f));
  return fma(r, q, vec(0x1.62e42cp-1f));
}

// 2^x = 2^floor(x) * 2^r, r = x - floor(x) in [0, 1): vreduceps and vscalefps do the bit work.
[[gnu::always_inline]] inline vec exp2(vec x) {
  asm("" : "+v"(x.data));  // keep x in a register: vreduceps from memory made the loop 4 times slower on Zen 4
  const vec r(_mm512_reduce_ps(x.data, 0x09));  // 0x09: floor, exceptions suppressed
  const vec p = fma(r, exp2_slope(r), vec(1.f));
  return vec(_mm512_scalef_ps(p.data, x.data));
}

[[gnu::always_inline]] inline vec exp2_minus_1(vec x) {
  const vec r(_mm512_reduce_ps(x.data, 0x09));
  const vec power(_mm512_scalef_ps(_mm512_set1_ps(1.f), x.data));
  return fma(r * exp2_slope(r), power, power - vec(1.f));
}

inline constexpr int kFmaFlops = 2 * 16;
[[gnu::always_inline]] inline void fma_in_place(__m512& acc, __m512 a, __m512 b) {
  asm volatile("vfmadd213ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
}

}  // namespace rapt::cpu::RAPT_ISA
