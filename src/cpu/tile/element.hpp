// From the element type a call names to the C++ type of its elements.
#pragma once

#include "cpu/registry.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

// f(T()) for the T that elements of q, out and caches that are not quantised are.
template <class F>
auto with_element(DType element, F f) {
  if (element == DType::bf16) return f(bf16());
  if (element == DType::f16) return f(f16());
  return f(float());
}
// For the T of any k and v.
template <class F>
auto with_cache_element(DType element, F f) {
  switch (element) {
    case DType::i8:
      return f(std::int8_t());
    case DType::f8e4m3:
      return f(e4m3());
    case DType::f8e5m2:
      return f(e5m2());
    case DType::i4x2:
      return f(i4x2());
    default:
      return with_element(element, f);
  }
}

// One number of a type that with_element() takes.
inline float number_at(const void* base, DType element, std::int64_t at) {
  return with_element(element, [&](auto e) {
    alignas(64) float lane[kLanes];
    store(lane, load_strided(static_cast<const decltype(e)*>(base) + at, 1, 1));
    return lane[0];
  });
}

// Elements in one T.
template <class T>
inline constexpr std::int64_t kPerUnit = std::is_same_v<T, i4x2> ? 2 : 1;

// Bytes of one T, and of n elements.
inline std::int64_t unit_bytes(DType element) {
  return element == DType::f32 ? 4 : only(element) & kFloatTypes ? 2 : 1;
}
inline std::int64_t bytes_of(DType element, std::int64_t n) {
  return element == DType::i4x2 ? n / 2 : n * unit_bytes(element);
}

}  // namespace rapt::cpu::RAPT_ISA
