// Loads and stores of 16-bit floats as vectors of fp32. Widening is exact. Narrowing rounds to nearest even, past the
// largest number to infinity; a NaN stays one. Bits are the same on every ISA, and denormals survive FlushDenormals.
// bf16 is the upper half of an fp32, so integer arithmetic does it, over two words of the leaf: load_halves (kLanes
// 16-bit elements, zero extended) and store_halves (the lower halves of lanes between -2^15 and 2^15 - 1).
#pragma once

namespace rapt::cpu::RAPT_ISA {

[[gnu::always_inline]] inline vec load_any(const bf16* p) {
  return cast_to_float(load_halves(&p->bits) << 16);
}
// The bf16 in the lower half of each lane, its sign in the upper.
[[gnu::always_inline]] inline ivec narrowed(vec x) {
  const ivec bits = cast_to_int(x), upper = bits >> 16;
  const ivec rounded = (bits + ivec(0x7fff) + (upper & ivec(1))) >> 16;
  const auto is_nan = (bits & ivec(0x7fffffff)) > ivec(0x7f800000);
  return xsimd::select(is_nan, upper | ivec(0x40), rounded);
}
[[gnu::always_inline]] inline void store_any(bf16* p, vec x) {
  store_halves(&p->bits, narrowed(x));
}
// Words of even as bf16 below odd as bf16. Denormals may become 0.
[[gnu::always_inline]] inline vec narrowed_pair(vec even, vec odd) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto x = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.data, even.data));  // denormals become 0
  return vec(_mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), x)));
#else
  return cast_to_float((narrowed(even) & ivec(0xffff)) | (narrowed(odd) << 16));
#endif
}

}  // namespace rapt::cpu::RAPT_ISA
