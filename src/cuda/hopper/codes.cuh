// Codes of quantised caches in registers as numbers of 16 bits, which have all of them exactly, and products of bf16 by
// a warp (mma.sync). Of the 16 bytes of a row that a warp reads as matrices of 8 x 8 halfwords, each lane gets 4.
#pragma once

#include "core/pod.hpp"
#include "cuda/hopper/ptx.cuh"

namespace rapt::cuda {

// Four such matrices; lane i says where row i % 8 of matrix i / 8 lies. As they are, lane i gets elements 2 (i % 4) and
// the next of row i / 4; by columns, column i / 4 of these two rows.
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

// d += a b, 16 x 8 by a depth of 16. Lane i has, of d, rows i / 4 and i / 4 + 8 and columns 2 (i % 4) and the next; of
// a, the same rows, and of either operand 2 (i % 4) and the next of the depth, and those 8 further on; of b, column
// i / 4.
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
// Two pairs of fp16 as bf16: those of the low halves, and of the high ones.
__device__ __forceinline__ void regroup(std::uint32_t a, std::uint32_t b, std::uint32_t& low, std::uint32_t& high) {
  const float2 x = __half22float2(reinterpret_cast<const __half2&>(a));
  const float2 y = __half22float2(reinterpret_cast<const __half2&>(b));
  low = pack<__nv_bfloat16>(x.x, y.x), high = pack<__nv_bfloat16>(x.y, y.y);
}

// A lane's 4 bytes, of which two are neighbours in a row at least. Codes that lie 16 bits apart share a register: of a
// row these come in another order then, which Q has, too; read by columns they are those of two rows.
template <DType kType>
struct Codes {
  static constexpr bool kIs16Bit = kType == DType::bf16 || kType == DType::f16;  // they are elements of 16 bits
  static constexpr int kBits = kIs16Bit ? 16 : kType == DType::i4x2 ? 4 : 8;
  static constexpr int kChunk = 128 / kBits;  // codes in 16 bytes
  static constexpr int kPairs = 16 / kBits;   // registers that a lane's 4 bytes become
  static constexpr int kSteps = kPairs / 2;   // depths of 16 that 16 bytes are

  // Pairs of 128, or of 136. The launch's parameters bring it: an instruction has room for one constant, the mask, and
  // the compiler would make two of what could be one, did it know this number, too.
  static constexpr std::uint32_t kOffset = kType == DType::i8 ? 0x43004300 : 0x43084308;
  std::uint32_t offset;

  __device__ __forceinline__ void widen(std::uint32_t x, std::uint32_t (&pairs)[kPairs]) const {
    if constexpr (kType == DType::i8) {
      // 128 + the lower 7 bits, less 128 or, of negative numbers, 256.
#pragma unroll
      for (int i = 0; i < 2; ++i, x >>= 8)
        pairs[i] = subtract_bf16((x & 0x007f007f) | offset, (x & 0x00800080) | offset);
    } else if constexpr (kType == DType::i4x2) {
      // 136 + the number: with its sign bit turned over it is 8 more.
#pragma unroll
      for (int i = 0; i < 4; ++i, x >>= 4) pairs[i] = subtract_bf16((x & 0x000f000f) ^ offset, offset);
    } else if constexpr (kType == DType::f8e5m2) {
      // The upper bytes of fp16.
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
  // The same, but neighbours share a register, in the order of the row: for products that take their operands from
  // memory. T has all codes; fp16 is for 8-bit floats.
  template <class T>
  __device__ __forceinline__ void widen_in_order(std::uint32_t x, std::uint32_t (&pairs)[kPairs]) const {
    static_assert(std::is_same_v<T, __nv_bfloat16> || kType == DType::f8e4m3 || kType == DType::f8e5m2);
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
  // Which code of a row's 16 bytes element k of a step's depth is.
  __device__ static constexpr unsigned column_at(unsigned step, unsigned k) {
    const unsigned lane = k / 2 % 4, half = k % 2, pair = 2 * step + k / 8;
    return lane * (kChunk / 4) + pair + half * kPairs;
  }
  // Read by columns, rows i / 4 and i / 4 + 8 of a product have this code and the next.
  __device__ static int column_of_product(int step) {
    return static_cast<int>(threadIdx.x) % 32 / 4 * (kChunk / 8) + 2 * step;
  }
};

}  // namespace rapt::cuda
