#include "call.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "context.hpp"
#include "error.hpp"
#include "rapt/dropout.hpp"
#include "scalar.hpp"

namespace rapt::python {
namespace {

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

// A name, or "" for None.
std::string name_of(const char* argument, nb::handle object, const std::string& wanted) {
  if (object.is_none()) return {};
  if (!PyUnicode_Check(object.ptr())) refuse_type(argument, shown(object), ("None or " + wanted).c_str());
  Py_ssize_t size = 0;
  const char* const name = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (name == nullptr) PyErr_Clear();  // a surrogate, which no name has
  if (name == nullptr || size == 0) refuse_value(argument, size == 0 && name ? "\"\"" : shown(object), wanted.c_str());
  return {name, static_cast<std::size_t>(size)};
}
std::string isa_of(nb::handle object) {
  return name_of("isa", object, "the name of an instruction set");
}

void run_unlocked(const AttentionArgs& args, const Context& context) {
  const nb::gil_scoped_release unlocked;
  rapt::attention(args, context);
}
void run_unlocked(const AttentionBackwardArgs& args, const Context& context) {
  const nb::gil_scoped_release unlocked;
  rapt::attention_backward(args, context);
}

// `t` with leading dimensions of size 1 in front, up to [b, h, s, d] or as many as wanted.
template <class View>
View padded(View t, int wanted = kMaxDims) {
  const int missing = wanted - t.ndim;
  if (missing == 0) return t;
  std::array<std::int64_t, kMaxDims> shape{}, strides{};
  for (int i = 0; i < wanted; ++i) {
    const auto to = static_cast<std::size_t>(i), from = static_cast<std::size_t>(std::max(i - missing, 0));
    shape[to] = i < missing ? 1 : t.shape[from];
    strides[to] = i < missing ? 0 : t.strides[from];
  }
  t.ndim = wanted, t.shape = shape, t.strides = strides;
  return t;
}

// Repeats dimension `dim`, if its size is 1, to `size`.
void repeat(TensorView& t, std::size_t dim, std::int64_t size) {
  if (t.shape[dim] != 1) return;
  t.shape[dim] = size;
  t.strides[dim] = 0;
}

// A new array of `like`'s library, and its view: PyTorch's for its tensors, else NumPy's. Of its type, f32 or bf16.
nb::object empty_like(nb::handle like, const TensorView& its, const std::vector<std::int64_t>& sizes, DType dtype,
                      MutableTensorView& view) {
  const bool is_its = dtype == its.dtype, is_f32 = dtype == DType::f32;
  const char* const name = is_f32 ? "float32" : "bfloat16";
  nb::object made;
  const Torch* torch = loaded_torch();
  if (torch != nullptr && torch->is_plain(like)) {
    const bool alike = is_its &&
                       std::equal(sizes.begin(), sizes.end(), its.shape.begin(), its.shape.begin() + its.ndim) &&
                       its.strides == Layout(sizes).strides;
    made = alike ? new_like(like)
                 : new_empty(like, sizes,
                             is_its   ? nb::handle()
                             : is_f32 ? torch->float32
                                      : torch->bfloat16);
    view = new_view(*torch, made);
    return made;
  }
  if (is_ndarray(like) && (is_its || is_f32)) {
    const nb::handle empty = once([] { return held(nb::module_::import_("numpy").attr("empty")); });
    made = is_its ? empty(tuple_of(sizes), like.attr("dtype")) : empty(tuple_of(sizes), name);
  } else {
    const nb::object other = nb::module_::import_("rapt._arrays").attr("empty_like");
    made = is_its ? other("q", like, tuple_of(sizes)) : other("q", like, tuple_of(sizes), name);
  }
  view = array("out", made, {.writable = true}).view;
  return made;
}

// Reads Python's `object` into a member of ScoreSpec.
struct ScoreReader {
  Arrays& arrays;

