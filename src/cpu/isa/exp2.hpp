// exp2 for ISAs without scalef: 2^x = 2^n (1 + r q(r)), n = round(x), r = x - n in [-1/2, 1/2].
// A leaf provides cast_to_int, cast_to_float, and what keeps results below the normal numbers 0 (a denormal would make
// every FMA that reads it take an assist): exp2_argument(x) before and exp2_result(x, y) after.
#pragma once

namespace rapt::cpu::RAPT_ISA {

struct Exp2 {
  vec power;     // 2^n, garbage outside [-126, 127]
  vec fraction;  // 2^r - 1
};

// Degree 6 minimax (relative error 2.6e-9; degree 5 has 7.5e-8, too much for 1 ulp). 2^n is a factor and not an addend
// to the exponent bits, so that a NaN stays one whatever its payload.
[[gnu::always_inline]] inline Exp2 split_exp2(vec x) {
  const vec magic(12582912.f + 127.f);  // 1.5 * 2^23 + exponent bias: the sum's low bits are n + 127
  const vec t = x + magic;
  const vec r = x - (t - magic);
  vec q = fma(r, vec(0x1.470b4ap-13f), vec(0x1.5f7276p-10f));
  q = fma(r, q, vec(0x1.3b270ep-7f));
  q = fma(r, q, vec(0x1.c6ae72p-5f));
  q = fma(r, q, vec(0x1.ebfbe2p-3f));
  q = fma(r, q, vec(0x1.62e432p-1f));
  return {cast_to_float(cast_to_int(t) << 23), r * q};
}

[[gnu::always_inline]] inline vec exp2(vec x) {
  x = exp2_argument(x);
  const Exp2 e = split_exp2(x);
  return exp2_result(x, fma(e.fraction, e.power, e.power));
}

[[gnu::always_inline]] inline vec exp2_minus_1(vec x) {
  const Exp2 e = split_exp2(x);
  return fma(e.fraction, e.power, e.power - vec(1.f));
}

}  // namespace rapt::cpu::RAPT_ISA
