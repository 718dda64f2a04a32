// Single elements of tensors in host memory, as numbers. For checks; kernels read theirs by the vector.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/pod.hpp"

namespace rapt {

// A float of 16 bits or less, whose exponent and fraction are where an f32 has them, but for the exponent's bias.
inline float from_magnitude(std::uint32_t magnitude, float power, bool negative) {
  const float x = std::bit_cast<float>(magnitude) * power;
  return negative ? -x : x;
}
inline float from_f16(std::uint16_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffu;
  const bool negative = (bits & 0x8000u) != 0;
  if (magnitude >= 0x7c00u) return from_magnitude(0x7f800000u | magnitude << 13, 1, negative);
  return from_magnitude(magnitude << 13, 0x1p112f, negative);
}
inline float from_f8e4m3(std::uint8_t bits) {
  const std::uint32_t magnitude = bits & 0x7fu;
  const bool negative = (bits & 0x80u) != 0;
  if (magnitude == 0x7fu) return from_magnitude(0x7fc00000u, 1, negative);  // no infinity
  return from_magnitude(magnitude << 20, 0x1p120f, negative);
}

// Element i of those of `data`, `stride` apart; of i4x2, strides count bytes and i the two numbers of each.
inline float element_of(const void* data, DType dtype, std::int64_t stride, std::int64_t i) {
  const auto at = [&]<class T>(T) { return static_cast<const T*>(data)[i * stride]; };
  switch (dtype) {
    case DType::f32:
      return at(float());
    case DType::bf16:
      return std::bit_cast<float>(std::uint32_t{at(std::uint16_t())} << 16);
    case DType::f16:
      return from_f16(at(std::uint16_t()));
    case DType::f8e4m3:
      return from_f8e4m3(at(std::uint8_t()));
    case DType::f8e5m2:
      return from_f16(static_cast<std::uint16_t>(at(std::uint8_t()) << 8));
    case DType::boolean:
      return at(std::uint8_t());
    case DType::i8:
      return at(std::int8_t());
    case DType::i32:
      return static_cast<float>(at(std::int32_t()));
    case DType::i64:
      return static_cast<float>(at(std::int64_t()));
    case DType::i4x2: {
      const int half = static_cast<const std::uint8_t*>(data)[i / 2 * stride] >> (i % 2 * 4) & 15;
      return static_cast<float>(half < 8 ? half : half - 16);
    }
  }
  return 0;
}

// Calls f(type) for a loop over element_of(). `type` is a constant for most types, so that the loop does not test it at
// each element; else a value.
template <class F>
auto with_constant(DType dtype, F f) {
  switch (dtype) {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind)             \
  case DType::name:                                                 \
    if constexpr (DTypeKind::kind != DTypeKind::other && bits >= 8) \
      return f(std::integral_constant<DType, DType::name>());       \
    break;
#include "rapt/dtypes.def"
  }
  return f(dtype);
}

}  // namespace rapt
