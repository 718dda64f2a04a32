// What the x86 leaves share: MXCSR keeps denormals away. Included after the leaf's vector type.
#pragma once

namespace rapt::cpu::RAPT_ISA {

// Rounds to nearest without traps while it lives, whatever the thread had set: bits must not depend on the thread.
class FloatEnvironment {
 public:
  explicit FloatEnvironment(unsigned flush = 0) { _mm_setcsr(_MM_MASK_MASK | flush); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_ = _mm_getcsr();
};
// Flushes denormal results to 0 while it lives as well; denormal inputs keep their value.
struct FlushDenormals : FloatEnvironment {
  FlushDenormals() : FloatEnvironment(_MM_FLUSH_ZERO_ON) {}
};

// 2^-127 has a biased exponent of 0 and is 0; between it and the normal numbers FlushDenormals does it.
[[gnu::always_inline]] inline vec exp2_argument(vec x) {
  return xsimd::max(vec(-127.f), x);
}  // in this order NaN stays
[[gnu::always_inline]] inline vec exp2_result(vec, vec y) {
  return y;
}

}  // namespace rapt::cpu::RAPT_ISA

#include "cpu/isa/bytes.hpp"
#include "cpu/isa/exp2.hpp"
#include "cpu/isa/halves.hpp"
