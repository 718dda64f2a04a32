#include "eager.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
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

// Whether tensors may have tangents, for gradients of forward mode.
bool is_forward_mode() {
  const auto variable = [] { return ModuleVariable("torch.autograd.forward_ad", "_current_level"); };
  const nb::handle level = once(variable).get();
  return !level.is_valid() || PyLong_AsLong(level.ptr()) >= 0;
}

// What of PyTorch's state says that a call is part of something bigger.
struct State {
  std::array<std::pair<nb::handle, PyObject*>, 6>
      wanted;  // functions, and the object that each returns for a plain call
  ModuleVariable is_compiling{"torch.compiler", "_is_compiling_flag"};
  ModuleVariable is_profiled{"torch.autograd.profiler", "_is_profiler_enabled"};

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
    return is_compiling.get().is(Py_False) && is_profiled.get().is(Py_False) && !is_forward_mode();
  }
};

bool requires_grad(nb::handle tensor) {
  static PyObject* const name = interned("requires_grad");
  return checked(PyObject_GetAttr(tensor.ptr(), name)).ptr() != Py_False;
}

// Who calls. PyTorch's dispatcher has recorded gradients before it comes to a kernel, and has made memory of what is
// negated when it is read.
enum class Caller { python, dispatcher };

// Plain tensors with memory of their own.
class Tensors {
 public:
  Tensors(const Torch& torch, Caller caller)
      : torch_(torch), caller_(caller), enabled_(caller == Caller::python && is_grad_enabled()) {}

  bool read(nb::handle tensor, MutableTensorView& view) {
    const std::optional<MutableTensorView> found = view_by_table(torch_, tensor, caller_ == Caller::dispatcher);
    if (!found) return false;
    view = *found;
    if (enabled_ && !recorded_) recorded_ = requires_grad(tensor);
    return true;
  }
  // None is no tensor.
  bool read_optional(nb::handle tensor, MutableTensorView& view) { return tensor.is_none() || read(tensor, view); }

  // Whether a gradient of one of them is to be recorded.
  bool recorded() const { return recorded_; }

 private:
  const Torch& torch_;
  Caller caller_;
  bool enabled_, recorded_ = false;
};

std::int64_t size(const Layout& t, int from_end) {
  return t.ndim < from_end ? 1 : t.shape[static_cast<std::size_t>(t.ndim - from_end)];
}

// Queries and keys of one type, and all of equal ranks and batches, heads equal or, with `gqa`, grouped. The values'
// type, row counts and head dimensions are the library's to check.
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

// What Python says of calls on a GPU, by their types, head dimensions and heads. What it has answered once stays.
class GpuAnswers {
 public:
  template <class Ask>
  bool get(const MutableTensorView& q, const MutableTensorView& v, const MutableTensorView& mask, const Ask& ask) {
    const Call call{q.dtype, static_cast<bool>(mask), mask.dtype, size(q, 1), size(v, 1), size(q, 3), size(v, 3)};
    {
      const std::lock_guard lock(mutex_);
      if (const auto known = answers_.find(call); known != answers_.end()) return known->second;
    }
    const bool answer = nb::object(ask()).is(Py_True);
    const std::lock_guard lock(mutex_);
    answers_.emplace(call, answer);
    return answer;
  }

 private:
  using Call = std::tuple<DType, bool, DType, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
  std::mutex mutex_;
  std::map<Call, bool> answers_;
};

// Whether rapt's kernels are those to choose.
bool is_preferred(nb::handle query, const MutableTensorView& q, const MutableTensorView& v) {
  if (q.device.type == DeviceType::cpu) return true;
  static GpuAnswers answers;
  return answers.get(q, v, {}, [&] {
    const nb::handle takes = once([] { return held(nb::module_::import_("rapt._refusals").attr("cuda_takes")); });
    return takes(query.attr("dtype"), size(q, 1), size(v, 1));
  });
}

