#include "eager.hpp"

#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "call.hpp"
#include "torch.hpp"

namespace rapt::python {
namespace {

nb::object refusal() {
  return nb::borrow(Py_NotImplemented);
}

// A variable of a Python module, which others set.
class ModuleVariable {
 public:
  ModuleVariable(const char* module, const char* name)
      : variables_(PyModule_GetDict(nb::module_::import_(module).release().ptr())), name_(interned(name)) {}
  nb::handle get() const { return PyDict_GetItemWithError(variables_, name_); }

 private:
  PyObject *variables_, *name_;
};

// What of PyTorch's state says that a call is part of something bigger.
struct State {
  std::array<std::pair<nb::handle, PyObject*>, 6> wanted;  // functions, and the very object they return if it is not
  ModuleVariable is_compiling{"torch.compiler", "_is_compiling_flag"};
  ModuleVariable is_profiled{"torch.autograd.profiler", "_is_profiler_enabled"};
  ModuleVariable forward_level{"torch.autograd.forward_ad", "_current_level"};

  State() {
    const nb::module_ c = nb::module_::import_("torch._C");
    const auto zero = PyLong_FromLong(0);
    wanted = {{{held(c.attr("_len_torch_function_stack")), zero},
               {held(c.attr("_len_torch_dispatch_stack")), zero},
               {held(c.attr("_functorch").attr("maybe_current_level")), Py_None},
               {held(c.attr("_get_tracing_state")), Py_None},
               {held(c.attr("_is_any_autocast_enabled")), Py_False},
               {held(c.attr("_get_flash_sdp_enabled")), Py_True}}};
  }

  bool is_plain() const {
    for (const auto& [function, value] : wanted)
      if (checked(PyObject_CallNoArgs(function.ptr())).ptr() != value) return false;
    const nb::handle level = forward_level.get();
    return is_compiling.get().is(Py_False) && is_profiled.get().is(Py_False) && level.is_valid() &&
           PyLong_AsLong(level.ptr()) < 0;
  }
};

// Plain tensors with memory of their own.
class Tensors {
 public:
  explicit Tensors(const Torch& torch)
      : torch_(torch), enabled_(checked(PyObject_CallNoArgs(torch.is_grad_enabled.ptr())).ptr() == Py_True) {}

  bool read(nb::handle tensor, MutableTensorView& view) {
    static PyObject* const requires_grad = interned("requires_grad");
    const std::optional<MutableTensorView> found = view_by_table(torch_, tensor);
    if (!found) return false;
    view = *found;
    if (enabled_ && !recorded_) recorded_ = checked(PyObject_GetAttr(tensor.ptr(), requires_grad)).ptr() != Py_False;
    return true;
  }
  // None is no tensor.
  bool read_optional(nb::handle tensor, MutableTensorView& view) { return tensor.is_none() || read(tensor, view); }

  // Whether a gradient of one of them is to be recorded.
  bool recorded() const { return recorded_; }

