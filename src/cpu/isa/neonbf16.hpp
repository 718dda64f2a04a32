// NEON with BF16 (FEAT_BF16 of Armv8.2 and later): products of matrices of 2 x 4 and 4 x 2 bf16, with the vectors of
// NEON. Its kernel is the matrix unit's for bf16, over chunks in registers instead of tiles (tile/bf16_mma_dots.hpp).
#pragma once

#define RAPT_HAVE_DOTS
#define RAPT_HAVE_TBL
#define RAPT_VECTORS neon

#include "cpu/isa/neon.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr int kDotRows = 2;

// Exchanges 64-bit halves: x gets the lower halves of x and y, y the upper ones.
[[gnu::always_inline]] inline void exchange_halves(vec& x, vec& y) {
  const float64x2_t a = vreinterpretq_f64_f32(x.data), b = vreinterpretq_f64_f32(y.data);
  x = vec(vreinterpretq_f32_f64(vtrn1q_f64(a, b)));
  y = vec(vreinterpretq_f32_f64(vtrn2q_f64(a, b)));
}
// x gets lanes 0 and 1 of x, each followed by that of y; y gets lanes 2 and 3.
[[gnu::always_inline]] inline void merge_pairs(vec& x, vec& y) {
  const float32x4_t a = x.data, b = y.data;
  x = vec(vzip1q_f32(a, b));
  y = vec(vzip2q_f32(a, b));
}

// Four pairs of each of two rows: a[0] has the first two pairs of both, a[1] the others.
[[gnu::always_inline]] inline void load_dots(vec (&a)[kDotRows], const char* const (&row)[kDotRows], std::int64_t at) {
  a[0] = vec(vld1q_f32(reinterpret_cast<const float*>(row[0] + at)));
  a[1] = vec(vld1q_f32(reinterpret_cast<const float*>(row[1] + at)));
  exchange_halves(a[0], a[1]);
}

// c[2 i + j] += sum of a[4 i + n] b[4 j + n] for n < 4: a and b bf16, c fp32.
// The instruction takes n = 0 and 1, then n = 2 and 3. It rounds the sum of two exact products to odd, and then that
// sum plus c. (Rounding to odd picks, of the two neighbours of an inexact sum, the one whose last bit is 1.) A step
// errs by up to 2 u, where rounding to nearest errs by u, but there is one step for two products: sums of d products
// are off by up to (d + 2) u times the sum of their magnitudes, and the contract allows d + 6 for a score. Denormals
// are 0, in operands, products and sums. FPCR changes none of this (except its bit EBF, which FloatEnvironment clears),
// and FPSR gets no exceptions. (The asm is volatile: compilers would otherwise load more of b ahead than fits the
// registers.)
[[gnu::always_inline]] inline void add_dots(vec& c, vec a, vec b) {
  asm volatile("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(c.data) : "w"(a.data), "w"(b.data));
}

}  // namespace rapt::cpu::RAPT_ISA
