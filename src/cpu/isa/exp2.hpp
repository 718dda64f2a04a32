// exp2 for ISAs without scalef: 2^x = 2^n (1 + r q(r)), n = round(x), r = x - n in [-1/2, 1/2].
// A leaf provides cast_to_int, cast_to_float, and what keeps results below the normal numbers 0 (a denormal would make
// every FMA that reads it take an assist): exp2_argument(x) before and exp2_result(x, y) after.
#pragma once

namespace rapt::cpu::RAPT_ISA {

struct Exp2 {
  vec power;     // 2^n, garbage outside [-126, 127]
  vec fraction;  // 2^r - 1
};

// Several values at once, step by step: one dependent chain each, which the out-of-order window alone does not overlap.
// Degree 6 minimax (relative error 2.6e-9; degree 5 has 7.5e-8, too much for 1 ulp). 2^n is a factor and not an addend
// to the exponent bits, so that a NaN stays one whatever its payload.
template <int kN>
[[gnu::always_inline]] inline void split_exp2(const vec (&x)[kN], Exp2 (&e)[kN]) {
  const vec magic(12582912.f + 127.f);  // 1.5 * 2^23 + exponent bias: the sum's low bits are n + 127
  constexpr float kSlope[] = {0x1.5f7276p-10f, 0x1.3b270ep-7f, 0x1.c6ae72p-5f, 0x1.ebfbe2p-3f, 0x1.62e432p-1f};
  vec t[kN], r[kN], q[kN];
#pragma GCC unroll 4
  for (int i = 0; i < kN; ++i) t[i] = x[i] + magic;
#pragma GCC unroll 4
  for (int i = 0; i < kN; ++i) r[i] = t[i] - magic;
#pragma GCC unroll 4
  for (int i = 0; i < kN; ++i) r[i] = x[i] - r[i];
#pragma GCC unroll 4
  for (int i = 0; i < kN; ++i) q[i] = vec(0x1.470b4ap-13f);
#pragma GCC unroll 8
  for (float c : kSlope)
#pragma GCC unroll 4
    for (int i = 0; i < kN; ++i) q[i] = fma(r[i], q[i], vec(c));
#pragma GCC unroll 4
  for (int i = 0; i < kN; ++i) e[i] = {cast_to_float(cast_to_int(t[i]) << 23), r[i] * q[i]};
}

template <int kN>
[[gnu::always_inline]] inline void exp2(vec (&x)[kN]) {
  Exp2 e[kN];
#pragma GCC unroll 4
  for (int i = 0; i < kN; ++i) x[i] = exp2_argument(x[i]);
  split_exp2(x, e);
#pragma GCC unroll 4
  for (int i = 0; i < kN; ++i) x[i] = exp2_result(x[i], fma(e[i].fraction, e[i].power, e[i].power));
}

[[gnu::always_inline]] inline vec exp2_minus_1(vec x) {
  const vec xs[1] = {x};
  Exp2 e[1];
  split_exp2(xs, e);
  return fma(e[0].fraction, e[0].power, e[0].power - vec(1.f));
}

}  // namespace rapt::cpu::RAPT_ISA
