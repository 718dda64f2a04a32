#include "cache.hpp"

#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call.hpp"
#include "error.hpp"
#include "rapt/merge_states.hpp"
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

void append_kv(const AppendArguments& a) {
  Arrays arrays;
  AppendKvArgs args;
  args.k_new = arrays.take("k_new", a.k_new), args.v_new = arrays.take("v_new", a.v_new);
  args.cache = cache_of(
      arrays, {a.k, a.v, a.block_table, a.ring, a.k_scale, a.v_scale, a.k_zero, a.v_zero, a.k_tail, a.kv_dtype}, true);
  args.seqlens = arrays.take("cache_seqlens", a.cache_seqlens, {.elements = Elements::integers});
  args.cu_seqlens = arrays.take("cu_seqlens", a.cu_seqlens, {.elements = Elements::integers});
  const Context context = context_of(arrays, nb::none(), nb::none(), args.cache.k.device);
  {
    const nb::gil_scoped_release unlocked;
    rapt::append_kv(args, context);
  }
  arrays.mark_written();
}

void merge_states(const nb::sequence& outs, const nb::sequence& lses, nb::handle out, nb::handle lse) {
  Arrays arrays;
  const auto views = [&](const char* name, const nb::sequence& sequence, Elements elements) {
    std::vector<TensorView> read;
    for (const nb::handle item : sequence) {
      const std::string argument = std::string(name) + "[" + std::to_string(read.size()) + "]";
      read.push_back(arrays.take(argument.c_str(), item, {.elements = elements}));
    }
    return read;
  };
  const std::vector<TensorView> from = views("outs", outs, Elements::any), with = views("lses", lses, Elements::f32);
  const MutableTensorView to = arrays.take("out", out, {.writable = true});
  const MutableTensorView total = arrays.take("lse", lse, {.writable = true});
  const Context context = context_of(arrays, nb::none(), nb::none(), to.device);
  {
    const nb::gil_scoped_release unlocked;
    rapt::merge_states(from, with, to, total, context);
  }
  arrays.mark_written();
}

}  // namespace rapt::python
