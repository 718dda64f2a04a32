// From the element type a call names to the C++ type of its elements.
#pragma once

#include "cpu/params.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

// f(T()) for the T that elements of q, out and caches that are not quantised are.
template <class F>
auto with_element(Element element, F f) {
  if (element == Element::bf16) return f(bf16());
  if (element == Element::f16) return f(f16());
  return f(float());
}
// For the T of any k and v.
template <class F>
auto with_cache_element(Element element, F f) {
  switch (element) {
    case Element::i8:
      return f(std::int8_t());
    case Element::e4m3:
      return f(e4m3());
    case Element::e5m2:
      return f(e5m2());
    case Element::i4:
      return f(i4x2());
    default:
      return with_element(element, f);
  }
}

// One number of a type that with_element() takes.
inline float number_at(const void* base, Element element, std::int64_t at) {
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
inline std::int64_t unit_bytes(Element element) {
  return element == Element::f32 ? 4 : element <= Element::f16 ? 2 : 1;
}
inline std::int64_t bytes_of(Element element, std::int64_t n) {
  return element == Element::i4 ? n / 2 : n * unit_bytes(element);
}

}  // namespace rapt::cpu::RAPT_ISA
