// Which types queries and outputs may have, and which caches.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "core/pod.hpp"
#include "rapt/types.hpp"

namespace rapt {

// Those of q and out, those that only caches have, and the others: the order of texts.
inline constexpr std::array kDTypes = {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) DType::name,
#include "rapt/dtypes.def"
};
inline constexpr DType kLastDType = *std::max_element(kDTypes.begin(), kDTypes.end());

inline constexpr DTypeSet kF32 = set_of(DType::f32), kI32 = set_of(DType::i32), kBoolean = set_of(DType::boolean),
                          kIntegers = set_of(DType::i32) | set_of(DType::i64),
                          kQueryTypes = kFloatTypes | set_of(DType::f8e4m3),
                          kStateTypes = set_of(DType::f32) | set_of(DType::bf16);

constexpr bool has(DTypeSet types, DType dtype) {
  return static_cast<std::size_t>(dtype) < kDTypes.size() && (types & set_of(dtype)) != 0;
}
constexpr bool is_float(DType dtype) {
  return has(kFloatTypes, dtype);
}
// Of codes that mean nothing without scales, and that may have zeros.
constexpr bool needs_scales(DType dtype) {
  return has(kIntegerCodes, dtype);
}

// "f32, bf16 or f16".
std::string types_text(DTypeSet types);
// Throws Error for a type that is none of `types`; `wanted`: their text, where their own says too little.
[[noreturn]] void refuse_type(std::string_view name, DType dtype, DTypeSet types, const char* wanted = nullptr);
inline void check_type(std::string_view name, DType dtype, DTypeSet types) {
  if (!has(types, dtype)) refuse_type(name, dtype, types);
}

}  // namespace rapt