// Whether rapt computes gradients of such a call of scaled_dot_product_attention.
bool is_differentiated(nb::handle query, nb::handle value, nb::handle attn_mask, const SdpaViews& t) {
  if (t.q.device.type == DeviceType::cpu) return true;
  static GpuAnswers answers;
  return answers.get(t.q, t.v, t.attn_mask, [&] {
    const nb::handle differentiates =
        once([] { return held(nb::module_::import_("rapt._refusals").attr("differentiates")); });
    return differentiates(query, value, attn_mask);
  });
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

// A call of scaled_dot_product_attention.
class SdpaCall {
 public:
  SdpaCall(const Torch& torch, Caller caller) : torch_(torch), tensors_(torch, caller) {}

  // Whether the extension takes such arguments.
  bool read(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, nb::handle is_causal,
            nb::handle scale, nb::handle enable_gqa) {
    if (!read_bool(is_causal, causal_) || !read_bool(enable_gqa, gqa_) || !read_number(scale, {}, factor_) ||
        !tensors_.read(query, views_.q) || !tensors_.read(key, views_.k) || !tensors_.read(value, views_.v) ||
        !tensors_.read_optional(attn_mask, views_.attn_mask) || !fit(views_.q, views_.k, views_.v, gqa_))
      return false;
    const MutableTensorView& mask = views_.attn_mask;
    return !mask || (fits_scores(mask, views_.q, views_.k) &&
                     (mask.dtype == DType::boolean || mask.dtype == DType::f32 || mask.dtype == views_.q.dtype));
  }

  const SdpaViews& views() const { return views_; }
  bool recorded() const { return tensors_.recorded(); }

  // Whether it ran: (out, lse), or `out` and nothing.
  bool run(nb::handle query, bool with_lse, nb::object& out, nb::object& lse) {
    out = sdpa_result(query, views_, gqa_);
    views_.out = new_view(torch_, out);
    if (with_lse) {
      const auto rank = static_cast<std::size_t>(views_.q.ndim);
      lse = new_empty(query, std::span(views_.q.shape).first(rank - 1), torch_.float32);
      views_.lse = new_view(torch_, lse);
    }
    return runs(sdpa_args(views_, factor_, causal_));
  }

 private:
  const Torch& torch_;
  Tensors tensors_;
  SdpaViews views_;
  bool causal_ = false, gqa_ = false;
  std::optional<float> factor_;
};

// Gradients of query, key, value and attn_mask, null for what is not wanted. Whether they were computed.
using Gradients = std::array<nb::object, 4>;
bool sdpa_gradients(Caller caller, nb::handle grad_out, nb::handle grad_lse, nb::handle query, nb::handle key,
                    nb::handle value, nb::handle attn_mask, nb::handle out, nb::handle lse, nb::handle seed,
                    bool is_causal, nb::handle scale, nb::handle dropout_p, const nb::list& wanted, Gradients& made) {
  const Torch* torch = loaded_torch();
  SdpaViews t;
  AttentionBackwardArgs args;
  MutableTensorView dout, dlse;
  std::optional<float> factor;
  if (torch == nullptr || !read_number(scale, {}, factor)) return false;
  Tensors tensors(*torch, caller);
  if (!tensors.read(grad_out, dout) || !tensors.read_optional(grad_lse, dlse) || !tensors.read(query, t.q) ||
      !tensors.read(key, t.k) || !tensors.read(value, t.v) || !tensors.read_optional(attn_mask, t.attn_mask) ||
      !tensors.read(out, t.out) || !tensors.read(lse, t.lse) || tensors.recorded())
    return false;
  // What broadcasts is summed by the library but for heads of queries, and batches.
  if (t.q.ndim != 4 || !fit(t.q, t.k, t.v, true) || size(t.out, 3) != size(t.q, 3) || wanted.size() != made.size())
    return false;
  const AttentionArgs forward = sdpa_args(t, factor, is_causal);
  args.q = forward.q, args.kv = forward.kv, args.score = forward.score;
  if (args.score.bias) args.score.bias = t.attn_mask;  // whose shape its gradient has
  args.score.dropout = dropout_of(dropout_p, seed, nb::int_(0));
  args.out = forward.out, args.lse = forward.lse, args.dout = dout, args.dlse = dlse;
  std::size_t i = 0;
  for (const auto& [tensor, gradient] :
       {std::pair{query, &args.dq}, {key, &args.dk}, {value, &args.dv}, {attn_mask, &args.dbias}}) {
    nb::object& memory = made[i];
    if (wanted[i++].is(Py_True) && !tensor.is_none()) {
      memory = new_like(tensor);
      *gradient = new_view(*torch, memory);
    }
  }
  return runs(args);
}

// Whether the dispatcher has these keys on its way, and no others, such as those of modes, transforms and traces.
bool is_plain(nb::handle keyset, std::uint64_t plain) {
  static PyObject* const raw_repr = interned("raw_repr");
  return PyLong_AsUnsignedLongLong(call_method(keyset, raw_repr).ptr()) == plain;
}

// Whether a gradient of one of them is to be recorded.
bool is_recorded(const nb::args& given) {
  const Torch& torch = *loaded_torch();
  if (!is_grad_enabled()) return false;
  return std::any_of(given.begin(), given.end(), [&](nb::handle object) {
    return PyObject_IsInstance(object.ptr(), torch.tensor.ptr()) == 1 && requires_grad(object);
  });
}

// A function of this module, of all that is given but for the first `skipped`. It is looked up at every call, as in
// Python: somebody may have replaced it.
nb::object call_function(const nb::str& name, const nb::args& given, std::size_t skipped) {
  constexpr std::size_t kMaxInputs = 16;
  std::array<PyObject*, kMaxInputs> inputs;
  const std::size_t count = given.size() - skipped;
  if (given.size() < skipped || count > kMaxInputs) return refusal();
  for (std::size_t i = 0; i < count; ++i)
    inputs[i] = PyTuple_GetItem(given.ptr(), static_cast<Py_ssize_t>(i + skipped));
  const nb::handle module = once([] { return held(nb::module_::import_("rapt._core")); });
  const nb::object function = checked(PyObject_GetAttr(module.ptr(), name.ptr()));
  return checked(PyObject_Vectorcall(function.ptr(), inputs.data(), count, nullptr));
}

}  // namespace

