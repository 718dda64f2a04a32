// Loads and stores of 16-bit floats as vectors of fp32. Widening is exact. Narrowing rounds to nearest even, past the
// largest number to infinity; a NaN stays one. Bits are the same on every ISA, and denormals survive FlushDenormals.
// bf16 is the upper half of an fp32, so integer arithmetic does it, over two words of the leaf: load_halves (kLanes
// 16-bit elements, zero extended) and store_halves (the lower halves of lanes between -2^15 and 2^15 - 1).
#pragma once

namespace rapt::cpu::RAPT_ISA {

[[gnu::always_inline]] inline vec load_any(const bf16* p) {
  return cast_to_float(load_halves(&p->bits) << 16);
}
[[gnu::always_inline]] inline void store_any(bf16* p, vec x) {
  const ivec bits = cast_to_int(x), upper = bits >> 16;
  const ivec rounded = (bits + ivec(0x7fff) + (upper & ivec(1))) >> 16;
  const auto is_nan = (bits & ivec(0x7fffffff)) > ivec(0x7f800000);
  store_halves(&p->bits, xsimd::select(is_nan, upper | ivec(0x40), rounded));
}

}  // namespace rapt::cpu::RAPT_ISA
