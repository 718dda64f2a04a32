// Quantized codes in registers: widening to 16-bit elements, which hold every code exactly, and products of 16-bit
// elements by a warp (ldmatrix, mma.sync). Of 16 bytes of a row that a warp loads as matrices of 8 x 8 halfwords, each
// lane gets 4 bytes.
#pragma once

#include "core/pod.hpp"
#include "cuda/hopper/ptx.cuh"

namespace rapt::cuda {

// Loads four matrices; lane i gives the address of row i % 8 of matrix i / 8. Lane i gets elements 2 (i % 4) and 2 (i %
// 4) + 1 of row i / 4; load_columns(): column i / 4 of these two rows.
__device__ __forceinline__ void load_matrices(std::uint32_t row, std::uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_columns(std::uint32_t row, std::uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
// The transpose of one matrix.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t x) {
  std::uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d += a b, with 16 x 8 sums and a depth of 16. Lane i has rows i / 4 and i / 4 + 8 of d and a, columns 2 (i % 4) and 2
// (i % 4) + 1 of d, column i / 4 of b, and of either operand the depths 2 (i % 4), 2 (i % 4) + 1 and those 8 further
// on.
template <class T = __nv_bfloat16>
__device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
#define RAPT_MULTIPLY(type)                                  \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "  \
      "{%0, %1, %2, %3};"                                    \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __half>) RAPT_MULTIPLY("f16");
  else RAPT_MULTIPLY("bf16");
#undef RAPT_MULTIPLY
}

__device__ __forceinline__ std::uint32_t subtract_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
// Two pairs of fp16 as bf16: the pair of the low halves, and of the high halves.
__device__ __forceinline__ void regroup(std::uint32_t a, std::uint32_t b, std::uint32_t& low, std::uint32_t& high) {
  const float2 x = __half22float2(reinterpret_cast<const __half2&>(a));
  const float2 y = __half22float2(reinterpret_cast<const __half2&>(b));
  low = pack<__nv_bfloat16>(x.x, y.x), high = pack<__nv_bfloat16>(x.y, y.y);
}

// A lane's 4 bytes of codes. Codes that lie 16 bits apart share a register after widening: along a row their order
// changes, and Q's columns are stored in the same order; loaded by columns, the two codes belong to two rows.
template <DType kType>
struct Codes {
  static constexpr bool kIs16Bit = kType == DType::bf16 || kType == DType::f16;  // elements, not codes
  static constexpr int kBits = kIs16Bit ? 16 : kType == DType::i4x2 ? 4 : 8;
  static constexpr int kChunk = 128 / kBits;  // codes in 16 bytes
  static constexpr int kPairs = 16 / kBits;   // registers that 4 bytes widen to
  static constexpr int kSteps = kPairs / 2;   // depths of 16 in 16 bytes

  // A pair of 128, or of 136. It comes with the launch's parameters: an instruction has room for one constant, the
  // mask, and if the compiler knew this number, too, it would split one instruction into two.
  static constexpr std::uint32_t kOffset = kType == DType::i8 ? 0x43004300 : 0x43084308;
  std::uint32_t offset;

  __device__ __forceinline__ void widen(std::uint32_t x, std::uint32_t (&pairs)[kPairs]) const {
    if constexpr (kType == DType::i8) {
      // 128 + the lower 7 bits, minus 128 or, if negative, 256.
#pragma unroll
      for (int i = 0; i < 2; ++i, x >>= 8)
        pairs[i] = subtract_bf16((x & 0x007f007f) | offset, (x & 0x00800080) | offset);
    } else if constexpr (kType == DType::i4x2) {
      // 136 + the code: flipping the sign bit adds 8.
#pragma unroll
      for (int i = 0; i < 4; ++i, x >>= 4) pairs[i] = subtract_bf16((x & 0x000f000f) ^ offset, offset);
    } else if constexpr (kType == DType::f8e5m2) {
      // f8e5m2 is the upper byte of fp16.
      const std::uint32_t even = x << 8 & 0xff00ff00, odd = x & 0xff00ff00;
      const float2 e = __half22float2(reinterpret_cast<const __half2&>(even));
      const float2 o = __half22float2(reinterpret_cast<const __half2&>(odd));
      pairs[0] = pack<__nv_bfloat16>(e.x, e.y), pairs[1] = pack<__nv_bfloat16>(o.x, o.y);
    } else {
      std::uint32_t low, high;
      asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
          "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
          : "=r"(low), "=r"(high)
          : "r"(x));
      regroup(low, high, pairs[0], pairs[1]);
    }
  }
  // The same with neighbours in a register, in the order of the row, for products that read shared memory. fp16 holds
  // codes of 8-bit floats only.
  template <class T>
  __device__ __forceinline__ void widen_in_order(std::uint32_t x, std::uint32_t (&pairs)[kPairs]) const {
    static_assert(std::is_same_v<T, __nv_bfloat16> || (set_of(kType) & kFp8Types) != 0);
    [[maybe_unused]] const std::uint32_t odd = x >> 4;  // of i4x2
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if constexpr (kType == DType::i8) {
        const std::uint32_t two = __byte_perm(x, 0, i == 0 ? 0x4140 : 0x4342);
        pairs[i] = subtract_bf16((two & 0x007f007f) | offset, (two & 0x00800080) | offset);
      } else if constexpr (kType == DType::i4x2) {
        const std::uint32_t two = __byte_perm(x, odd, 0x0101 * i + 0x0400);
        pairs[i] = subtract_bf16((two & 0x000f000f) ^ offset, offset);
      } else {
        std::uint32_t two;  // of fp16
        if constexpr (kType == DType::f8e5m2) {
          two = __byte_perm(x, 0, i == 0 ? 0x1404 : 0x3424);
        } else {
          const auto bytes = static_cast<std::uint16_t>(i == 0 ? x : x >> 16);
          asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(bytes));
        }
        if constexpr (std::is_same_v<T, __half>) {
          pairs[i] = two;
        } else {
          const float2 numbers = __half22float2(reinterpret_cast<const __half2&>(two));
          pairs[i] = pack<__nv_bfloat16>(numbers.x, numbers.y);
        }
      }
    }
  }
  // Which code of a row's 16 bytes is element k of a step's depth.
  __device__ static constexpr unsigned column_at(unsigned step, unsigned k) {
    const unsigned lane = k / 2 % 4, half = k % 2, pair = 2 * step + k / 8;
    return lane * (kChunk / 4) + pair + half * kPairs;
  }
  // Loaded by columns, rows i / 4 and i / 4 + 8 of a product are this code and the next.
  __device__ static int column_of_product(int step) {
    return static_cast<int>(threadIdx.x) % 32 / 4 * (kChunk / 8) + 2 * step;
  }
};

}  // namespace rapt::cuda
