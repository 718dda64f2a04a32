#include "cache.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"
#include "scalar.hpp"

namespace rapt::python {
namespace {

// Codes of caches, the narrowest first.
std::vector<DType> code_types() {
  enum Kind { floating, integer_code, fp8, other };
  std::vector<DType> types;
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) \
  if (kind == integer_code || kind == fp8) types.push_back(DType::name);
#include "rapt/dtypes.def"
  std::stable_sort(types.begin(), types.end(), [](DType a, DType b) { return rapt::bytes_of(a) < rapt::bytes_of(b); });
  return types;
}

// What kv_dtype says that bytes are.
std::optional<DType> bytes_of(nb::handle object) {
  static const std::vector<DType> types = code_types();
  if (object.is_none()) return {};
  std::string known;
  for (const DType type : types) {
    if (PyUnicode_Check(object.ptr()) && text_of(object) == to_string(type)) return type;
    known += ", \"" + std::string(to_string(type)) + "\"";
  }
  refuse_value("kv_dtype", shown(object), "None" + known);
}

// `writable`: it will be appended to.
KvCache cache_of(Arrays& arrays, nb::handle k, nb::handle v, const CacheArguments& arguments, bool writable) {
  const std::optional<DType> bytes = bytes_of(arguments.kv_dtype);
  KvCache cache;
  cache.k = arrays.read("k", k, {.writable = writable, .bytes_of = bytes});
  cache.v = arrays.read("v", v, {.writable = writable, .bytes_of = bytes, .shaped = !writable});
  // Those that broadcast are inputs of append_kv too.
  const auto coding = [&](const char* name, nb::handle array, const MutableTensorView& rows) {
    const MutableTensorView t = arrays.read(name, array, {.elements = Elements::f32});
    const bool written = writable && t && t.shape[0] == rows.shape[0] && t.shape[2] == rows.shape[2];
    return written ? arrays.read(name, array, {.writable = true, .elements = Elements::f32}) : t;
  };
  cache.k_scale = coding("k_scale", arguments.k_scale, cache.k);
  cache.v_scale = coding("v_scale", arguments.v_scale, cache.v);
  cache.k_zero = coding("k_zero", arguments.k_zero, cache.k);
  cache.v_zero = coding("v_zero", arguments.v_zero, cache.v);
  cache.k_tail = arrays.read("k_tail", arguments.k_tail, {.writable = writable, .elements = Elements::floats});
  arguments.layout.give(arrays, cache);
  return cache;
}

}  // namespace

KvCache cache_of(Arrays& arrays, nb::handle k, nb::handle v, const CacheArguments& arguments) {
  return cache_of(arrays, k, v, arguments, true);
}

KvSource keys_of(Arrays& arrays, nb::handle k, nb::handle v, const KeyArguments& arguments) {
  return arguments.layout.source(arrays, cache_of(arrays, k, v, arguments.cache, false));
}

void check_pages(KvSource::Kind kind, const Layout& k, const Layout& seqlens, const Layout& rows) {
  if (kind != KvSource::Kind::strided || seqlens.ndim != 1 || k.ndim != 4 || rows.ndim != 4) return;
  const std::int64_t b = rows.shape[0];
  if (seqlens.shape[0] != b || k.shape[0] == b) return;
  const std::string batch = std::to_string(b);
  refuse_value("block_table", "None, with k of batch " + std::to_string(k.shape[0]) + " and cache_seqlens of " + batch,
               "a block_table for pages, or k of batch " + batch);
}

}  // namespace rapt::python
