// 2^x rounded to bf16, by 16-bit integer arithmetic. x + 127 in 7.9 fixed point already has the bf16's exponent and,
// except for a correction of 2^f - 1 - f, its fraction. A table indexed by f's first 6 bits has the correction.
#pragma once

#include "cpu/isa/types.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr float kFixedExp2Scale = 512;  // 9 bits of fraction
inline constexpr float kFixedExp2Offset =
    12582912.f + 127 * 512 + 2;  // 1.5 * 2^23 makes integers, + 2 rounds, as the last two bits are cut off

// About 512 (f - (2^f - 1)) + 1/2 in each of 64 ranges of f (2 of the offset less), so that weights are off by 1.8e-3
// in the mean square and by -1e-5 in the mean. (Rounding to bf16 alone: 1.7e-3.) The first is 0, for a weight of 0.
alignas(64) inline constexpr std::uint8_t kFixedExp2Correction[64] = {
    0,  4,  6,  8,  10, 12, 15, 16, 19, 20, 22, 24, 26, 28, 29, 31, 32, 33, 35, 36, 37, 38,
    39, 40, 40, 41, 42, 43, 43, 44, 44, 44, 44, 44, 45, 44, 44, 44, 44, 43, 43, 42, 41, 41,
    40, 39, 38, 37, 35, 34, 32, 31, 29, 27, 25, 23, 21, 19, 17, 14, 11, 9,  6,  3};

}  // namespace rapt::cpu::RAPT_ISA
