// 2^x = 2^n (1 + r * exp2_slope(r)), n = round(x), r = x - n in [-1/2, 1/2].
//
//   exp2           2^x for x <= 127; at most 1 ulp off for results that are normal numbers, 0 below, NaN stays NaN
//   exp2_minus_1   2^x - 1 for 0 <= x <= 64, to a few ulp of itself
#pragma once

#include "cpu/isa/leaf.hpp"

namespace rapt::cpu::RAPT_ISA {

// (2^r - 1) / r. Degree 6 minimax for 2^r with coefficients that are floats; degree 5 has an error of 7.5e-8, too much
// for 1 ulp.
[[gnu::always_inline]] inline vec exp2_slope(vec r) {
  vec q = fma(r, vec(0x1.417a9ep-13f), vec(0x1.5f0948p-10f));
  q = fma(r, q, vec(0x1.3b2dd2p-7f));
  q = fma(r, q, vec(0x1.c6af7ap-5f));
  q = fma(r, q, vec(0x1.ebfbdcp-3f));
  return fma(r, q, vec(0x1.62e430p-1f));
}

#if defined(RAPT_HAVE_SCALEF)

[[gnu::always_inline]] inline vec exp2(vec x) {
  keep_in_register(x);  // round_off from memory made the loop 4 times slower on Zen 4
  const vec r = round_off(x);
  const vec p = fma(r, exp2_slope(r), vec(1.f));
  return scalef(p, x - r);
}

[[gnu::always_inline]] inline vec exp2_minus_1(vec x) {
  const vec r = round_off(x);
  const vec power = scalef(vec(1.f), x - r);
  return fma(r * exp2_slope(r), power, power - vec(1.f));
}

#else

struct Exp2Split {
  vec power;  // 2^n, garbage outside [-126, 127]
  vec r;
};

// 2^n is a factor and not an addend to the exponent bits, so that a NaN stays one whatever its payload.
[[gnu::always_inline]] inline Exp2Split split_exp2(vec x) {
  const vec magic(12582912.f + 127.f);  // 1.5 * 2^23 + exponent bias: the sum's low bits are n + 127
  const vec t = x + magic;
  return {cast_to_float(shift_left<23>(cast_to_int(t))), x - (t - magic)};
}

[[gnu::always_inline]] inline vec exp2(vec x) {
  x = exp2_argument(x);
  const Exp2Split e = split_exp2(x);
  return exp2_result(x, one_plus_product(e.r, exp2_slope(e.r)) * e.power);
}

[[gnu::always_inline]] inline vec exp2_minus_1(vec x) {
  const Exp2Split e = split_exp2(x);
  return fma(e.r * exp2_slope(e.r), e.power, e.power - vec(1.f));
}

#endif

}  // namespace rapt::cpu::RAPT_ISA
