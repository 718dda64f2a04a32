// Loads of 8-bit elements as vectors of fp32, exact. The 8-bit floats are f16 without some of its bits: e5m2 has the
// same exponent, that of e4m3 counts from 8 more, and the NaN of e4m3 is a number as f16. One word of the leaf:
// widen(words).
#pragma once

namespace rapt::cpu::RAPT_ISA {

template <class T>
using kLanesOf [[gnu::vector_size(sizeof(T) * vec::size)]] = T;

[[gnu::always_inline]] inline kLanesOf<std::int8_t> load_bytes(const void* p) {
  kLanesOf<std::int8_t> x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
// Widened with their signs. (GCC 12 widens vectors of fewer than 16 bytes in pieces.)
#if defined(__AVX512BW__)
[[gnu::always_inline]] inline vec to_float(kLanesOf<std::int8_t> x) {
  return vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x)));
}
[[gnu::always_inline]] inline kLanesOf<std::int16_t> to_halves(kLanesOf<std::int8_t> x) {
  return (kLanesOf<std::int16_t>)_mm256_cvtepi8_epi16((__m128i)x);
}
#elif defined(__AVX2__)
[[gnu::always_inline]] inline vec to_float(kLanesOf<std::int8_t> x) {
  return vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x))));
}
[[gnu::always_inline]] inline kLanesOf<std::int16_t> to_halves(kLanesOf<std::int8_t> x) {
  return (kLanesOf<std::int16_t>)_mm_cvtepi8_epi16(_mm_cvtsi64_si128((long long)x));
}
#else
[[gnu::always_inline]] inline vec to_float(kLanesOf<std::int8_t> x) {
  const auto wide = __builtin_convertvector(x, kLanesOf<std::int32_t>);
  return vec((vec::register_type) __builtin_convertvector(wide, kLanesOf<float>));
}
[[gnu::always_inline]] inline kLanesOf<std::int16_t> to_halves(kLanesOf<std::int8_t> x) {
  return __builtin_convertvector(x, kLanesOf<std::int16_t>);
}
#endif

[[gnu::always_inline]] inline vec load_any(const std::int8_t* p) {
  return to_float(load_bytes(p));
}
// kLanes elements from vec::size / 2 bytes: each becomes two, its lower half first.
[[gnu::always_inline]] inline vec load_any(const i4x2* p) {
#if defined(__AVX2__)
  long long packed = 0;
  __builtin_memcpy(&packed, p, vec::size / 2);
  const __m128i wide = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(packed));
  const __m128i apart = _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(0x0f));
#else
  using Bytes [[gnu::vector_size(vec::size / 2)]] = std::uint8_t;
  using Pairs [[gnu::vector_size(vec::size)]] = std::uint16_t;
  Bytes bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  const auto wide = __builtin_convertvector(bytes, Pairs);
  const auto apart = (wide | wide << 4) & 0x0f0f;
#endif
  kLanesOf<std::int8_t> x;
  __builtin_memcpy(&x, &apart, sizeof(x));
  return to_float((x ^ 8) - 8);
}
[[gnu::always_inline]] inline vec load_any(const e5m2* p) {
  return widen(to_halves(load_bytes(p)) << 8);
}
[[gnu::always_inline]] inline vec load_any(const e4m3* p) {
  const auto x = to_halves(load_bytes(p));  // the sign fills the upper half
  const auto nan = ((x & 0x7f) == 0x7f) & 0x7e00;
  return widen(((x << 7) & 0x3f80) | (x & -0x8000) | nan) * vec(256.f);
}

}  // namespace rapt::cpu::RAPT_ISA