  void operator()(const char* name, nb::handle object, bool& member) const { member = truth(name, object); }
  void operator()(const char* name, nb::handle object, std::optional<float>& member) const {
    member = real(name, object);
  }
  void operator()(const char*, nb::handle object, std::optional<Window>& member) const { member = window_of(object); }
  void operator()(const char*, nb::handle object, std::optional<Align>& member) const { member = align_of(object); }
  void operator()(const char* name, nb::handle object, TensorView& member) const {
    member = arrays.read(name, object, {.elements = Elements::floats});
  }
  void operator()(const char* name, nb::handle object, TensorView& member, DType) const {
    member = arrays.read(name, object, {.elements = Elements::boolean});
  }
};

ScoreSpec score_of(Arrays& arrays, const AttentionArguments& a) {
  ScoreSpec score;
  std::size_t i = 0;
  score.for_each([&](const char* name, auto& member, auto... boolean) {
    ScoreReader{arrays}(name, a.score[i++], member, boolean...);
  });
  score.dropout = dropout_of(a.dropout_p, a.seed, a.offset);
  return score;
}

// What the library knows as the number `argument`, by its name in Python; of no name if it is no number of a score.
std::pair<std::string, nb::handle> number_given(const AttentionArguments& a, std::string_view argument) {
  if (argument == "score.dropout") return {"dropout_p", a.dropout_p};
  std::pair<std::string, nb::handle> found;
  std::size_t i = 0;
  ScoreSpec().for_each([&](const std::string& name, const auto& member, auto...) {
    constexpr bool is_number = std::is_same_v<decltype(member), const std::optional<float>&>;
    if (is_number && argument == "score." + name) found = {name, a.score[i]};
    ++i;
  });
  return found;
}

// The library knows numbers as floats: a refusal shows them as they were given.
template <class Work>
auto as_given(const AttentionArguments& given, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    const auto [name, number] = number_given(given, error.argument());
    if (name.empty()) throw;
    const std::string reason = error.what(), separator = "; wanted ";
    refuse_value(name, text_of(number), reason.substr(reason.find(separator) + separator.size()));
  }
}

// All that a call reads.
AttentionArgs inputs_of(Arrays& arrays, const AttentionArguments& a) {
  AttentionArgs args;
  args.q = arrays.read("q", a.q, {.shaped = true});
  args.q_scale = arrays.read("q_scale", a.q_scale, {.elements = Elements::f32});
  args.kv = keys_of(arrays, a.k, a.v, a.keys);
  args.cu_seqlens_q = arrays.read("cu_seqlens_q", a.cu_seqlens_q, {.elements = Elements::integers});
  if (!args.cu_seqlens_q) check_pages(args.kv.kind, args.kv.k, args.kv.seqlens, args.q);
  args.score = score_of(arrays, a);
  return args;
}

// Views of everything a call needs, and its context.
class Call {
 public:
  explicit Call(const AttentionArguments& a) : given_(a), args_(inputs_of(arrays_, a)) {
    std::vector<std::int64_t> shape(args_.q.shape.begin(), args_.q.shape.begin() + args_.q.ndim - 1);
    const int with_lse = PyObject_IsTrue(a.return_lse.ptr());
    if (with_lse < 0) throw nb::python_error();
    if (with_lse == 1) {
      lse_ = empty_like(a.q, args_.q, shape, DType::f32, args_.lse);
    }
    if (a.out.is_none()) {
      const TensorView& v = args_.kv.v;
      const std::int64_t size = v.shape[static_cast<std::size_t>(v.ndim - 1)];
      shape.push_back(v.dtype == DType::i4x2 ? 2 * size : size);
      out_ = empty_like(a.q, args_.q, shape, args_.q.dtype == DType::f8e4m3 ? DType::bf16 : args_.q.dtype, args_.out);
    } else {
      out_ = nb::borrow(a.out);
      args_.out = arrays_.read("out", a.out, {.writable = true});
    }
    context_ = context_of(arrays_, a.threads, a.isa, args_.q.device, a.kernel);
  }

  nb::object run() const {
    as_given(given_, [&] { run_unlocked(args_, *context_); });
    arrays_.mark_written();
    return lse_.is_valid() ? nb::object(nb::make_tuple(out_, lse_)) : out_;
  }
  Plan plan() const {
    return as_given(given_, [&] { return Plan(args_, *context_); });
  }

 private:
  AttentionArguments given_;
  Arrays arrays_;
  AttentionArgs args_;
  nb::object out_, lse_;
  std::optional<Context> context_;
};

}  // namespace

std::optional<Align> align_of(nb::handle object) {
  constexpr const char* kWanted = "None, \"top_left\", \"bottom_right\" or an int offset";
  if (object.is_none()) return {};
  if (!PyUnicode_Check(object.ptr())) return Align::offset(integer("align", object, kWanted));
  const std::string name = nb::cast<std::string>(object);
  if (name == "top_left") return Align::top_left();
  if (name == "bottom_right") return Align::bottom_right();
  refuse_value("align", shown(object), kWanted);
}

std::optional<Dropout> dropout_of(nb::handle p, nb::handle seed, nb::handle offset) {
  const std::optional<float> given = real("dropout_p", p);
  if (!given || *given == 0) return {};
  if (seed.is_none()) refuse_value("seed", "None, with a dropout_p of " + shown(p), "an int from 0 to 2**64 - 1");
  return Dropout{*given, unsigned_integer("seed", seed), unsigned_integer("offset", offset)};
}

Context context_of(const Arrays& arrays, nb::handle threads, nb::handle isa, Device device, nb::handle kernel) {
  const bool torch = arrays.has_tensors();
  const int max_threads = torch && threads.is_none() ? torch_threads(*loaded_torch()) : threads_of(threads);
  return context_for(max_threads, isa_of(isa), torch ? Pool::torch : Pool::tbb, torch_stream(device),
                     name_of("kernel", kernel, "the name of an entry"));
}

