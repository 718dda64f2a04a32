// The element types by kind, in the order of dtypes.def.
#pragma once

#include <array>
#include <cstddef>

#include "rapt/types.hpp"

namespace rapt::testing {

enum class DTypeKind { floating, integer_code, fp8, other };
struct DTypeRow {
  DType type;
  DTypeKind kind;
};
inline constexpr DTypeRow kDTypeRows[] = {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) {DType::name, DTypeKind::kind},
#include "rapt/dtypes.def"
};

template <DTypeKind... kKinds>
constexpr bool has_kind(DType dtype) {
  for (const DTypeRow& row : kDTypeRows)
    if (row.type == dtype) return ((row.kind == kKinds) || ...);
  return false;
}
template <DTypeKind... kKinds>
inline constexpr auto kTypesOf = [] {
  constexpr std::size_t kCount = [] {
    std::size_t count = 0;
    for (const DTypeRow& row : kDTypeRows) count += has_kind<kKinds...>(row.type);
    return count;
  }();
  std::array<DType, kCount> types{};
  std::size_t n = 0;
  for (const DTypeRow& row : kDTypeRows)
    if (has_kind<kKinds...>(row.type)) types[n++] = row.type;
  return types;
}();

/// The types q, k, v and out may have, those that k and v may have beside them (q: f8e4m3), and all of k and v.
inline constexpr std::array kFloatTypes = kTypesOf<DTypeKind::floating>;
inline constexpr std::array kFp8Types = kTypesOf<DTypeKind::fp8>;
inline constexpr std::array kQuantizedTypes = kTypesOf<DTypeKind::integer_code, DTypeKind::fp8>;
inline constexpr std::array kCacheTypes = kTypesOf<DTypeKind::floating, DTypeKind::integer_code, DTypeKind::fp8>;
/// What keys of index_scores() may be: whole elements.
inline constexpr std::array kIndexKeyTypes = [] {
  std::array<DType, kCacheTypes.size() - 1> types{};
  std::size_t n = 0;
  for (const DType type : kCacheTypes)
    if (type != DType::i4x2) types[n++] = type;
  return types;
}();

constexpr bool is_fp8(DType dtype) {
  return has_kind<DTypeKind::fp8>(dtype);
}
/// Whether elements are codes, which may have scales.
constexpr bool is_quantized(DType dtype) {
  return has_kind<DTypeKind::integer_code, DTypeKind::fp8>(dtype);
}
/// Whether elements are codes that mean nothing without scales.
constexpr bool is_integer(DType dtype) {
  return has_kind<DTypeKind::integer_code>(dtype);
}

}  // namespace rapt::testing
