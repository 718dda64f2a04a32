// Elements of any floating-point type in device memory as fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "operations/attention/params.hpp"

namespace rapt::cuda {

__host__ __device__ inline float load(const void* base, DType type, std::int64_t at) {
  switch (type) {
    case DType::f16:
      return __half2float(static_cast<const __half*>(base)[at]);
    case DType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[at]);
    default:
      return static_cast<const float*>(base)[at];
  }
}

// Two neighbours of a 16-bit type, the first in the lower half.
__device__ inline float2 two_of(DType type, std::uint32_t pair) {
  if (type == DType::f16) return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Whether rows are contiguous and aligned to 16 bytes, of elements of `size` bytes.
__host__ __device__ inline bool is_vector(const void* data, const Strides& s, std::int64_t size) {
  const std::int64_t count = 16 / size;
  return s.d == 1 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && s.b % count == 0 && s.h % count == 0 &&
         s.s % count == 0;
}

// A code of 8 bits.
__device__ inline float code_of_byte(std::uint8_t code, DType type) {
  if (type == DType::i8) return static_cast<float>(static_cast<std::int8_t>(code));
  const __nv_fp8_interpretation_t kind = type == DType::f8e4m3 ? __NV_E4M3 : __NV_E5M2;
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, kind)));
}
// load() for queries, which may be f8e4m3 (without their scale).
__device__ inline float load_query(const void* base, DType type, std::int64_t at) {
  if (type == DType::f8e4m3) return code_of_byte(static_cast<const std::uint8_t*>(base)[at], type);
  return load(base, type, at);
}
// The code of i4x2 in the lower half of a byte; the upper half is ignored.
__device__ inline float code_of_half(std::uint32_t bits) {
  return static_cast<float>(static_cast<int>((bits & 15) ^ 8) - 8);
}
// Code i of a row of a quantized cache that begins at offset `at`; a byte of i4x2 holds two.
__device__ inline float load_code(const void* base, DType type, std::int64_t at, std::int64_t stride, std::int64_t i) {
  const auto* const codes = static_cast<const std::uint8_t*>(base);
  if (type == DType::i4x2) return code_of_half(codes[at + i / 2 * stride] >> (i % 2 * 4));
  return code_of_byte(codes[at + i * stride], type);
}
// Four neighbouring codes, the first in the lowest bits.
__device__ inline float4 four_codes(std::uint32_t bits, DType type) {
  if (type == DType::i4x2)
    return make_float4(code_of_half(bits), code_of_half(bits >> 4), code_of_half(bits >> 8), code_of_half(bits >> 12));
  const auto byte = [&](int i) { return code_of_byte(static_cast<std::uint8_t>(bits >> 8 * i), type); };
  return make_float4(byte(0), byte(1), byte(2), byte(3));
}

// How semantics/score.hpp reads a bias or a slope.
struct NumberAt {
  __host__ __device__ float operator()(const void* base, DType type, std::int64_t at) const {
    return load(base, type, at);
  }
};

// Stores x, rounded to nearest even.
__device__ inline void store(void* base, DType type, std::int64_t at, float x) {
  switch (type) {
    case DType::f16:
      static_cast<__half*>(base)[at] = __float2half_rn(x);
      break;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(base)[at] = __float2bfloat16_rn(x);
      break;
    default:
      static_cast<float*>(base)[at] = x;
  }
}

// Stores four neighbours of a 16-bit type to an address that is aligned to 8 bytes.
__device__ inline void store_four(void* to, DType type, float4 x) {
  const auto pair = [type](float a, float b) {
    std::uint32_t two;
    if (type == DType::f16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
    return two;
  };
  *static_cast<uint2*>(to) = make_uint2(pair(x.x, x.y), pair(x.z, x.w));
}
// Stores the first n of four numbers, a stride apart.
__device__ inline void store_columns(void* base, DType type, std::int64_t at, std::int64_t stride, float4 x,
                                     std::int64_t n) {
  const std::int64_t size = type == DType::f32 ? 4 : 2;
  const std::uintptr_t to = reinterpret_cast<std::uintptr_t>(base) + at * size;
  if (n >= 4 && stride == 1 && to % (4 * size) == 0) {
    if (type == DType::f32) *reinterpret_cast<float4*>(to) = x;
    else store_four(reinterpret_cast<void*>(to), type, x);
    return;
  }
  const float four[] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < n) store(base, type, at + i * stride, four[i]);
}

// Loads the first n of four elements from `at` on, a stride apart; the others are 0 and are not read.
__device__ inline float4 load4(const void* base, DType type, std::int64_t at, std::int64_t stride, std::int64_t n) {
  if (type == DType::f32 && stride == 1 && n >= 4) {
    const float* x = static_cast<const float*>(base) + at;
    if (reinterpret_cast<std::uintptr_t>(x) % sizeof(float4) == 0) return *reinterpret_cast<const float4*>(x);
  }
  float4 x = make_float4(0, 0, 0, 0);
  if (n > 0) x.x = load_query(base, type, at);
  if (n > 1) x.y = load_query(base, type, at + stride);
  if (n > 2) x.z = load_query(base, type, at + 2 * stride);
  if (n > 3) x.w = load_query(base, type, at + 3 * stride);
  return x;
}

}  // namespace rapt::cuda
