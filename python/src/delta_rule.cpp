// The delta rule and its gradients as Python gives them.
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "bind.hpp"
#include "call.hpp"
#include "error.hpp"
#include "rapt/delta_rule_backward.hpp"
#include "scalar.hpp"

namespace rapt::python {
namespace {

// What rapt.delta_rule and its gradients are given alike, in the order of _delta_rule.py's _INPUTS.
struct DeltaRuleInputs {
  nb::handle q, k, v, g, beta, rule, scale, initial_state, cu_seqlens, l2norm_qk, beta_sigmoid, beta_double, gate,
      a_log, dt_bias, gate_lower_bound, state_v_first, threads, isa;
};

// What rapt.delta_rule writes; final_state may be None. And where states in pools lie.
struct DeltaRuleResults {
  nb::handle out, final_state, state_slots, accepted;
};

// The gradients of the results, and the arrays to write those of the inputs to; any may be None.
struct DeltaRuleGradients {
  nb::handle dout, dfinal_state, dq, dk, dv, dg, dbeta, dinitial_state, da_log, ddt_bias;
};

UpdateRule rule_of(nb::handle object) {
  constexpr std::array<std::string_view, 4> kRules = {"linear", "gated", "delta", "gated_delta"};
  if (PyUnicode_Check(object.ptr())) {
    const auto* const found = std::find(kRules.begin(), kRules.end(), text_of(object));
    if (found != kRules.end()) return static_cast<UpdateRule>(found - kRules.begin());
  }
  refuse_value("rule", shown(object), "\"linear\", \"gated\", \"delta\" or \"gated_delta\"");
}

std::string shape_text(const Layout& t) {
  std::string text = "shape [";
  for (int i = 0; i < t.ndim; ++i) text += (i ? ", " : "") + std::to_string(t.shape[static_cast<std::size_t>(i)]);
  return text + "]";
}

// [1, total, ..] as [total, ..]: how flash-linear-attention has ragged batches.
template <class View>
void drop_batch(const char* name, View& t) {
  if (t.ndim < 2) return;  // none, or decays of whole heads
  if (t.shape[0] != 1) refuse_value(name, shape_text(t) + " with cu_seqlens", "[1, total, ..] or, as all, [total, ..]");
  std::move(t.shape.begin() + 1, t.shape.end(), t.shape.begin());
  std::move(t.strides.begin() + 1, t.strides.end(), t.strides.begin());
  t.shape.back() = t.strides.back() = 0;
  --t.ndim;
}

// States [.., dv, d] as [.., d, dv].
template <class View>
void swap_sizes(const char* name, View& t, std::int64_t d, std::int64_t dv) {
  if (!t) return;
  if (t.ndim != 4 || t.shape[2] != dv || t.shape[3] != d)
    refuse_value(
        name, shape_text(t),
        "[.., h, V, K], V = " + std::to_string(dv) + " and K = " + std::to_string(d) + ", as state_v_first has it");
  std::swap(t.shape[2], t.shape[3]);
  std::swap(t.strides[2], t.strides[3]);
}

// A call's arrays, in the layout of Python until fit() gives them the library's.
class Call {
 public:
  explicit Call(const DeltaRuleInputs& a)
      : threads_(a.threads), isa_(a.isa), state_v_first_(truth("state_v_first", a.state_v_first)) {
    const auto rows = [&](const char* name, nb::handle array) {
      return arrays_.read(name, array, {.elements = Elements::floats, .shaped = true});
    };
    args.q = rows("q", a.q), args.k = rows("k", a.k), args.v = rows("v", a.v);
    args.g = floats("g", a.g), args.beta = floats("beta", a.beta);
    args.initial_state = floats("initial_state", a.initial_state);
    args.cu_seqlens = integers("cu_seqlens", a.cu_seqlens);
    args.a_log = f32("a_log", a.a_log), args.dt_bias = f32("dt_bias", a.dt_bias);
    args.rule = rule_of(a.rule);
    args.scale = real("scale", a.scale);
    args.l2norm_qk = truth("l2norm_qk", a.l2norm_qk);
    args.beta_sigmoid = truth("beta_sigmoid", a.beta_sigmoid);
    args.beta_double = truth("beta_double", a.beta_double);
    args.gate = truth("gate", a.gate);
    args.gate_lower_bound = real("gate_lower_bound", a.gate_lower_bound);
    has_batch_ = args.cu_seqlens && args.q.ndim == 4;
    d_ = last(args.q), dv_ = last(args.v);
    for (const auto& [name, rows_of] :
         {std::pair{"q", &args.q}, {"k", &args.k}, {"v", &args.v}, {"g", &args.g}, {"beta", &args.beta}})
      fit_rows(name, *rows_of);
    fit_state("initial_state", args.initial_state);
  }

