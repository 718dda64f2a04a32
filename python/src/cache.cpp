#include "cache.hpp"

#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"
#include "rapt/merge.hpp"
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

// The arrays of a sequence, and their views.
struct Parts {
  Parts(const char* name, const nb::sequence& sequence, Elements elements = Elements::any) {
    for (const nb::handle item : sequence) {
      const std::string argument = std::string(name) + "[" + std::to_string(views.size()) + "]";
      Array read = array(argument.c_str(), item, {.elements = elements});
      views.push_back(read.view);
      owners.push_back(std::move(read.owner));
    }
  }
  std::vector<nb::ndarray<nb::ro>> owners;
  std::vector<TensorView> views;
};

}  // namespace

KvCache cache_of(Arrays& arguments, bool writable) {
  const std::optional<DType> bytes = bytes_of(arguments["kv_dtype"]);
  KvCache cache;
  cache.k = arguments.take("k", {.writable = writable, .bytes = bytes});
  cache.v = arguments.take("v", {.writable = writable, .bytes = bytes});
  cache.block_table = arguments.take("block_table", {.elements = Elements::integers});
  // Those that broadcast are inputs of append_kv too.
  const auto coding = [&](const char* name, const MutableTensorView& rows) {
    const MutableTensorView t = arguments.take(name, {.elements = Elements::f32});
    const bool written = writable && t && t.shape[0] == rows.shape[0] && t.shape[2] == rows.shape[2];
    return written ? arguments.take(name, {.writable = true, .elements = Elements::f32}) : t;
  };
  cache.k_scale = coding("k_scale", cache.k), cache.v_scale = coding("v_scale", cache.v);
  cache.k_zero = coding("k_zero", cache.k), cache.v_zero = coding("v_zero", cache.v);
  const bool ring = truth("ring", arguments["ring"]);
  if (ring && cache.block_table) refuse_value("ring", "True with a block_table", "one of them");
  cache.kind = ring ? KvSource::Kind::ring : cache.block_table ? KvSource::Kind::paged : KvSource::Kind::strided;
  return cache;
}

std::vector<std::string> append_kv(const nb::dict& arguments) {
  Arrays arrays(arguments);
  AppendArgs args;
  args.k_new = arrays.take("k_new"), args.v_new = arrays.take("v_new");
  args.cache = cache_of(arrays, true);
  args.seqlens = arrays.take("cache_seqlens", {.elements = Elements::integers});
  args.cu_seqlens = arrays.take("cu_seqlens", {.elements = Elements::integers});
  const nb::gil_scoped_release unlocked;
  rapt::append_kv(args);
  return arrays.written();
}

void merge_states(const nb::sequence& outs, const nb::sequence& lses, nb::handle out, nb::handle lse) {
  const Parts from("outs", outs), with("lses", lses, Elements::f32);
  const Array to = array("out", out, {.writable = true}), total = array("lse", lse, {.writable = true});
  const nb::gil_scoped_release unlocked;
  rapt::merge_states(from.views, with.views, to.view, total.view);
}

}  // namespace rapt::python
