// delta_rule_backward: arguments -> Call, or an Error that names the argument; and its problem's text.
#include <algorithm>
#include <string>
#include <string_view>

#include "core/text.hpp"
#include "operations/delta_rule_backward/operation.hpp"
#include "rapt/delta_rule_backward.hpp"

namespace rapt {
namespace {

using P = DeltaRuleBackwardProblem;

// bind_delta_rule() finds the forward's sizes by their numbers in the forward's table.
static_assert(std::ranges::equal(kArgumentsOf<DeltaRuleArgs>.dimensions,
                                 kArgumentsOf<DeltaRuleBackwardArgs>.dimensions));

HeadGradient head_gradient(const MutableTensorView& t) {
  if (!t) return {};
  return {t.data, t.dtype, t.strides[0], t.ndim > 1 ? t.strides[1] : 0};
}

}  // namespace

std::string DeltaRuleBackwardProblem::to_string() const {
  return print_fields("delta_rule_backward", *this, delta_rule_fields());
}

DeltaRuleBackwardProblem DeltaRuleBackwardProblem::parse(std::string_view text) {
  const Words words(text, "delta_rule_backward");
  P p;
  words.read(p, delta_rule_fields());
  complete(words, p);
  return p;
}

void check(const DeltaRuleBackwardProblem& p) {
  check(static_cast<const DeltaRuleProblem&>(p));
  if (p.slots) throw Error("slots", "a pool", "none: states in pools have no gradients");
}

void OperationOf<DeltaRuleBackwardArgs>::refuse_states(const void* args, Bound&) {
  const DeltaRuleArgs& forward = static_cast<const Args*>(args)->forward;
  if (forward.state_slots) throw Error("state_slots", "a tensor", "none: states in pools have no gradients");
  if (forward.initial_state && forward.final_state && forward.initial_state.data != nullptr &&
      forward.initial_state.data == forward.final_state.data)
    throw Error("initial_state", "the state that the forward updated in place", "a copy of it from before");
}

Call OperationOf<DeltaRuleBackwardArgs>::bind(const Args& args, Bound& bound) {
  P p;
  DeltaRuleBackwardParams f{};
  static_cast<DeltaRuleProblem&>(p) = bind_delta_rule(args.forward, args.dout, args.dfinal_state, bound, f);
  const bool is_ragged = p.ragged >= 0;
  f.grad_q = token_rows(args.dq, is_ragged);
  f.grad_k = token_rows(args.dk, is_ragged);
  f.grad_v = token_rows(args.dv, is_ragged);
  f.grad_beta = token_rows(args.dbeta, is_ragged);
  if (p.decay == Decay::constant) f.grad_constant_g = head_gradient(args.dg);
  else f.grad_g = token_rows(args.dg, is_ragged);
  f.grad_initial = state_rows(args.dinitial_state);
  f.grad_a_log = head_gradient(args.da_log);
  f.grad_dt_bias = head_gradient(args.ddt_bias);
  return {p, f, {}, bound.writes_nothing(), nullptr};
}

Needs needs_of(const DeltaRuleBackwardProblem& p) {
  return {set_of(p.dtype), p.d, p.dv};
}

}  // namespace rapt
