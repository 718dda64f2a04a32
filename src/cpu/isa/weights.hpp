// Softmax weights as bf16, for the matrix unit, in the vectors of any ISA. (For tests, with the model of the tiles;
// speed does not matter.)
// - truncate_to_bf16: x without the 16 low bits of its fraction; truncate_to_bf16_pairs: each lane has that of `even`
// as bf16 in its lower half and that of `odd` in its upper half.
// - exp2_18_bits: 2^x for any x, to 18 bits; results above 2^100 may be any number above 2^100.
// - FixedExp2::weights: each lane has 2^x rounded to bf16 in its lower half and 2^y in its upper half, computed in 7.9
// fixed point from kScale x + kOffset and the same of y; their sums are added to `sum`. Results below 2^-126 are 0; 2
// and more, and NaN without the sign bit, become almost 2. Without kClamps, arguments from -49500 to -24700 may, too,
// since the subtraction wraps around.
#pragma once

#include "cpu/isa/fixed_exp2.hpp"
#include "cpu/isa/leaf.hpp"
#include "cpu/isa/weights_exp2.hpp"

namespace rapt::cpu::RAPT_ISA {

[[gnu::always_inline]] inline vec truncate_to_bf16_pairs(vec even, vec odd) {
  const ivec low = shift_right<16>(cast_to_int(even)) & ivec(0xffff);
  return cast_to_float(low | cast_to_int(truncate_to_bf16(odd)));
}

class FixedExp2 {
 public:
  static constexpr float kScale = kFixedExp2Scale, kOffset = kFixedExp2Offset;

  template <bool kClamps>
  vec weights(vec even, vec odd, vec& sum) const {
    const ivec a = integer(even), b = integer(odd), p = weight(a), q = weight(b);
    sum = sum + (cast_to_float(shift_left<16>(p)) + cast_to_float(shift_left<16>(q)));
    return cast_to_float(p | shift_left<16>(q));
  }

 private:
  static ivec integer(vec x) {
    const ivec zero(0x4b400000), bits = cast_to_int(x);
    return xsimd::min(xsimd::max(bits, zero) - zero, ivec(0xffff));
  }
  static ivec weight(ivec t) {
    alignas(64) std::int32_t lane[vec::size];
    t.store_aligned(lane);
    for (std::int32_t& x : lane) x = (x - kFixedExp2Correction[x >> 3 & 63]) >> 2;
    return ivec::load_aligned(lane);
  }
};

}  // namespace rapt::cpu::RAPT_ISA
