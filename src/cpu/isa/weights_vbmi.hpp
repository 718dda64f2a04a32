// Softmax weights as bf16, for products of bf16, on AVX-512 with VBMI and BF16. weights.hpp documents these functions.
#pragma once

#include <immintrin.h>

#include "cpu/isa/convert16.hpp"
#include "cpu/isa/exp2.hpp"
#include "cpu/isa/fixed_exp2.hpp"
#include "cpu/isa/leaf.hpp"

namespace rapt::cpu::RAPT_ISA {

[[gnu::always_inline]] inline void store_bf16(bf16* p, vec first, vec second) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.data, first.data)));
}
[[gnu::always_inline]] inline vec round_to_bf16_pairs(vec even, vec odd) {
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto x = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.data, even.data));  // denormals become 0
  return vec(_mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), x)));
}
[[gnu::always_inline]] inline vec truncate_to_bf16_pairs(vec even, vec odd) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.data), 16);
  return vec(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd.data), high, 0xf8)));
}
[[gnu::always_inline]] inline vec truncate_to_bf16(vec x) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return vec(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.data), high)));
}

// 2^x to 18 bits (minimax on the fraction, error 2.6e-6). vscalefps takes the floor of x itself. Results below the
// normal numbers are 0 with FlushDenormals, as is 2^-inf.
[[gnu::always_inline]] inline vec exp2_18_bits(vec x) {
  const vec f(_mm512_reduce_ps(x.data, 0x09));  // 0x09: x - floor(x), exceptions suppressed
  vec y = fma(f, vec(0x1.bb7cd4p-7f), vec(0x1.aa13f0p-5f));
  y = fma(fma(y, f, vec(0x1.ee798ap-3f)), f, vec(0x1.62d166p-1f));
  return vec(_mm512_scalef_ps(fma(y, f, vec(0x1.00002cp+0f)).data, x.data));
}

// Byte permutations and the corrections of fractions, for FixedExp2.
struct FixedExp2Tables {
  alignas(64) std::uint8_t pairs[64], fraction[64], correction[64];
};
constexpr FixedExp2Tables fixed_exp2_tables() {
  FixedExp2Tables t{};
  for (int j = 0; j < 64; ++j) {
    const int lane = j & 15;
    t.pairs[j] = static_cast<std::uint8_t>((lane >> 2) * 2 + (lane & 1) + (lane & 2 ? 8 : 0));
    t.fraction[j] = static_cast<std::uint8_t>(((j & 7) >> 1) * 16 + 3);
    t.correction[j] = kFixedExp2Correction[j];
  }
  return t;
}
inline constexpr FixedExp2Tables kFixedExp2 = fixed_exp2_tables();

// The method of fixed_exp2.hpp, two vectors at a time: half the operations that fp32 would take, and few on the port
// that the matrix unit shares.
class FixedExp2 {
 public:
  static constexpr float kScale = kFixedExp2Scale, kOffset = kFixedExp2Offset;

  template <bool kClamps>
  [[gnu::always_inline]] vec weights(vec even, vec odd, vec& sum) const {
    const auto integer = [](vec x) {
      const __m512i zero = _mm512_set1_epi32(0x4b400000);  // 1.5 * 2^23; the bits of larger floats are larger integers
      __m512i bits = _mm512_castps_si512(x.data);
      if constexpr (kClamps) bits = _mm512_max_epi32(bits, zero);  // else some negative numbers wrap around
      return _mm512_sub_epi32(bits, zero);
    };
    __m512i t = _mm512_shuffle_epi8(_mm512_packus_epi32(integer(even), integer(odd)), pairs_);
    const __m512i f = _mm512_multishift_epi64_epi8(fraction_, t);
    t = _mm512_sub_epi16(t, _mm512_maskz_permutexvar_epi8(0x5555555555555555ull, f, correction_));
    t = _mm512_srli_epi16(t, 2);
    sum = vec(_mm512_dpbf16_ps(sum.data, reinterpret_cast<__m512bh>(t),
                               reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80))));
    return vec(_mm512_castsi512_ps(t));
  }

 private:
  __m512i pairs_ = _mm512_load_si512(kFixedExp2.pairs), fraction_ = _mm512_load_si512(kFixedExp2.fraction),
          correction_ = _mm512_load_si512(kFixedExp2.correction);
};

}  // namespace rapt::cpu::RAPT_ISA
