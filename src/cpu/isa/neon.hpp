// NEON (aarch64): 32 registers of 4 floats.
#pragma once

#include <arm_neon.h>

#include "cpu/isa/types.hpp"

namespace rapt::cpu::RAPT_ISA {

using arch = xsimd::neon64;
using vec = xsimd::batch<float, arch>;
using ivec = xsimd::batch<std::int32_t, arch>;

inline constexpr int kRegisters = 32;
inline constexpr int kVecs = 3;
constexpr int rows_of_tile(int vecs) {
  return vecs == 1 ? 16 : 8;
}  // 8 x 3 accumulators + 3 of x + 1 broadcast = 28

[[gnu::always_inline]] inline void keep_in_register(vec& x) {
  asm("" : "+w"(x.data));
}
[[gnu::always_inline]] inline vec fma(vec x, vec y, vec z) {
  return vec(vfmaq_f32(z.data, x.data, y.data));
}
[[gnu::always_inline]] inline vec one_plus_product(vec r, vec q) {
  return fma(r, q, vec(1.f));
}
[[gnu::always_inline]] inline ivec cast_to_int(vec x) {
  return ivec(vreinterpretq_s32_f32(x.data));
}
[[gnu::always_inline]] inline vec cast_to_float(ivec x) {
  return vec(vreinterpretq_f32_s32(x.data));
}
// FPCR's flush mode would take denormal inputs for 0 as well, so results are selected instead.
struct FlushDenormals : FloatEnvironment {};
[[gnu::always_inline]] inline vec exp2_argument(vec x) {
  return x;
}
[[gnu::always_inline]] inline vec exp2_result(vec x, vec y) {
  return xsimd::select(x < vec(-126.f), vec(0.f), y);
}

[[gnu::always_inline]] inline ivec load_u16(const std::uint16_t* p) {
  return ivec(vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p))));
}
[[gnu::always_inline]] inline void store_u16(std::uint16_t* p, ivec x) {
  vst1_u16(p, vmovn_u32(vreinterpretq_u32_s32(x.data)));
}
[[gnu::always_inline]] inline vec load_any(const f16* p) {
  return vec(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))));
}
template <class Bits>
[[gnu::always_inline]] inline vec widen_f16(Bits x) {
  return vec(vcvt_f32_f16(reinterpret_cast<float16x4_t>(x)));
}
[[gnu::always_inline]] inline void store_any(f16* p, vec x) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x.data)));
}

// 64-bit products of the lower halves of 64-bit lanes.
[[gnu::always_inline]] inline GccVector<std::uint64_t, 2> multiply_low(GccVector<std::uint64_t, 2> x,
                                                                       GccVector<std::uint64_t, 2> y) {
  return (GccVector<std::uint64_t, 2>)vmull_u32(vmovn_u64((uint64x2_t)x), vmovn_u64((uint64x2_t)y));
}

inline constexpr int kFmaFlops = 2 * 4;
[[gnu::always_inline]] inline void fma_in_place(float32x4_t& acc, float32x4_t a, float32x4_t b) {
  asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(acc) : "w"(a), "w"(b));
}

}  // namespace rapt::cpu::RAPT_ISA
