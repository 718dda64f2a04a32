// What the x86 leaves share: MXCSR keeps denormals away.
#pragma once

#include <emmintrin.h>

#include "cpu/isa/types.hpp"

namespace rapt::cpu::RAPT_ISA {

template <class Arch>
[[gnu::always_inline]] inline void keep_in_register(xsimd::batch<float, Arch>& x) {
  asm("" : "+v"(x.data));
}

struct FlushDenormals : FloatEnvironment {
  FlushDenormals() : FloatEnvironment(kDefault | _MM_FLUSH_ZERO_ON) {}
};

// At -127 the biased exponent of 2^x is 0, and so is the result. Between -127 and -126 the result is denormal, and
// FlushDenormals makes it 0.
template <class Arch>
[[gnu::always_inline]] inline xsimd::batch<float, Arch> exp2_argument(xsimd::batch<float, Arch> x) {
  return xsimd::max(xsimd::batch<float, Arch>(-127.f), x);  // in this order NaN stays
}
template <class Arch>
[[gnu::always_inline]] inline xsimd::batch<float, Arch> exp2_result(xsimd::batch<float, Arch>,
                                                                    xsimd::batch<float, Arch> y) {
  return y;
}

}  // namespace rapt::cpu::RAPT_ISA
