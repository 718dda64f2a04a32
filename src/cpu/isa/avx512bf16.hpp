// AVX512-BF16: products of pairs of bf16, with the vectors of AVX-512 with VBMI and VBMI2. Its kernel is the matrix
// unit's for bf16, over chunks in registers instead of tiles (tile/bf16_mma_dots.hpp).
#pragma once

#define RAPT_HAVE_DOTS
#define RAPT_HAVE_VBMI
#define RAPT_VECTORS avx512

#include "cpu/isa/avx512.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr int kDotRows = 1;

// The pair of a row that lies at `at`, in every lane.
[[gnu::always_inline]] inline void load_dots(vec (&a)[kDotRows], const char* const (&row)[kDotRows], std::int64_t at) {
  std::int32_t pair;
  __builtin_memcpy(&pair, row[0] + at, sizeof pair);
  a[0] = vec(_mm512_castsi512_ps(_mm512_set1_epi32(pair)));
}

// c[n] += a[2n] b[2n] + a[2n + 1] b[2n + 1]: a and b bf16, c fp32; denormals are 0.
// (Compilers shuffle the sums from register to register if they may order these.)
[[gnu::always_inline]] inline void add_dots(vec& c, vec a, vec b) {
  asm volatile("vdpbf16ps %2, %1, %0" : "+v"(c.data) : "v"(a.data), "v"(b.data));
}

}  // namespace rapt::cpu::RAPT_ISA
