// Which types queries and outputs may have, and which caches.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "core/pod.hpp"
#include "rapt/types.hpp"

namespace rapt {

// Those of q and out, those that only caches have, and the others.
inline constexpr std::array kDTypes = {DType::f32,    DType::bf16, DType::f16,     DType::i8,  DType::f8e4m3,
                                       DType::f8e5m2, DType::i4x2, DType::boolean, DType::i32, DType::i64};

inline constexpr DTypeSet kF32 = only(DType::f32), kI32 = only(DType::i32), kBoolean = only(DType::boolean),
                          kIntegers = only(DType::i32) | only(DType::i64),
                          kFp8Types = only(DType::f8e4m3) | only(DType::f8e5m2),
                          kQueryTypes = kFloatTypes | only(DType::f8e4m3),
                          kStateTypes = only(DType::f32) | only(DType::bf16);

constexpr bool has(DTypeSet types, DType dtype) {
  return static_cast<std::size_t>(dtype) < kDTypes.size() && (types & only(dtype)) != 0;
}
constexpr bool is_float(DType dtype) {
  return has(kFloatTypes, dtype);
}
// Of codes that mean nothing without scales, and that may have zeros.
constexpr bool needs_scales(DType dtype) {
  return dtype == DType::i8 || dtype == DType::i4x2;
}

// "f32, bf16 or f16".
std::string types_text(DTypeSet types);
// Throws Error for a type that is none of `types`; `wanted`: their text, where their own says too little.
[[noreturn]] void refuse_type(std::string_view name, DType dtype, DTypeSet types, const char* wanted = nullptr);
inline void check_type(std::string_view name, DType dtype, DTypeSet types) {
  if (!has(types, dtype)) refuse_type(name, dtype, types);
}

}  // namespace rapt