nb::object eager_sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, nb::handle dropout_p,
                      nb::handle is_causal, nb::handle scale, nb::handle enable_gqa) {
  const Torch* torch = loaded_torch();
  if (torch == nullptr || !nothing_intercepts() || !is_zero(dropout_p)) return refusal();
  SdpaCall call(*torch, Caller::python);
  if (!call.read(query, key, value, attn_mask, is_causal, scale, enable_gqa)) return refusal();
  const SdpaViews& t = call.views();
  if (!is_preferred(query, t.q, t.v)) return refusal();
  if (call.recorded() && !is_differentiated(query, value, attn_mask, t)) return refusal();
  nb::object out, lse;
  if (!call.run(query, call.recorded(), out, lse)) return refusal();
  if (!call.recorded()) return out;
  const nb::handle recorded = once([] { return held(nb::module_::import_("rapt._sdpa_autograd").attr("recorded")); });
  return recorded(nb::make_tuple(out, lse), query, key, value, attn_mask, is_causal, scale, enable_gqa);
}

nb::object eager_sdpa_gradients(nb::handle grad_out, nb::handle grad_lse, nb::handle query, nb::handle key,
                                nb::handle value, nb::handle attn_mask, nb::handle out, nb::handle lse, nb::handle seed,
                                bool is_causal, nb::handle scale, bool /*enable_gqa*/, nb::handle dropout_p,
                                const nb::list& wanted) {
  Gradients made;
  if (!sdpa_gradients(Caller::python, grad_out, grad_lse, query, key, value, attn_mask, out, lse, seed, is_causal,
                      scale, dropout_p, wanted, made))
    return refusal();
  const auto given = [](nb::object& gradient) { return gradient.is_valid() ? std::move(gradient) : nb::none(); };
  return nb::make_tuple(given(made[0]), given(made[1]), given(made[2]), given(made[3]));
}

nb::object eager_attention(nb::handle query, nb::handle key, nb::handle value, nb::handle attention_mask,
                           nb::handle position_bias, nb::handle sinks, bool causal, nb::handle sliding_window,
                           nb::handle softcap, nb::handle scaling, nb::handle dropout) {
  const Torch* torch = loaded_torch();
  if (torch == nullptr || !nothing_intercepts() || !is_zero(dropout)) return refusal();
  Tensors tensors(*torch, Caller::python);
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

nb::object dispatched_sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask,
                           nb::handle is_causal, nb::handle scale, nb::handle enable_gqa, nb::handle dropout_p,
                           nb::handle /*seed*/, bool with_lse) {
  const Torch* torch = loaded_torch();
  if (torch == nullptr || !is_zero(dropout_p)) return refusal();
  SdpaCall call(*torch, Caller::dispatcher);
  nb::object out, lse;
  if (!call.read(query, key, value, attn_mask, is_causal, scale, enable_gqa) || !call.run(query, with_lse, out, lse))
    return refusal();
  return with_lse ? nb::object(nb::make_tuple(out, lse)) : out;
}

nb::object dispatched_sdpa_gradients(nb::handle grad_out, nb::handle grad_lse, nb::handle query, nb::handle key,
                                     nb::handle value, nb::handle attn_mask, nb::handle out, nb::handle lse,
                                     nb::handle seed, bool is_causal, nb::handle scale, bool /*enable_gqa*/,
                                     nb::handle dropout_p, const nb::list& wanted) {
  Gradients made;
  if (!sdpa_gradients(Caller::dispatcher, grad_out, grad_lse, query, key, value, attn_mask, out, lse, seed, is_causal,
                      scale, dropout_p, wanted, made))
    return refusal();
  nb::list those;
  for (const nb::object& gradient : made)
    if (gradient.is_valid()) those.append(gradient);
  return those;
}

nb::object dispatched(const nb::str& function, const nb::object& otherwise) {
  return nb::cpp_function([function, otherwise](const nb::args& inputs) {
    const nb::object result = call_function(function, inputs, 0);
    return result.is(Py_NotImplemented) ? nb::object(otherwise(*inputs)) : result;
  });
}

nb::object dispatched_above_autograd(const nb::str& function, const nb::object& otherwise, std::uint64_t plain) {
  return nb::cpp_function([function, otherwise, plain](const nb::args& given) {
    const bool takes = is_plain(given[0], plain) && !is_forward_mode() && !is_recorded(given);
    const nb::object result = takes ? call_function(function, given, 1) : refusal();
    return result.is(Py_NotImplemented) ? nb::object(otherwise(*given)) : result;
  });
}

}  // namespace rapt::python
