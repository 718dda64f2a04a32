#include "call.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

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
  rapt::attention(args, context);
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

// A new array of `like`'s library, and its view: PyTorch's for its tensors, else NumPy's. Of its type, or of float32.
nb::object empty_like(nb::handle like, const TensorView& its, const std::vector<std::int64_t>& sizes, bool f32,
                      MutableTensorView& view) {
  nb::object made;
  const Torch* torch = loaded_torch();
  if (torch != nullptr && torch->is_plain(like) && !f32) {
    const bool alike = std::equal(sizes.begin(), sizes.end(), its.shape.begin(), its.shape.begin() + its.ndim) &&
                       its.strides == Layout(sizes).strides;
    made = alike ? new_like(like) : new_empty(like, sizes);
    view = new_view(*torch, made);
    return made;
  }
  if (is_ndarray(like)) {
    const nb::handle empty = once([] { return held(nb::module_::import_("numpy").attr("empty")); });
    made = f32 ? empty(tuple_of(sizes), "float32") : empty(tuple_of(sizes), like.attr("dtype"));
  } else {
    const nb::object other = nb::module_::import_("rapt._arrays").attr("empty_like");
    made = f32 ? other("q", like, tuple_of(sizes), "float32") : other("q", like, tuple_of(sizes));
  }
  view = array("out", made, {.writable = true}).view;
  return made;
}

// Views of everything a call needs, and its context.
class Call {
  // The library knows numbers as floats: a refusal shows them as they were given.
  template <class Work>
  auto as_given(const Work& work) const {
    try {
      return work();
    } catch (const Error& error) {
      const std::string reason = error.what(), separator = "; wanted ";
      for (const auto& [name, value] : {std::pair("scale", given_.scale), std::pair("softcap", given_.softcap)})
        if (error.argument() == std::string("score.") + name)
          refuse_value(name, text_of(value), reason.substr(reason.find(separator) + separator.size()));
      throw;
    }
  }

 public:
  explicit Call(const AttentionArguments& a) : given_(a) {
    const auto take = [&](const char* name, nb::handle array, Elements elements) {
      return arrays_.take(name, array, {.elements = elements});
    };
    args_.q = arrays_.take("q", a.q, {.shaped = true});
    const KvCache cache = cache_of(
        arrays_, {a.k, a.v, a.block_table, a.ring, a.k_scale, a.v_scale, a.k_zero, a.v_zero, a.kv_dtype}, false);
    const TensorView cu_seqlens_k = take("cu_seqlens_k", a.cu_seqlens_k, Elements::integers),
                     seqlens = take("cache_seqlens", a.cache_seqlens, Elements::integers);
    if (cu_seqlens_k && (seqlens || cache.kind != KvSource::Kind::strided))
      refuse_value("cu_seqlens_k", "ragged keys with cache_seqlens, block_table or ring", "one kind of keys");
    args_.kv = cache.source(seqlens);
    if (cu_seqlens_k) args_.kv.kind = KvSource::Kind::ragged, args_.kv.cu_seqlens = cu_seqlens_k;
    args_.cu_seqlens_q = take("cu_seqlens_q", a.cu_seqlens_q, Elements::integers);
    ScoreSpec& score = args_.score;
    score.scale = real("scale", a.scale);
    score.causal = truth("causal", a.causal);
    score.window = window_of(a.window);
    score.align = align_of(a.align);
    score.softcap = real("softcap", a.softcap);
    score.bias = take("bias", a.bias, Elements::floats);
    score.mask = take("mask", a.mask, Elements::boolean);
    score.alibi = take("alibi", a.alibi, Elements::floats);
    score.sinks = take("sinks", a.sinks, Elements::floats);

    std::vector<std::int64_t> shape(args_.q.shape.begin(), args_.q.shape.begin() + args_.q.ndim - 1);
    const int with_lse = PyObject_IsTrue(a.return_lse.ptr());
    if (with_lse < 0) throw nb::python_error();
    if (with_lse == 1) {
      lse_ = empty_like(a.q, args_.q, shape, true, args_.lse);
    }
    if (a.out.is_none()) {
      const std::int64_t size = cache.v.shape[static_cast<std::size_t>(cache.v.ndim - 1)];
      shape.push_back(cache.v.dtype == DType::i4x2 ? 2 * size : size);
      out_ = empty_like(a.q, args_.q, shape, false, args_.out);
    } else {
      out_ = nb::borrow(a.out);
      args_.out = arrays_.take("out", a.out, {.writable = true});
    }
    const bool torch = arrays_.has_tensors();
    const int threads = torch && a.threads.is_none() ? torch_threads(*loaded_torch()) : threads_of(a.threads);
    context_ = context_for(threads, isa_of(a.isa), torch ? Pool::torch : Pool::tbb, torch_stream(args_.q.device));
  }

  nb::object run() const {
    as_given([&] { run_unlocked(args_, *context_); });
    arrays_.mark_written();
    return lse_.is_valid() ? nb::object(nb::make_tuple(out_, lse_)) : out_;
  }
  Plan plan() const {
    return as_given([&] { return Plan(args_, *context_); });
  }

 private:
  AttentionArguments given_;
  Arrays arrays_;
  AttentionArgs args_;
  nb::object out_, lse_;
  std::optional<Context> context_;
};

}  // namespace

nb::object attention(const AttentionArguments& arguments) {
  return Call(arguments).run();
}

Plan explain(const AttentionArguments& arguments) {
  return Call(arguments).plan();
}

AttentionArgs sdpa_args(const SdpaViews& views, std::optional<float> scale, bool is_causal) {
  AttentionArgs args;
  args.out = padded(views.out);
  const std::int64_t b = args.out.shape[0], hq = args.out.shape[1];
  TensorView q = padded(views.q), k = padded(views.k), v = padded(views.v);
  for (TensorView* t : {&q, &k, &v}) repeat(*t, 0, b);
  repeat(q, 1, hq);
  if (k.shape[1] != v.shape[1]) repeat(k, 1, hq), repeat(v, 1, hq);
  args.q = q;
  args.kv = KvSource::strided(k, v);
  args.score.scale = scale;
  args.score.causal = is_causal;
  args.score.align = Align::top_left();
  if (views.attn_mask) {
    TensorView mask = padded(views.attn_mask);
    repeat(mask, 3, k.shape[2]);
    (mask.dtype == DType::boolean ? args.score.mask : args.score.bias) = mask;
  }
  return args;
}

void sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, bool is_causal, nb::handle scale,
          nb::handle out) {
  // `out` first: of tensors without memory it is the one that is named.
  const Array to = array("out", out), q = array("query", query), k = array("key", key), v = array("value", value);
  const Array mask = array("attn_mask", attn_mask);
  run_as_torch(sdpa_args({q.view, k.view, v.view, mask.view, to.view}, real("scale", scale), is_causal));
}

void run_as_torch(const AttentionArgs& args) {
  const Context context = context_for(torch_threads(*loaded_torch()), {}, Pool::torch, torch_stream(args.q.device));
  run_unlocked(args, context);
}

}  // namespace rapt::python