nb::object attention(const AttentionArguments& arguments) {
  return Call(arguments).run();
}

Plan explain(const AttentionArguments& arguments) {
  return Call(arguments).plan();
}

Plan explain_problem(std::string_view problem, nb::handle threads, nb::handle isa) {
  return Plan(parse_problem(problem), context_for(threads_of(threads), isa_of(isa), Pool::tbb));
}

void attention_backward(const AttentionArguments& forward, const GradientArguments& a) {
  Arrays arrays;
  const AttentionArgs inputs = inputs_of(arrays, forward);
  AttentionBackwardArgs args;
  args.q = inputs.q, args.kv = inputs.kv, args.score = inputs.score, args.cu_seqlens_q = inputs.cu_seqlens_q;
  args.out = arrays.read("out", forward.out, {.elements = Elements::floats});
  args.lse = arrays.read("lse", a.lse, {.elements = Elements::f32});
  args.dout = arrays.read("dout", a.dout, {.elements = Elements::floats});
  args.dlse = arrays.read("dlse", a.dlse, {.elements = Elements::f32});
  for (const auto& [name, array, to] : {std::tuple{"dq", a.dq, &args.dq},
                                        {"dk", a.dk, &args.dk},
                                        {"dv", a.dv, &args.dv},
                                        {"dbias", a.dbias, &args.dbias},
                                        {"dsinks", a.dsinks, &args.dsinks},
                                        {"dalibi", a.dalibi, &args.dalibi}})
    *to = arrays.read(name, array, {.writable = true});
  const Context context = context_of(arrays, forward.threads, forward.isa, args.q.device);
  as_given(forward, [&] { run_unlocked(args, context); });
  arrays.mark_written();
}

void write_dropout_mask(nb::handle p, nb::handle seed, nb::handle offset, nb::handle mask) {
  const std::optional<float> share = real("p", p);
  if (!share || !(*share >= 0 && *share <= 1)) refuse_value("p", shown(p), "a number from 0 to 1");
  const Dropout dropout{*share, unsigned_integer("seed", seed), unsigned_integer("offset", offset)};
  const MutableTensorView view = array("mask", mask, {.writable = true}).view;
  const nb::gil_scoped_release unlocked;
  dropout_mask(dropout, view);
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
  if (views.lse) args.lse = padded(views.lse, 3);
  args.score.scale = scale;
  args.score.causal = is_causal;
  args.score.align = Align::top_left();
  if (views.attn_mask) {
    const TensorView mask = padded(views.attn_mask);
    (mask.dtype == DType::boolean ? args.score.mask : args.score.bias) = mask;
  }
  return args;
}

void sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, bool is_causal, nb::handle scale,
          nb::handle out, nb::handle lse, nb::handle dropout_p, nb::handle seed) {
  // `out` first: of tensors without memory it is the one that is named.
  const Array to = array("out", out), q = array("query", query), k = array("key", key), v = array("value", value);
  const Array mask = array("attn_mask", attn_mask), sums = array("lse", lse);
  AttentionArgs args =
      sdpa_args({q.view, k.view, v.view, mask.view, to.view, sums.view}, real("scale", scale), is_causal);
  args.score.dropout = dropout_of(dropout_p, seed, nb::int_(0));
  run_as_torch(args);
}

void run_as_torch(const AttentionArgs& args) {
  const Context context = context_for(torch_threads(*loaded_torch()), {}, Pool::torch, torch_stream(args.q.device));
  run_unlocked(args, context);
}
void run_as_torch(const AttentionBackwardArgs& args) {
  run_unlocked(args, context_for(torch_threads(*loaded_torch()), {}, Pool::torch, torch_stream(args.q.device)));
}

void bind_attention(nb::module_& m) {
  m.def(
      "attention", [](const nb::args& given) { return attention(arguments_of<AttentionArguments>(given)); },
      nb::sig("def attention(*arguments: Any) -> Any"), "`rapt.attention`: all its arguments, in its order.");
}

void bind_attention_backward(nb::module_& m) {
  m.def(
      "attention_backward",
      [](const nb::tuple& forward, const nb::tuple& gradients) {
        attention_backward(arguments_of<AttentionArguments>(forward), arguments_of<GradientArguments>(gradients));
      },
      nb::sig("def attention_backward(forward: tuple[Any, ...], gradients: tuple[Any, ...], /) -> None"),
      "Gradients of attention(*forward), whose `out` is the result that it had. `gradients` are dout, lse, dlse or "
      "None, and the arrays to write, or None: dq, dk, dv, dbias, dsinks, dalibi.");
}

}  // namespace rapt::python
