// 8-bit floats as bf16, exactly, on AVX-512 with VBMI: one table lookup for each byte of the result.
#pragma once

#include <immintrin.h>

#include "cpu/isa/convert16.hpp"
#include "cpu/isa/leaf.hpp"

namespace rapt::cpu::RAPT_ISA {

// The two bytes of the bf16 of each 8-bit float, without signs.
struct Bf16Tables {
  alignas(64) std::uint8_t low[128], high[128];
};
constexpr Bf16Tables bf16_tables(int mantissa_bits, int bias, bool has_infinity) {
  Bf16Tables tables{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> mantissa_bits, steps = 1 << mantissa_bits, mantissa = code & (steps - 1);
    int bits = 0;
    if (has_infinity ? code >= 128 - steps : code == 127) {
      bits = has_infinity && mantissa == 0 ? 0x7f80 : 0x7fc0;
    } else if (exponent > 0) {
      bits = (exponent + 127 - bias) << 7 | mantissa << (7 - mantissa_bits);
    } else if (mantissa > 0) {  // denormals, which are normal numbers of bf16
      int top = mantissa_bits - 1;
      while (!(mantissa >> top)) --top;
      bits = (1 - bias - mantissa_bits + top + 127) << 7 | ((mantissa << (7 - top)) & 0x7f);
    }
    tables.low[code] = static_cast<std::uint8_t>(bits & 0xff), tables.high[code] = static_cast<std::uint8_t>(bits >> 8);
  }
  return tables;
}
inline constexpr Bf16Tables kBf16OfE4m3 = bf16_tables(3, 7, false), kBf16OfE5m2 = bf16_tables(2, 15, true);

[[gnu::always_inline]] inline __m512i widen_to_bf16(const std::uint8_t* p, const Bf16Tables& tables) {
  alignas(64) static constexpr std::uint8_t kTwice[64] = {
      0,  0,  1,  1,  2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,  8,  8,  9,  9,  10, 10,
      11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 16, 16, 17, 17, 18, 18, 19, 19, 20, 20, 21, 21,
      22, 22, 23, 23, 24, 24, 25, 25, 26, 26, 27, 27, 28, 28, 29, 29, 30, 30, 31, 31};
  const __m512i codes = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i twice = _mm512_permutexvar_epi8(_mm512_load_si512(kTwice), codes);  // a lookup ignores its sign
  const auto look_up = [&](const std::uint8_t* table) __attribute__((always_inline)) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), twice, _mm512_load_si512(table + 64));
  };
  const __m512i both = _mm512_mask_mov_epi8(look_up(tables.low), 0xaaaaaaaaaaaaaaaau, look_up(tables.high));
  return _mm512_ternarylogic_epi32(twice, both, _mm512_set1_epi16(INT16_MIN), 0xe4);  // bit 15 of the first
}

// 2 * kLanes elements.
[[gnu::always_inline]] inline u16vec load_u16vec(const e4m3* p) {
  return u16vec(widen_to_bf16(&p->bits, kBf16OfE4m3));
}
[[gnu::always_inline]] inline u16vec load_u16vec(const e5m2* p) {
  return u16vec(widen_to_bf16(&p->bits, kBf16OfE5m2));
}

}  // namespace rapt::cpu::RAPT_ISA
