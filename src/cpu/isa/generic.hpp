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

// Flushes denormal results to 0 while it lives; denormal inputs keep their value.
class FlushDenormals {
 public:
  FlushDenormals() { _mm_setcsr(saved_ | _MM_FLUSH_ZERO_ON); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_ = _mm_getcsr();
};

[[gnu::always_inline]] inline vec fma(vec x, vec y, vec z) {
  return x * y + z;
}
[[gnu::always_inline]] inline ivec cast_to_int(vec x) {
  return ivec(_mm_castps_si128(x.data));
}
[[gnu::always_inline]] inline vec cast_to_float(ivec x) {
  return vec(_mm_castsi128_ps(x.data));
}
// 2^-127 has a biased exponent of 0 and is 0; between it and the normal numbers FlushDenormals does it.
[[gnu::always_inline]] inline vec exp2_argument(vec x) {
  return xsimd::max(vec(-127.f), x);
}  // in this order NaN stays
[[gnu::always_inline]] inline vec exp2_result(vec, vec y) {
  return y;
}

inline constexpr int kFmaFlops = 2 * 4;
[[gnu::always_inline]] inline void fma_in_place(__m128& acc, __m128 a, __m128 b) {
  asm volatile("mulps %1, %0\n\taddps %2, %0" : "+x"(acc) : "x"(a), "x"(b));
}

}  // namespace rapt::cpu::RAPT_ISA

#include "cpu/isa/exp2.hpp"
