// What the x86 leaves share: MXCSR keeps denormals away. Included after the leaf's vector type.
#pragma once

namespace rapt::cpu::RAPT_ISA {

// Flushes denormal results to 0 while it lives; denormal inputs keep their value.
class FlushDenormals {
 public:
  FlushDenormals() { _mm_setcsr(saved_ | _MM_FLUSH_ZERO_ON); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_ = _mm_getcsr();
};

// 2^-127 has a biased exponent of 0 and is 0; between it and the normal numbers FlushDenormals does it.
[[gnu::always_inline]] inline vec exp2_argument(vec x) {
  return xsimd::max(vec(-127.f), x);
}  // in this order NaN stays
[[gnu::always_inline]] inline vec exp2_result(vec, vec y) {
  return y;
}

}  // namespace rapt::cpu::RAPT_ISA

#include "cpu/isa/exp2.hpp"
