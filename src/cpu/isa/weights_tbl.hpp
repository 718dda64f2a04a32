// Softmax weights as bf16, for products of bf16, on NEON with BF16. weights.hpp documents these functions.
#pragma once

#include <arm_neon.h>

#include "cpu/isa/convert16.hpp"
#include "cpu/isa/fixed_exp2.hpp"
#include "cpu/isa/leaf.hpp"
#include "cpu/isa/weights_exp2.hpp"

namespace rapt::cpu::RAPT_ISA {

[[gnu::always_inline]] inline void store_bf16(bf16* p, vec first, vec second) {
  const bfloat16x8_t x = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first.data), second.data);
  vst1q_u16(&p->bits, vreinterpretq_u16_bf16(x));
}
[[gnu::always_inline]] inline vec round_to_bf16_pairs(vec even, vec odd) {
  uint16x8_t x = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(even.data)),
             y = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(odd.data));
  asm("" : "+w"(x), "+w"(y));  // clang 14 cannot interleave what it knows to be bf16
  return vec(vreinterpretq_f32_u16(vzip1q_u16(x, y)));
}
[[gnu::always_inline]] inline vec truncate_to_bf16_pairs(vec even, vec odd) {
  return vec(vreinterpretq_f32_u16(vtrn2q_u16(vreinterpretq_u16_f32(even.data), vreinterpretq_u16_f32(odd.data))));
}

// The method of fixed_exp2.hpp, in 11 instructions for 8 weights, not counting loads, stores and the argument.
class FixedExp2 {
 public:
  static constexpr float kScale = kFixedExp2Scale, kOffset = kFixedExp2Offset;

  template <bool kClamps>
  [[gnu::always_inline]] vec weights(vec even, vec odd, vec& sum) const {
    // The fixed-point number is in the upper half of each lane, from 0 to 0xffff, saturated (also where the magnitude
    // would exceed an int32).
    const auto fixed = [](vec x) __attribute__((always_inline)) {
      const int32x4_t above_zero = vqsubq_s32(vreinterpretq_s32_f32(x.data), vdupq_n_s32(0x4b400000));
      return vreinterpretq_u16_u32(vqshluq_n_s32(above_zero, 16));
    };
    uint16x8_t t = vtrn2q_u16(fixed(even), fixed(odd));
    const uint16x8_t f = vandq_u16(
        vshrq_n_u16(t, 3), vdupq_n_u16(63));  // upper bytes are 0 and look up the table's first entry, which is 0
    t = vsubq_u16(t, vreinterpretq_u16_u8(vqtbl4q_u8(correction_, vreinterpretq_u8_u16(f))));
    t = vshrq_n_u16(t, 2);
    const uint16x8_t one = vdupq_n_u16(0x3f80);  // 1 as bf16; as a bf16 literal, GCC 12 would make it 1 of fp16
    asm("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum.data) : "w"(t), "w"(one));
    return vec(vreinterpretq_f32_u16(t));
  }

 private:
  static uint8x16x4_t correction() { return vld1q_u8_x4(kFixedExp2Correction); }  // for clang, no initialiser
  uint8x16x4_t correction_ = correction();
};

}  // namespace rapt::cpu::RAPT_ISA
