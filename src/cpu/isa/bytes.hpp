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
[[gnu::always_inline]] inline vec to_float(kLanesOf<std::int8_t> x) {
  const auto wide = __builtin_convertvector(x, kLanesOf<std::int32_t>);
  return vec((vec::register_type) __builtin_convertvector(wide, kLanesOf<float>));
}
[[gnu::always_inline]] inline vec load_any(const std::int8_t* p) {
  return to_float(load_bytes(p));
}
// kLanes elements from vec::size / 2 bytes.
[[gnu::always_inline]] inline vec load_any(const i4x2* p) {
  using Bytes [[gnu::vector_size(vec::size / 2)]] = std::uint8_t;
  using Pairs [[gnu::vector_size(vec::size)]] = std::uint16_t;
  Bytes bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  const auto wide = __builtin_convertvector(bytes, Pairs);
  const auto apart = (wide | wide << 4) & 0x0f0f;  // a byte each, the lower half first
  kLanesOf<std::int8_t> x;
  __builtin_memcpy(&x, &apart, sizeof(x));
  return to_float((x ^ 8) - 8);
}
[[gnu::always_inline]] inline vec load_any(const e5m2* p) {
  return widen(__builtin_convertvector(load_bytes(p), kLanesOf<std::int16_t>) << 8);
}
[[gnu::always_inline]] inline vec load_any(const e4m3* p) {
  const auto x = __builtin_convertvector(load_bytes(p), kLanesOf<std::int16_t>);  // the sign fills the upper half
  const auto nan = ((x & 0x7f) == 0x7f) & 0x7e00;
  return widen(((x << 7) & 0x3f80) | (x & -0x8000) | nan) * vec(256.f);
}

}  // namespace rapt::cpu::RAPT_ISA
