// From a DType to the C++ type of its elements.
#pragma once

#include "cpu/registry.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

// Calls f(T()) for f32, bf16 or f16: the types of out, of q (other than f8e4m3), and of caches that are not quantised.
// f is not copied: a load of what was just stored in other sizes waits for all earlier stores.
template <class F>
auto with_float_type(DType dtype, const F& f) {
  if (dtype == DType::bf16) return f(bf16());
  if (dtype == DType::f16) return f(f16());
  return f(float());
}
// Likewise, for every type that k and v can have.
template <class F>
auto with_cache_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::i8:
      return f(std::int8_t());
    case DType::f8e4m3:
      return f(e4m3());
    case DType::f8e5m2:
      return f(e5m2());
    case DType::i4x2:
      return f(i4x2());
    default:
      return with_float_type(dtype, f);
  }
}

// Element `at` of an array of f32, bf16 or f16, as fp32.
inline float number_at(const void* base, DType dtype, std::int64_t at) {
  return with_float_type(dtype, [&](auto e) {
    alignas(64) float lane[kLanes];
    store(lane, load_strided(static_cast<const decltype(e)*>(base) + at, 1, 1));
    return lane[0];
  });
}

// The number of elements in one T. Strides and addresses count in units of T, and an i4x2 has two elements.
template <class T>
inline constexpr std::int64_t kPerUnit = std::is_same_v<T, i4x2> ? 2 : 1;

// Bytes of one unit, as above, and of n elements.
inline std::int64_t unit_bytes(DType dtype) {
  return dtype == DType::f32 ? 4 : set_of(dtype) & kFloatTypes ? 2 : 1;
}
inline std::int64_t bytes_of(DType dtype, std::int64_t n) {
  return dtype == DType::i4x2 ? n / 2 : n * unit_bytes(dtype);
}

}  // namespace rapt::cpu::RAPT_ISA
