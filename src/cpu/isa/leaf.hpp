// Includes the leaf of the ISA this object is compiled for: -DRAPT_ISA=avx2 gives avx2.hpp.
#pragma once

#include "cpu/isa/types.hpp"
#include RAPT_LEAF_(RAPT_ISA)

namespace rapt::cpu::RAPT_ISA {
inline constexpr int kLanes = static_cast<int>(vec::size);
}  // namespace rapt::cpu::RAPT_ISA
