#include "delta_rule.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "call.hpp"
#include "error.hpp"
#include "rapt/delta_rule.hpp"
#include "scalar.hpp"

namespace rapt::python {
namespace {

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

}  // namespace

void delta_rule(const DeltaRuleArguments& a) {
  Arrays arrays;
  const auto floats = [&](const char* name, nb::handle array) {
    return arrays.take(name, array, {.elements = Elements::floats});
  };
  const auto f32 = [&](const char* name, nb::handle array, bool writable) {
    return arrays.take(name, array, {.writable = writable, .elements = Elements::f32});
  };
  const auto integers = [&](const char* name, nb::handle array) {
    return arrays.take(name, array, {.elements = Elements::integers});
  };
  DeltaRuleArgs args;
  args.q = arrays.take("q", a.q, {.elements = Elements::floats, .shaped = true});
  args.k = arrays.take("k", a.k, {.elements = Elements::floats, .shaped = true});
  args.v = arrays.take("v", a.v, {.elements = Elements::floats, .shaped = true});
  args.g = floats("g", a.g), args.beta = floats("beta", a.beta);
  args.out = arrays.take("out", a.out, {.writable = true, .elements = Elements::floats});
  args.initial_state = f32("initial_state", a.initial_state, false);
  args.final_state = f32("final_state", a.final_state, true);
  args.cu_seqlens = integers("cu_seqlens", a.cu_seqlens);
  args.state_slots = integers("state_slots", a.state_slots), args.accepted = integers("accepted", a.accepted);
  args.a_log = f32("a_log", a.a_log, false), args.dt_bias = f32("dt_bias", a.dt_bias, false);
  args.rule = rule_of(a.rule);
  args.scale = real("scale", a.scale);
  args.l2norm_qk = truth("l2norm_qk", a.l2norm_qk);
  args.beta_sigmoid = truth("beta_sigmoid", a.beta_sigmoid);
  args.beta_double = truth("beta_double", a.beta_double);
  args.gate = truth("gate", a.gate);
  args.gate_lower_bound = real("gate_lower_bound", a.gate_lower_bound);
  if (args.cu_seqlens && args.q.ndim == 4) {
    drop_batch("q", args.q), drop_batch("k", args.k), drop_batch("v", args.v);
    drop_batch("g", args.g), drop_batch("beta", args.beta), drop_batch("out", args.out);
  }
  if (truth("state_v_first", a.state_v_first)) {
    const auto last = [](const TensorView& t) { return t.shape[static_cast<std::size_t>(t.ndim - 1)]; };
    swap_sizes("initial_state", args.initial_state, last(args.q), last(args.v));
    swap_sizes("final_state", args.final_state, last(args.q), last(args.v));
  }
  const Context context = context_of(arrays, a.threads, a.isa, args.q.device);
  {
    const nb::gil_scoped_release unlocked;
    rapt::delta_rule(args, context);
  }
  arrays.mark_written();
}

}  // namespace rapt::python
