// Rows of f32, bf16 and f16 elements as f32.
#pragma once

#include <cstdint>

#include "core/small_floats.hpp"
#include "rapt/types.hpp"

namespace rapt {

// Element `offset` of a tensor that lies at `data`.
inline const void* element(const void* data, DType dtype, std::int64_t offset) {
  return static_cast<const char*>(data) + offset * static_cast<std::int64_t>(size_of(dtype));
}
inline void* element(void* data, DType dtype, std::int64_t offset) {
  return static_cast<char*>(data) + offset * static_cast<std::int64_t>(size_of(dtype));
}

inline void load_row(const void* from, DType dtype, std::int64_t stride, std::int64_t count, float* to) {
  const auto each = [&](const auto* data, auto&& widen) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = widen(data[i * stride]);
  };
  if (dtype == DType::f32) each(static_cast<const float*>(from), [](float x) { return x; });
  else if (dtype == DType::bf16) each(static_cast<const std::uint16_t*>(from), Bf16::widen);
  else each(static_cast<const std::uint16_t*>(from), F16::widen);
}

// Rounded to nearest even; past the largest number Inf.
inline void store_row(const float* from, std::int64_t count, void* to, DType dtype, std::int64_t stride) {
  const auto each = [&](auto* data, auto&& narrow) {
    for (std::int64_t i = 0; i < count; ++i) data[i * stride] = narrow(from[i]);
  };
  if (dtype == DType::f32) each(static_cast<float*>(to), [](float x) { return x; });
  else if (dtype == DType::bf16)
    each(static_cast<std::uint16_t*>(to), [](float x) { return static_cast<std::uint16_t>(Bf16::narrow(x)); });
  else each(static_cast<std::uint16_t*>(to), [](float x) { return static_cast<std::uint16_t>(F16::narrow(x)); });
}

}  // namespace rapt
