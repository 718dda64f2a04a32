#include "cache.hpp"

#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "error.hpp"
#include "scalar.hpp"

namespace rapt::python {
namespace {

// What kv_dtype says that bytes are.
std::optional<DType> bytes_of(nb::handle object) {
  constexpr std::array kTypes = {DType::i4x2, DType::i8, DType::f8e4m3, DType::f8e5m2};
  if (object.is_none()) return {};
  std::string known;
  for (const DType type : kTypes) {
    if (PyUnicode_Check(object.ptr()) && text_of(object) == to_string(type)) return type;
    known += ", \"" + std::string(to_string(type)) + "\"";
  }
  refuse_value("kv_dtype", shown(object), "None" + known);
}

}  // namespace

KvCache cache_of(Arrays& arrays, const CacheArguments& arguments, bool writable) {
  const std::optional<DType> bytes = bytes_of(arguments.kv_dtype);
  KvCache cache;
  cache.k = arrays.take("k", arguments.k, {.writable = writable, .bytes = bytes});
  cache.v = arrays.take("v", arguments.v, {.writable = writable, .bytes = bytes, .shaped = !writable});
  cache.block_table = arrays.take("block_table", arguments.block_table, {.elements = Elements::integers});
  // Those that broadcast are inputs of append_kv too.
  const auto coding = [&](const char* name, nb::handle array, const MutableTensorView& rows) {
    const MutableTensorView t = arrays.take(name, array, {.elements = Elements::f32});
    const bool written = writable && t && t.shape[0] == rows.shape[0] && t.shape[2] == rows.shape[2];
    return written ? arrays.take(name, array, {.writable = true, .elements = Elements::f32}) : t;
  };
  cache.k_scale = coding("k_scale", arguments.k_scale, cache.k);
  cache.v_scale = coding("v_scale", arguments.v_scale, cache.v);
  cache.k_zero = coding("k_zero", arguments.k_zero, cache.k);
  cache.v_zero = coding("v_zero", arguments.v_zero, cache.v);
  cache.k_tail = arrays.take("k_tail", arguments.k_tail, {.writable = writable, .elements = Elements::floats});
  const bool ring = truth("ring", arguments.ring);
  if (ring && cache.block_table) refuse_value("ring", "True with a block_table", "one of them");
  cache.kind = ring ? KvSource::Kind::ring : cache.block_table ? KvSource::Kind::paged : KvSource::Kind::strided;
  return cache;
}

}  // namespace rapt::python
