// PTX of 8-bit attention: wgmma of f8e4m3, with a depth of 32, and arithmetic on pairs of fp16.
#pragma once

#include "cuda/hopper/ptx.cuh"

namespace rapt::cuda {

__device__ inline std::uint32_t fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// max2, min2: of a number and NaN, the number. max_or_nan: NaN.
__device__ inline std::uint32_t max2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ inline std::uint32_t min2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("min.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ inline std::uint32_t max_or_nan(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
// The two f8e4m3 codes in the lower half as fp16, and back.
__device__ inline std::uint32_t f16_of_codes(std::uint32_t codes) {
  std::uint32_t two;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(static_cast<unsigned short>(codes)));
  return two;
}
__device__ inline std::uint32_t codes_of_f16(std::uint32_t two) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(two));
  return codes;
}

#define RAPT_TEN(tens)                                                                                      \
  "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4,%" #tens "5,%" #tens "6,%" #tens "7,%" #tens \
  "8,%" #tens "9,"
#define RAPT_FOUR(constraint, i) \
  constraint(d[i]), constraint(d[(i) + 1]), constraint(d[(i) + 2]), constraint(d[(i) + 3])
#define RAPT_SIXTEEN(constraint, i)                                                         \
  RAPT_FOUR(constraint, i), RAPT_FOUR(constraint, (i) + 4), RAPT_FOUR(constraint, (i) + 8), \
      RAPT_FOUR(constraint, (i) + 12)
#define RAPT_WGMMA(shape, sums, names, operands, flag) \
  "{\n.reg .pred add;\nsetp.ne.b32 add, %" #flag       \
  ", 0;\n"                                             \
  "wgmma.mma_async.sync.aligned." shape "." sums       \
  ".e4m3.e4m3"                                         \
  " {" names "}, " operands ", add, 1, 1;\n}"

// d (+)= a b^T with A and B in shared memory, and two fp16 sums to a register. Rows of both have kRowBytes columns.
template <int kRowBytes>
__device__ __forceinline__ void wgmma_f8_abt(std::uint32_t (&d)[32], std::uint32_t a, std::uint32_t b, int add) {
  asm volatile(RAPT_WGMMA("m64n128k32", "f16", RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) "%30,%31", "%32, %33", 34)
               : RAPT_SIXTEEN("+r", 0), RAPT_SIXTEEN("+r", 16)
               : "l"(descriptor<kRowBytes>(a)), "l"(descriptor<kRowBytes>(b)), "r"(add));
}
// d (+)= a b^T with A in registers and B in shared memory, in 72 or 136 rows of 128 bytes of the summed dimension.
__device__ __forceinline__ void wgmma_f8_abt(float (&d)[36], const std::uint32_t* a, std::uint32_t b, int add) {
  asm volatile(RAPT_WGMMA("m64n72k32", "f32", RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) "%30,%31,%32,%33,%34,%35",
                          "{%36, %37, %38, %39}, %40", 41)
               : RAPT_SIXTEEN("+f", 0), RAPT_SIXTEEN("+f", 16), RAPT_FOUR("+f", 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor<128>(b)), "r"(add));
}
__device__ __forceinline__ void wgmma_f8_abt(float (&d)[68], const std::uint32_t* a, std::uint32_t b, int add) {
  asm volatile(RAPT_WGMMA("m64n136k32", "f32",
                          RAPT_TEN() RAPT_TEN(1) RAPT_TEN(2) RAPT_TEN(3) RAPT_TEN(4)
                              RAPT_TEN(5) "%60,%61,%62,%63,%64,%65,%66,%67",
                          "{%68, %69, %70, %71}, %72", 73)
               : RAPT_SIXTEEN("+f", 0), RAPT_SIXTEEN("+f", 16), RAPT_SIXTEEN("+f", 32), RAPT_SIXTEEN("+f", 48),
                 RAPT_FOUR("+f", 64)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor<128>(b)), "r"(add));
}

#undef RAPT_TEN
#undef RAPT_FOUR
#undef RAPT_SIXTEEN
#undef RAPT_WGMMA

}  // namespace rapt::cuda
