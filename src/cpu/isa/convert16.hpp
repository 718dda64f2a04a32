// Loads and stores of 16-bit floats as vectors of fp32. Widening is exact. Narrowing rounds to nearest even, past the
// largest number to infinity; a NaN stays one. Bits are the same on every ISA, and denormals survive FlushDenormals.
// bf16 is the upper half of an fp32, so integer arithmetic does it; f16 is the leaf's.
#pragma once

#include "cpu/isa/leaf.hpp"

namespace rapt::cpu::RAPT_ISA {

// A register of 2 * kLanes elements of 16 bits.
using u16vec = xsimd::batch<std::uint16_t, arch>;

[[gnu::always_inline]] inline vec load_any(const bf16* p) {
  return cast_to_float(shift_left<16>(load_u16(&p->bits)));
}
// The nearest bf16 in the lower half of each lane, its sign in the upper.
[[gnu::always_inline]] inline ivec bf16_bits(vec x) {
  const ivec bits = cast_to_int(x), upper = shift_right<16>(bits);
  const ivec rounded = shift_right<16>(bits + ivec(0x7fff) + (upper & ivec(1)));
  const auto is_nan = (bits & ivec(0x7fffffff)) > ivec(0x7f800000);
  return xsimd::select(is_nan, upper | ivec(0x40), rounded);
}
[[gnu::always_inline]] inline void store_any(bf16* p, vec x) {
  store_u16(&p->bits, bf16_bits(x));
}
// Stores the nearest bf16 of `first`, then of `second`. Denormals may become 0. (A default, as the next.)
template <class Vec>
[[gnu::always_inline]] inline void store_bf16(bf16* p, Vec first, Vec second) {
  store_any(p, first), store_any(p + vec::size, second);
}
// Each lane has the nearest bf16 of `even` in its lower half and of `odd` in its upper half. Denormals may become 0.
// (A default: weights_vbmi.hpp has a plain function of this name, which calls prefer.)
template <class Vec>
[[gnu::always_inline]] inline Vec round_to_bf16_pairs(Vec even, Vec odd) {
  return cast_to_float((bf16_bits(even) & ivec(0xffff)) | shift_left<16>(bf16_bits(odd)));
}

}  // namespace rapt::cpu::RAPT_ISA