  MutableTensorView floats(const char* name, nb::handle array, bool writable = false) {
    return arrays_.read(name, array, {.writable = writable, .elements = Elements::floats});
  }
  MutableTensorView f32(const char* name, nb::handle array, bool writable = false) {
    return arrays_.read(name, array, {.writable = writable, .elements = Elements::f32});
  }
  MutableTensorView integers(const char* name, nb::handle array) {
    return arrays_.read(name, array, {.elements = Elements::integers});
  }
  // Of each token.
  MutableTensorView rows(const char* name, nb::handle array, bool writable) {
    MutableTensorView t = floats(name, array, writable);
    fit_rows(name, t);
    return t;
  }
  MutableTensorView state(const char* name, nb::handle array, bool writable) {
    MutableTensorView t = floats(name, array, writable);
    fit_state(name, t);
    return t;
  }

  template <class Work>
  void run(const Work& work) {
    const Context context = context_of(arrays_, threads_, isa_, args.q.device);
    {
      const nb::gil_scoped_release unlocked;
      work(context);
    }
    arrays_.mark_written();
  }

  DeltaRuleArgs args;

 private:
  static std::int64_t last(const TensorView& t) { return t.shape[static_cast<std::size_t>(t.ndim - 1)]; }
  template <class View>
  void fit_rows(const char* name, View& t) const {
    if (has_batch_) drop_batch(name, t);
  }
  template <class View>
  void fit_state(const char* name, View& t) const {
    if (state_v_first_) swap_sizes(name, t, d_, dv_);
  }

  Arrays arrays_;
  nb::handle threads_, isa_;
  bool state_v_first_, has_batch_ = false;
  std::int64_t d_ = 0, dv_ = 0;
};

// Without the GIL where they work.
void delta_rule(const DeltaRuleInputs& inputs, const DeltaRuleResults& a) {
  Call call(inputs);
  call.args.out = call.rows("out", a.out, true);
  call.args.final_state = call.state("final_state", a.final_state, true);
  call.args.state_slots = call.integers("state_slots", a.state_slots);
  call.args.accepted = call.integers("accepted", a.accepted);
  call.run([&](const Context& context) { rapt::delta_rule(call.args, context); });
}

void delta_rule_backward(const DeltaRuleInputs& inputs, const DeltaRuleGradients& a) {
  Call call(inputs);
  DeltaRuleBackwardArgs args;
  args.forward = call.args;
  args.dout = call.rows("dout", a.dout, false);
  args.dfinal_state = call.state("dfinal_state", a.dfinal_state, false);
  args.dq = call.rows("dq", a.dq, true), args.dk = call.rows("dk", a.dk, true), args.dv = call.rows("dv", a.dv, true);
  args.dg = call.rows("dg", a.dg, true), args.dbeta = call.rows("dbeta", a.dbeta, true);
  args.dinitial_state = call.state("dinitial_state", a.dinitial_state, true);
  args.da_log = call.f32("da_log", a.da_log, true), args.ddt_bias = call.f32("ddt_bias", a.ddt_bias, true);
  call.run([&](const Context& context) { rapt::delta_rule_backward(args, context); });
}

}  // namespace

void bind_delta_rule(nb::module_& m) {
  m.def(
      "delta_rule",
      [](const nb::tuple& inputs, const nb::tuple& results) {
        delta_rule(arguments_of<DeltaRuleInputs>(inputs), arguments_of<DeltaRuleResults>(results));
      },
      nb::sig("def delta_rule(inputs: tuple[Any, ...], results: tuple[Any, ...], /) -> None"),
      "`rapt.delta_rule` into `out` and, if it is not None, `final_state`: what it and its gradients are given alike, "
      "in the order of _delta_rule.py's _INPUTS, and out, final_state, state_slots and accepted.");
}

void bind_delta_rule_backward(nb::module_& m) {
  m.def(
      "delta_rule_backward",
      [](const nb::tuple& inputs, const nb::tuple& gradients) {
        delta_rule_backward(arguments_of<DeltaRuleInputs>(inputs), arguments_of<DeltaRuleGradients>(gradients));
      },
      nb::sig("def delta_rule_backward(inputs: tuple[Any, ...], gradients: tuple[Any, ...], /) -> None"),
      "Gradients of delta_rule(inputs, ..). `gradients` are dout, dfinal_state or None, and the arrays to write, or "
      "None: dq, dk, dv, dg, dbeta, dinitial_state, da_log, ddt_bias.");
}

}  // namespace rapt::python