 private:
  const Torch& torch_;
  bool enabled_, recorded_ = false;
};

std::int64_t size(const Layout& t, int from_end) {
  return t.ndim < from_end ? 1 : t.shape[static_cast<std::size_t>(t.ndim - from_end)];
}

// Queries and keys of one type, and all of equal ranks and batches, heads equal or, with `gqa`, grouped. The values'
// type, row counts and head sizes are the library's to check.
bool fit(const MutableTensorView& q, const MutableTensorView& k, const MutableTensorView& v, bool gqa) {
  return k.dtype == q.dtype && q.ndim >= (gqa ? 3 : 2) && k.ndim == q.ndim && v.ndim == q.ndim &&
         size(k, 4) == size(q, 4) && size(v, 4) == size(q, 4) && size(k, 3) == size(v, 3) &&
         (gqa || size(q, 3) == size(k, 3));
}

// Whether a mask or bias broadcasts to the scores of q and k.
bool fits_scores(const MutableTensorView& mask, const MutableTensorView& q, const MutableTensorView& k) {
  if (mask.ndim < 2 || mask.ndim > q.ndim) return false;
  const std::array<std::int64_t, kMaxDims> scores{size(k, 2), size(q, 2), size(q, 3), size(q, 4)};
  for (int i = 1; i <= mask.ndim; ++i)
    if (size(mask, i) != 1 && size(mask, i) != scores[static_cast<std::size_t>(i - 1)]) return false;
  return true;
}

// A number of Python's own; None is `otherwise`.
bool read_number(nb::handle object, std::optional<float> otherwise, std::optional<float>& number) {
  number = otherwise;
  if (object.is_none()) return true;
  if (!PyFloat_CheckExact(object.ptr()) && !PyLong_CheckExact(object.ptr())) return false;
  const double value = PyFloat_AsDouble(object.ptr());
  if (PyErr_Occurred()) {  // an integer past a double
    PyErr_Clear();
    return false;
  }
  if (!(std::abs(value) <= std::numeric_limits<float>::max())) return false;
  number = static_cast<float>(value);
  return true;
}

bool is_zero(nb::handle number) {
  return (PyFloat_CheckExact(number.ptr()) && PyFloat_AsDouble(number.ptr()) == 0) ||
         (PyLong_CheckExact(number.ptr()) && PyObject_IsTrue(number.ptr()) == 0);
}

bool read_bool(nb::handle object, bool& value) {
  value = object.is(Py_True);
  return value || object.is(Py_False);
}

// Asked first: a mode would see any other question.
bool nothing_intercepts() {
  return once([] { return State(); }).is_plain();
}

// Whether rapt's kernels are those to choose.
bool is_preferred(nb::handle query, const MutableTensorView& q, const MutableTensorView& v) {
  if (q.device.type == DeviceType::cpu) return true;
  const nb::handle takes = once([] { return held(nb::module_::import_("rapt._refusals").attr("cuda_takes")); });
  return takes(query.attr("dtype"), size(q, 1), size(v, 1)).is(Py_True);
}

// Laid out as rapt._sdpa.result_like() does it: like the query where PyTorch's fused kernel would run.
nb::object sdpa_result(nb::handle query, const SdpaViews& t, bool gqa) {
  const std::int64_t rows = size(t.q, 2), dv = size(t.v, 1);
  if (t.q.ndim == 2) return new_empty(query, std::array{rows, dv});
  if (t.q.ndim == 3) return new_empty(query, std::array{size(t.q, 3), rows, dv});
  const bool fused = size(t.q, 1) == dv && t.attn_mask.ndim != 3 && (gqa || size(t.q, 3) == size(t.k, 3)) &&
                     t.q.strides[3] == 1 && t.k.strides[3] == 1 && t.v.strides[3] == 1;
  if (!fused) return new_empty(query, std::array{size(t.q, 4), size(t.q, 3), rows, dv});
  return new_like(query);
}

// Whether it ran. What the library refuses, the caller's own path refuses or gives to PyTorch.
template <class Args>
bool runs(const Args& args) {
  try {
    run_as_torch(args);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

nb::object eager_sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, nb::handle dropout_p,
                      nb::handle is_causal, nb::handle scale, nb::handle enable_gqa) {
  const Torch* torch = loaded_torch();
  SdpaViews t;
  bool causal = false, gqa = false;
  std::optional<float> factor;
  if (torch == nullptr || !nothing_intercepts() || !is_zero(dropout_p) || !read_bool(is_causal, causal) ||
      !read_bool(enable_gqa, gqa) || !read_number(scale, {}, factor))
    return refusal();
  Tensors tensors(*torch);
  if (!tensors.read(query, t.q) || !tensors.read(key, t.k) || !tensors.read(value, t.v) ||
      !tensors.read_optional(attn_mask, t.attn_mask) || !fit(t.q, t.k, t.v, gqa))
    return refusal();
  if (t.attn_mask) {
    const DType type = t.attn_mask.dtype;
    if (!fits_scores(t.attn_mask, t.q, t.k) || (type != DType::boolean && type != DType::f32 && type != t.q.dtype))
      return refusal();
  }
  if (!is_preferred(query, t.q, t.v) || (tensors.recorded() && t.q.device.type != DeviceType::cpu)) return refusal();
  nb::object out = sdpa_result(query, t, gqa), lse;
  t.out = new_view(*torch, out);
  if (tensors.recorded()) {
    lse = new_empty(query, std::span(t.q.shape).first(static_cast<std::size_t>(t.q.ndim - 1)), true);
    t.lse = new_view(*torch, lse);
  }
  if (!runs(sdpa_args(t, factor, causal))) return refusal();
  if (!tensors.recorded()) return out;
  const nb::handle recorded = once([] { return held(nb::module_::import_("rapt._sdpa_autograd").attr("recorded")); });
  return recorded(nb::make_tuple(out, lse), query, key, value, attn_mask, is_causal, scale, enable_gqa);
}

nb::object eager_sdpa_gradients(nb::handle grad_out, nb::handle grad_lse, nb::handle query, nb::handle key,
                                nb::handle value, nb::handle attn_mask, nb::handle out, nb::handle lse, nb::handle seed,
                                bool is_causal, nb::handle scale, bool /*enable_gqa*/, nb::handle dropout_p,
                                const nb::list& wanted) {
  const Torch* torch = loaded_torch();
  SdpaViews t;
  AttentionBackwardArgs args;
  MutableTensorView dout, dlse;
  std::optional<float> factor;
  if (torch == nullptr || !read_number(scale, {}, factor)) return refusal();
  Tensors tensors(*torch);
  if (!tensors.read(grad_out, dout) || !tensors.read_optional(grad_lse, dlse) || !tensors.read(query, t.q) ||
      !tensors.read(key, t.k) || !tensors.read(value, t.v) || !tensors.read_optional(attn_mask, t.attn_mask) ||
      !tensors.read(out, t.out) || !tensors.read(lse, t.lse) || tensors.recorded())
    return refusal();
  // What broadcasts is summed by the library but for heads of queries, and batches; a mask's keys it would not take.
  if (t.q.ndim != 4 || !fit(t.q, t.k, t.v, true) || size(t.out, 3) != size(t.q, 3) || wanted.size() != 4 ||
      t.q.device.type != DeviceType::cpu || (t.attn_mask && size(t.attn_mask, 1) != size(t.k, 2)))
    return refusal();
  const AttentionArgs forward = sdpa_args(t, factor, is_causal);
  args.q = forward.q, args.kv = forward.kv, args.score = forward.score;
  if (args.score.bias) args.score.bias = t.attn_mask;  // whose shape its gradient has
  args.score.dropout = dropout_of(dropout_p, seed, nb::int_(0));
  args.out = forward.out, args.lse = forward.lse, args.dout = dout, args.dlse = dlse;
  const nb::object made = checked(PyTuple_New(4));
  int i = 0;
  for (const auto& [tensor, gradient] :
       {std::pair{query, &args.dq}, {key, &args.dk}, {value, &args.dv}, {attn_mask, &args.dbias}}) {
    nb::object memory = nb::none();
    if (wanted[static_cast<std::size_t>(i)].is(Py_True) && !tensor.is_none()) {
      memory = new_like(tensor);
      *gradient = new_view(*torch, memory);
    }
    PyTuple_SetItem(made.ptr(), i++, memory.release().ptr());
  }
  return runs(args) ? made : refusal();
}

nb::object eager_attention(nb::handle query, nb::handle key, nb::handle value, nb::handle attention_mask,
                           nb::handle position_bias, nb::handle sinks, bool causal, nb::handle sliding_window,
                           nb::handle softcap, nb::handle scaling, nb::handle dropout) {
  const Torch* torch = loaded_torch();
  if (torch == nullptr || !nothing_intercepts() || !is_zero(dropout)) return refusal();
  Tensors tensors(*torch);
  MutableTensorView q, k, v, mask, bias, sink;
  if (!tensors.read(query, q) || !tensors.read(key, k) || !tensors.read(value, v) || q.ndim != 4 || !fit(q, k, v, true))
    return refusal();
  const std::int64_t rows = size(q, 2), keys = size(k, 2);
  std::int64_t window = 0;
  AttentionArgs args;
  ScoreSpec& score = args.score;
  if (!read_number(scaling, static_cast<float>(std::pow(static_cast<double>(size(q, 1)), -0.5)), score.scale) ||
      !read_number(softcap, {}, score.softcap) || !tensors.read_optional(attention_mask, mask) ||
      !tensors.read_optional(position_bias, bias) || !tensors.read_optional(sinks, sink) || tensors.recorded())
    return refusal();
  if (!sliding_window.is_none() && (!PyLong_CheckExact(sliding_window.ptr()) || !nb::try_cast(sliding_window, window)))
    return refusal();
  if (mask && mask.dtype != DType::boolean) {
    if (bias) return refusal();  // two that would have to be added
    std::swap(mask, bias);
  }
  if ((mask && !fits_scores(mask, q, k)) || (bias && !fits_scores(bias, q, k))) return refusal();
  if (!is_preferred(query, q, v)) return refusal();

  nb::object out = new_empty(query, std::array{size(q, 4), rows, size(q, 3), size(v, 1)});
  args.q = q;
  args.kv = KvSource::strided(k, v);
  args.out = new_view(*torch, out);
  std::swap(args.out.shape[1], args.out.shape[2]);
  std::swap(args.out.strides[1], args.out.strides[2]);
  score.causal = causal && rows > 1;  // one row at the end sees all
  if (causal && !sliding_window.is_none() && window >= 1 && window < keys) score.window = Window{window - 1, -1};
  score.align = Align::bottom_right();
  score.mask = mask, score.bias = bias, score.sinks = sink;
  return runs(args) ? out : refusal();
}

}  // namespace rapt::python
