// Argument validation of the delta rule and of its gradients under arbitrary arguments; see call.hpp.
#include <algorithm>
#include <vector>

#include "call.hpp"

namespace rapt::testing {
namespace {

using Shape = std::initializer_list<std::int64_t>;

constexpr double kMaxElements = 1 << 12;

/// How many there are of each in a call that is right.
struct Sizes {
  std::int64_t b, t, hq, hk, hv, d, dv;
  bool ragged;
  std::int64_t h() const { return std::max(hk, hv); }
};

Sizes choose_sizes(Choices& c) {
  Sizes s{};
  s.b = c.below(4), s.t = c.below(7);
  const std::int64_t heads = 1 + c.below(2), ratio = 1 + c.below(3), queries = 1 + c.below(3);
  s.hk = c.below(2) ? heads : heads * ratio;
  s.hv = s.hk == heads && c.below(2) ? heads * ratio : heads;
  s.hq = c.below(2) ? s.h() * queries : 1;
  s.d = c.one_in(4) ? c.below(40) : 1 + c.below(8), s.dv = c.below(2) ? s.d : 1 + c.below(9);
  s.ragged = c.one_in(3);
  return s;
}

/// [b, t, heads, width], or ragged [total, heads, width]; without a width if that is 0.
template <class Make>
auto rows(const Sizes& s, std::int64_t total, std::int64_t heads, std::int64_t width, Make make) {
  if (width == 0) return s.ragged ? make(Shape{total, heads}) : make(Shape{s.b, s.t, heads});
  return s.ragged ? make(Shape{total, heads, width}) : make(Shape{s.b, s.t, heads, width});
}

void choose_states(DeltaRuleArgs& a, const Sizes& s, Given& g, Choices& c) {
  std::int64_t states = s.b;
  if (c.one_in(3)) {                        // a pool, with room for one more
    const std::int64_t steps = c.below(3);  // 0: the last alone
    std::vector<std::int64_t> slots(static_cast<std::size_t>(s.b * std::max<std::int64_t>(steps, 1)));
    states = static_cast<std::int64_t>(slots.size()) + 1;
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = c.one_in(8) ? -1 : static_cast<std::int64_t>(i);
    a.state_slots = integers(g, c, slots);
    if (steps > 0) {
      a.state_slots.ndim = 2;
      a.state_slots.shape = {s.b, steps, 0, 0};
      a.state_slots.strides = {steps, 1, 0, 0};
      std::vector<std::int64_t> accepted(static_cast<std::size_t>(s.b));
      for (auto& count : accepted) count = 1 + c.below(static_cast<int>(steps));
      if (c.below(2)) a.accepted = integers(g, c, accepted);
    }
  }
  if (c.below(2)) a.initial_state = floats(g, c, {states, s.h(), s.d, s.dv});
  if (c.below(2)) a.final_state = output(g, {states, s.h(), s.d, s.dv});
  if (a.initial_state && a.final_state && c.below(2)) a.final_state.data = const_cast<void*>(a.initial_state.data);
}

void choose_args(DeltaRuleArgs& a, const Sizes& s, std::int64_t total, Given& g, Choices& c) {
  const auto input = [&](std::int64_t heads, std::int64_t width) {
    const DType dtype = some_type(c);
    return rows(s, total, heads, width, [&](Shape shape) { return floats(g, c, shape, dtype); });
  };
  a.rule = static_cast<UpdateRule>(c.below(c.one_in(16) ? 6 : 4));
  a.q = input(s.hq, s.d), a.k = input(s.hk, s.d), a.v = input(s.hv, s.dv);
  switch (c.below(4)) {
    case 0:
      a.g = floats(g, c, {s.h()}, some_type(c));
      break;
    case 1:
      a.g = input(s.h(), 0);
      break;
    case 2:
      a.g = input(s.h(), s.d);
      break;
    default:;
  }
  if (c.below(2)) a.beta = input(s.h(), 0);
  if (c.one_in(4)) a.scale = some_float(c);
  a.l2norm_qk = c.one_in(3), a.beta_sigmoid = c.one_in(3), a.beta_double = c.one_in(4);
  if ((a.gate = c.one_in(3))) {
    if (c.below(2)) a.a_log = floats(g, c, {s.h()});
    if (c.below(2)) a.dt_bias = c.below(2) ? floats(g, c, {s.h(), s.d}) : floats(g, c, {s.h()});
    if (c.one_in(3)) a.gate_lower_bound = some_float(c);
  }
  const DType out_type = some_type(c);
  a.out = rows(s, total, std::max(s.hq, s.h()), s.dv, [&](Shape shape) { return output(g, shape, out_type); });
}

void choose_gradients(DeltaRuleBackwardArgs& a, const Sizes& s, std::int64_t total, Given& g, Choices& c) {
  const auto gradient = [&](const TensorView& of, MutableTensorView& to, DType dtype) {
    if (!of || c.one_in(3)) return;
    static_cast<Layout&>(to) = of;
    to.dtype = dtype;
    to.data = output(g, {elements_of(of)}, dtype).data;
  };
  const DeltaRuleArgs& f = a.forward;
  const DType dtype = some_type(c);
  if (!c.one_in(4))
    a.dout = rows(s, total, std::max(s.hq, s.h()), s.dv, [&](Shape shape) { return floats(g, c, shape, dtype); });
  if (c.below(2)) a.dfinal_state = floats(g, c, {s.b, s.h(), s.d, s.dv});
  gradient(f.q, a.dq, some_type(c)), gradient(f.k, a.dk, some_type(c)), gradient(f.v, a.dv, some_type(c));
  gradient(f.g, a.dg, some_type(c)), gradient(f.beta, a.dbeta, some_type(c));
  gradient(f.initial_state, a.dinitial_state, DType::f32);
  gradient(f.a_log, a.da_log, DType::f32), gradient(f.dt_bias, a.ddt_bias, DType::f32);
}

bool is_small(const DeltaRuleArgs& a) {
  const Layout tensors[] = {a.q, a.k, a.v, a.initial_state, a.cu_seqlens};
  return std::all_of(std::begin(tensors), std::end(tensors), [](const Layout& t) {
    double elements = 1;
    for (const std::int64_t size : t.shape) elements *= std::max(1.0, static_cast<double>(size));
    return elements <= kMaxElements;
  });
}

void check(Given& g, Choices c) {
  clear(g);
  DeltaRuleBackwardArgs a;
  DeltaRuleArgs& f = a.forward;
  const Sizes s = choose_sizes(c);
  const std::vector<std::int64_t> ends = borders(c, s.b);
  if (s.ragged) f.cu_seqlens = integers(g, c, ends);
  choose_args(f, s, ends.back(), g, c);
  const bool backward = c.one_in(3);
  if (!backward || c.below(2)) choose_states(f, s, g, c);
  if (backward) choose_gradients(a, s, ends.back(), g, c);

  Call call;
  call.indices = {&f.cu_seqlens, &f.state_slots, &f.accepted};
  call.inputs = {&f.q, &f.k, &f.v, &f.g, &f.beta, &f.initial_state, &f.a_log, &f.dt_bias};
  call.is_small = [&] { return is_small(f); };
  if (backward) {
    for (TensorView* t : {&a.dout, &a.dfinal_state}) call.inputs.push_back(t);
    call.outputs = {&a.dq, &a.dk, &a.dv, &a.dg, &a.dbeta, &a.dinitial_state, &a.da_log, &a.ddt_bias};
    call.plan = [&] { Plan(a, fuzz_context()); };
    call.run = [&] { delta_rule_backward(a, fuzz_context()); };
  } else {
    call.outputs = {&f.out};
    call.updates = {&f.final_state};
    call.plan = [&] { Plan(f, fuzz_context()); };
    call.run = [&] { delta_rule(f, fuzz_context()); };
  }
  for (int twists = c.below(4); twists > 0; --twists) twist_any(call, g, c);
  check_call(g, call);
}

}  // namespace
}  // namespace rapt::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static rapt::testing::Given given;
  rapt::testing::check(given, {data, size});
  return 0;
}
