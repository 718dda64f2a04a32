#include "call.hpp"

#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "cache.hpp"
#include "context.hpp"
#include "error.hpp"
#include "scalar.hpp"

namespace rapt::python {
namespace {

std::optional<Align> align_of(nb::handle object) {
  constexpr const char* kWanted = "None, \"top_left\", \"bottom_right\" or an int offset";
  if (object.is_none()) return {};
  if (!PyUnicode_Check(object.ptr())) return Align::offset(integer("align", object, kWanted));
  const std::string name = nb::cast<std::string>(object);
  if (name == "top_left") return Align::top_left();
  if (name == "bottom_right") return Align::bottom_right();
  refuse_value("align", shown(object), kWanted);
}

std::optional<Window> window_of(nb::handle object) {
  constexpr const char* kWanted = "None or a pair (left, right) of ints; None or -1 leaves a side open";
  if (object.is_none()) return {};
  const bool sequence = nb::isinstance<nb::tuple>(object) || nb::isinstance<nb::list>(object);
  if (!sequence || nb::len(object) != 2) refuse_type("window", shown(object), kWanted);
  const auto side = [&](std::size_t i) {
    const nb::object value = object[i];
    return value.is_none() ? -1 : integer("window", value, kWanted);
  };
  return Window{side(0), side(1)};
}

int threads_of(nb::handle object) {
  constexpr const char* kWanted = "1 or more, or None for all";
  if (object.is_none()) return 0;
  const std::int64_t threads = integer("threads", object, kWanted);
  if (threads < 1) refuse_value("threads", shown(object), kWanted);
  return static_cast<int>(std::min<std::int64_t>(threads, std::numeric_limits<int>::max()));
}

std::string isa_of(nb::handle object) {
  if (object.is_none()) return {};
  if (!PyUnicode_Check(object.ptr())) refuse_type("isa", shown(object), "None or the name of an instruction set");
  std::string name = nb::cast<std::string>(object);
  if (name.empty()) refuse_value("isa", "\"\"", "the name of an instruction set");
  return name;
}

void run_unlocked(const AttentionArgs& args, const Context& context) {
  const nb::gil_scoped_release unlocked;
  attention(args, context);
}

// `t` with leading dimensions of size 1 in front, up to [b, h, s, d].
template <class View>
View padded(View t) {
  const int missing = kMaxDims - t.ndim;
  std::array<std::int64_t, kMaxDims> shape{}, strides{};
  for (int i = 0; i < kMaxDims; ++i) {
    const auto to = static_cast<std::size_t>(i), from = static_cast<std::size_t>(std::max(i - missing, 0));
    shape[to] = i < missing ? 1 : t.shape[from];
    strides[to] = i < missing ? 0 : t.strides[from];
  }
  t.ndim = kMaxDims, t.shape = shape, t.strides = strides;
  return t;
}

// Repeats dimension `dim`, if its size is 1, to `size`.
void repeat(TensorView& t, std::size_t dim, std::int64_t size) {
  if (t.shape[dim] != 1) return;
  t.shape[dim] = size;
  t.strides[dim] = 0;
}

}  // namespace

Call::Call(const nb::dict& arguments)
    : arrays_(arguments),
      context_(context_for(threads_of(arguments["threads"]), isa_of(arguments["isa"]),
                           truth("torch", arguments["torch"]) ? Pool::torch : Pool::tbb,
                           reinterpret_cast<void*>(nb::cast<std::uintptr_t>(arguments["stream"])))) {
  const auto take = [&](const char* name, Elements elements) { return arrays_.take(name, {.elements = elements}); };
  const auto written = [&](const char* name) { return arrays_.take(name, {.writable = true}); };
  args_.q = take("q", Elements::any);
  const KvCache cache = cache_of(arrays_, false);
  const TensorView cu_seqlens_k = take("cu_seqlens_k", Elements::integers),
                   seqlens = take("cache_seqlens", Elements::integers);
  if (cu_seqlens_k && (seqlens || cache.kind != KvSource::Kind::strided))
    refuse_value("cu_seqlens_k", "ragged keys with cache_seqlens, block_table or ring", "one kind of keys");
  args_.kv = cache.source(seqlens);
  if (cu_seqlens_k) args_.kv.kind = KvSource::Kind::ragged, args_.kv.cu_seqlens = cu_seqlens_k;
  args_.cu_seqlens_q = take("cu_seqlens_q", Elements::integers);
  args_.out = written("out");
  args_.lse = written("lse");
  ScoreSpec& score = args_.score;
  score.scale = real("scale", arguments["scale"]);
  score.causal = truth("causal", arguments["causal"]);
  score.window = window_of(arguments["window"]);
  score.align = align_of(arguments["align"]);
  score.softcap = real("softcap", arguments["softcap"]);
  score.bias = take("bias", Elements::floats);
  score.mask = take("mask", Elements::boolean);
  score.alibi = take("alibi", Elements::floats);
  score.sinks = take("sinks", Elements::floats);
}

// The library knows numbers as floats: a refusal shows them as they were given.
template <class Work>
auto Call::as_given(const Work& work) const {
  try {
    return work();
  } catch (const Error& error) {
    const std::string reason = error.what(), separator = "; wanted ";
    for (const char* name : {"scale", "softcap"})
      if (error.argument() == std::string("score.") + name)
        refuse_value(name, text_of(arrays_[name]), reason.substr(reason.find(separator) + separator.size()));
    throw;
  }
}

void Call::run() const {
  as_given([&] { run_unlocked(args_, context_); });
}

Plan Call::plan() const {
  return as_given([&] { return Plan(args_, context_); });
}

void sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, bool is_causal, nb::handle scale,
          int threads, nb::handle out, std::uintptr_t stream) {
  AttentionArgs args;
  args.out = padded(array("out", out).view);
  const std::int64_t b = args.out.shape[0], hq = args.out.shape[1];
  TensorView q = padded(array("query", query).view);
  TensorView k = padded(array("key", key).view), v = padded(array("value", value).view);
  for (TensorView* t : {&q, &k, &v}) repeat(*t, 0, b);
  repeat(q, 1, hq);
  if (k.shape[1] != v.shape[1]) repeat(k, 1, hq), repeat(v, 1, hq);
  args.q = q;
  args.kv = KvSource::strided(k, v);
  args.score.scale = real("scale", scale);
  args.score.causal = is_causal;
  args.score.align = Align::top_left();
  if (!attn_mask.is_none()) {
    TensorView mask = padded(array("attn_mask", attn_mask).view);
    repeat(mask, 3, k.shape[2]);
    (mask.dtype == DType::boolean ? args.score.mask : args.score.bias) = mask;
  }
  run_unlocked(args, context_for(threads, {}, Pool::torch, reinterpret_cast<void*>(stream)));
}

}  // namespace rapt::python
