// Includes the leaf of the ISA this object is compiled for: -DRAPT_ISA=avx2 gives avx2.hpp.
// A leaf defines, in namespace rapt::cpu::<isa>:
//  - vec: a batch of float lanes, and ivec of int32.
//  - kRegisters: vector registers there are; kVecs: vectors of lanes in a full register tile;
//    rows_of_tile(vecs): broadcast rows of a tile of so many vectors.
//  - fma: x * y + z, with one rounding where the ISA can.
//  - load_any, store_any: kLanes elements of bf16 or f16 at any address, as halves.hpp says; load_any also of int8_t,
//    e4m3, e5m2 and i4x2, as bytes.hpp says, over widen: the same of f16 in a register.
//  - FloatEnvironment: undoes what the thread set in MXCSR while it lives (nothing on NEON); FlushDenormals: also keeps
//    denormals out of results, of exp2's at the least.
//  - exp2: 2^x for x <= 127; at most 1 ulp off for results that are normal numbers, 0 below, NaN stays NaN.
//  - exp2_minus_1: 2^x - 1 for 0 <= x <= 64, to a few ulp of itself.
//  - fma_in_place: a multiply-add the compiler can neither merge nor move, to measure the peak; kFmaFlops each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <xsimd/xsimd.hpp>

namespace rapt::cpu::RAPT_ISA {
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};
struct e4m3 {
  std::uint8_t bits;
};
struct e5m2 {
  std::uint8_t bits;
};
struct i4x2 {
  std::uint8_t bits;  // of two elements
};
}  // namespace rapt::cpu::RAPT_ISA

#define RAPT_QUOTE_(x) #x
#define RAPT_LEAF_(isa) RAPT_QUOTE_(isa.hpp)
#include RAPT_LEAF_(RAPT_ISA)

namespace rapt::cpu::RAPT_ISA {
inline constexpr int kLanes = static_cast<int>(vec::size);
}  // namespace rapt::cpu::RAPT_ISA
