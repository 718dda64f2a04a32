// Element types of tensors, and what every leaf needs before it defines its vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <xsimd/xsimd.hpp>

#include "core/float_environment.hpp"

// The header of an ISA, for #include.
#define RAPT_QUOTE_(x) #x
#define RAPT_LEAF_(isa) RAPT_QUOTE_(isa.hpp)

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

// A vector type of the compiler, for element types that xsimd's vectors of floats do not have.
template <class T, std::size_t kCount>
using GccVector [[gnu::vector_size(sizeof(T) * kCount)]] = T;

}  // namespace rapt::cpu::RAPT_ISA
