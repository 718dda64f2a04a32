// AMX: eight tiles of 16 rows x 64 bytes beside the vectors of AVX-512. With -DRAPT_AMX_MODEL=<isa> a software model of
// the tiles beside the vectors of that ISA, so that the kernels' logic can be tested on any machine.
#pragma once

#define RAPT_HAVE_TILES

#if defined(RAPT_AMX_MODEL)
#include RAPT_LEAF_(RAPT_AMX_MODEL)
#include "cpu/isa/amx_model.hpp"
#else
#include "cpu/isa/avx512.hpp"

namespace rapt::cpu::RAPT_ISA {

// The tile registers of the thread, configured while it lives; contents are undefined until loaded or zeroed. The
// compiler's own intrinsics carry no memory clobber and would move across the vector code that writes what they read.
class Tiles {
 public:
  Tiles() {
    alignas(64) std::uint8_t config[64] = {1};  // palette 1; bytes per row from 16 on, rows from 48 on
    for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // 16 rows of 64 bytes, `stride` bytes apart.
  template <int kTile>
  [[gnu::always_inline]] void load(const void* p, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  // Likewise, of what is read once and should leave L1 to the rest.
  template <int kTile>
  [[gnu::always_inline]] void load_once(const void* p, std::int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  [[gnu::always_inline]] void store(void* p, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  [[gnu::always_inline]] void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  // c[m][n] += sum over k < 16 of a[m][2k] b[k][2n] + a[m][2k + 1] b[k][2n + 1]: a and b bf16, c fp32.
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

// Words of the upper halves of two vectors: even's below, odd's above.
[[gnu::always_inline]] inline vec pair_words(vec even, vec odd) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.data), 16);
  return vec(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd.data), high, 0xf8)));
}
[[gnu::always_inline]] inline vec upper_half(vec x) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return vec(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.data), high)));
}

// 2^x to the bits that so many bf16 planes hold: minimax on the fraction, errors 7.5e-5 and 2.6e-6. vscalefps takes the
// floor of x itself. 0 for what is below the normal numbers with FlushDenormals, and for -inf.
template <int kPlanes>
[[gnu::always_inline]] inline vec exp2_weight(vec x) {
  if constexpr (kPlanes > 2) return exp2(x);
  const vec f(_mm512_reduce_ps(x.data, 0x09));  // 0x09: x - floor(x), exceptions suppressed
  vec y;
  if constexpr (kPlanes == 1) {
    y = fma(f, vec(0x1.3f96a4p-4f), vec(0x1.cefc4cp-3f));
    y = fma(fma(y, f, vec(0x1.64444cp-1f)), f, vec(0x1.fff632p-1f));
  } else {
    y = fma(f, vec(0x1.bb7cd4p-7f), vec(0x1.aa13f0p-5f));
    y = fma(fma(y, f, vec(0x1.ee798ap-3f)), f, vec(0x1.62d166p-1f));
    y = fma(y, f, vec(0x1.00002cp+0f));
  }
  return vec(_mm512_scalef_ps(y.data, x.data));
}

}  // namespace rapt::cpu::RAPT_ISA
#endif
