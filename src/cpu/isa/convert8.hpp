// Loads of 8-bit and 4-bit elements as vectors of fp32, exact. The 8-bit floats are f16 without some of its bits: e5m2
// has the same exponent, that of e4m3 counts from 8 more, and the NaN of e4m3 is a number as f16.
//
// The function templates are defaults: a leaf that has something better defines a plain function of the same name,
// which calls prefer. (GCC 12 widens vectors of fewer than 16 bytes in pieces.)
#pragma once

#include "cpu/isa/leaf.hpp"

namespace rapt::cpu::RAPT_ISA {

template <class T>
using Lanes = GccVector<T, vec::size>;

// Sign-extends integers.
template <class Bytes>
[[gnu::always_inline]] inline vec to_float(Bytes x) {
  const auto wide = __builtin_convertvector(x, Lanes<std::int32_t>);
  return vec((vec::register_type) __builtin_convertvector(wide, Lanes<float>));
}
template <class Bytes>
[[gnu::always_inline]] inline Lanes<std::int16_t> to_int16(Bytes x) {
  return __builtin_convertvector(x, Lanes<std::int16_t>);
}
// Widens vec::size / 2 bytes, each as two integers: its lower half, then its upper.
template <class Byte>
[[gnu::always_inline]] inline vec widen_nibbles(const Byte* p) {
  GccVector<Byte, vec::size / 2> bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  const auto wide = __builtin_convertvector(bytes, GccVector<std::uint16_t, vec::size / 2>);
  const auto apart = (Lanes<std::int8_t>)((wide | wide << 4) & 0x0f0f);
  return to_float((apart ^ 8) - 8);
}

[[gnu::always_inline]] inline Lanes<std::int8_t> load_bytes(const void* p) {
  Lanes<std::int8_t> x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
[[gnu::always_inline]] inline vec load_any(const std::int8_t* p) {
  return to_float(load_bytes(p));
}
[[gnu::always_inline]] inline vec load_any(const i4x2* p) {
  return widen_nibbles(&p->bits);
}
[[gnu::always_inline]] inline vec load_any(const e5m2* p) {
  return widen_f16(to_int16(load_bytes(p)) << 8);
}
[[gnu::always_inline]] inline vec load_any(const e4m3* p) {
  const auto x = to_int16(load_bytes(p));  // the sign fills the upper half
  const auto nan = x << 9 == -0x200;       // all ones, which are a NaN of f16, too
  return widen_f16((x << 7 & ~0x4000) | nan) * vec(256.f);
}

}  // namespace rapt::cpu::RAPT_ISA
