// 2^x = 2^n (1 + r * exp2_slope(r)), n = round(x), r = x - n in [-1/2, 1/2]: the polynomial, and the bit work for ISAs
// without scalef. Their leaves provide cast_to_int and cast_to_float; one_plus_product(r, q), 1 + r q with less than
// one rounding of r q; and what keeps results below the normal numbers 0 (a denormal would make every FMA that reads it
// take an assist): exp2_argument(x) before and exp2_result(x, y) after.
#pragma once

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

#if !defined(__AVX512F__)
struct Exp2Split {
  vec power;  // 2^n, garbage outside [-126, 127]
  vec r;
};

// 2^n is a factor and not an addend to the exponent bits, so that a NaN stays one whatever its payload.
[[gnu::always_inline]] inline Exp2Split split_exp2(vec x) {
  const vec magic(12582912.f + 127.f);  // 1.5 * 2^23 + exponent bias: the sum's low bits are n + 127
  const vec t = x + magic;
  return {cast_to_float(cast_to_int(t) << 23), x - (t - magic)};
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
