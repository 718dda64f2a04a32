// Includes the leaf of the ISA this object is compiled for: -DRAPT_ISA=avx2 gives avx2.hpp.
#pragma once

#include "cpu/isa/types.hpp"
#include RAPT_LEAF_(RAPT_ISA)

namespace rapt::cpu::RAPT_ISA {
inline constexpr int kLanes = static_cast<int>(vec::size);

// Integers shifted by a constant. (xsimd's take any distance: on NEON they are a function that looks for it among all,
// and that GCC does not always inline.)
template <int kDistance>
[[gnu::always_inline]] inline ivec shift_left(ivec x) {
  using Integers = GccVector<std::int32_t, kLanes>;
  return ivec((ivec::register_type)((Integers)x.data << kDistance));
}
template <int kDistance>
[[gnu::always_inline]] inline ivec shift_right(ivec x) {
  using Integers = GccVector<std::int32_t, kLanes>;
  return ivec((ivec::register_type)((Integers)x.data >> kDistance));
}
}  // namespace rapt::cpu::RAPT_ISA
