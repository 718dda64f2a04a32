// Shared by weights.hpp and weights_tbl.hpp, which have no exponential faster than the vector kernels'.
#pragma once

#include "cpu/isa/exp2.hpp"

namespace rapt::cpu::RAPT_ISA {

[[gnu::always_inline]] inline vec truncate_to_bf16(vec x) {
  return cast_to_float(cast_to_int(x) & ivec(-0x10000));
}
[[gnu::always_inline]] inline vec exp2_18_bits(vec x) {
  return exp2(xsimd::min(vec(127.f), x));  // in this order NaN stays
}

}  // namespace rapt::cpu::RAPT_ISA
