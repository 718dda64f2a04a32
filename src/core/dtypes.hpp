// Which types queries and outputs may have, and which caches.
#pragma once

#include <array>

#include "rapt/types.hpp"

namespace rapt {

// Those of q and out, those that only caches have, and the others.
inline constexpr std::array kDTypes = {DType::f32,    DType::bf16, DType::f16,     DType::i8,  DType::f8e4m3,
                                       DType::f8e5m2, DType::i4x2, DType::boolean, DType::i32, DType::i64};

constexpr bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}
// Queries of attention.
constexpr bool is_query(DType dtype) {
  return is_float(dtype) || dtype == DType::f8e4m3;
}
constexpr bool is_byte_float(DType dtype) {
  return dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
}
// Codes that mean nothing without scales.
constexpr bool is_integer(DType dtype) {
  return dtype == DType::i8 || dtype == DType::i4x2;
}
constexpr bool is_cache(DType dtype) {
  return is_float(dtype) || is_byte_float(dtype) || is_integer(dtype);
}

inline constexpr const char* kFloats = "f32, bf16 or f16";
inline constexpr const char* kQueries = "f32, bf16, f16 or f8e4m3";
inline constexpr const char* kCaches = "f32, bf16, f16, i8, f8e4m3, f8e5m2 or i4x2";

}  // namespace rapt
