// From the element type a call names to the C++ type of its elements.
#pragma once

#include "cpu/params.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

// f(T()) for the T that elements of this type are.
template <class F>
auto with_element(Element element, F f) {
  if (element == Element::bf16) return f(bf16());
  if (element == Element::f16) return f(f16());
  return f(float());
}

inline std::int64_t size_of(Element element) {
  return element == Element::f32 ? 4 : 2;
}

}  // namespace rapt::cpu::RAPT_ISA
