// delta_rule_backward: arguments -> Call, or an Error that names the argument; and its problem's text.
#include "rapt/delta_rule_backward.hpp"

#include <string>
#include <string_view>
#include <vector>

#include "core/float_environment.hpp"
#include "core/text.hpp"
#include "operations/call.hpp"
#include "operations/delta_rule_check.hpp"

namespace rapt {
namespace {

using P = DeltaRuleBackwardProblem;

class Validator {
 public:
  explicit Validator(const DeltaRuleBackwardArgs& args) : args_(args) {}

  Call run(std::span<const std::byte> workspace) {
    DeltaRuleArgs forward = args_.forward;
    if (forward.state_slots) throw Error("state_slots", "a tensor", "none: states in pools have no gradients");
    if (forward.initial_state && forward.final_state && forward.initial_state.data != nullptr &&
        forward.initial_state.data == forward.final_state.data)
      throw Error("initial_state", "the state that the forward updated in place", "a copy of it from before");
    forward.out = {}, forward.final_state = {};
    static_cast<DeltaRuleProblem&>(p_) = check_forward(forward, args_.dout, args_.dfinal_state, f_, all_);
    const bool ragged = p_.ragged >= 0;
    f_.grad_q = token_rows(gradient("dq", args_.dq, forward.q), ragged);
    f_.grad_k = token_rows(gradient("dk", args_.dk, forward.k), ragged);
    f_.grad_v = token_rows(gradient("dv", args_.dv, forward.v), ragged);
    f_.grad_beta = token_rows(gradient("dbeta", args_.dbeta, forward.beta), ragged);
    const MutableTensorView dg = gradient("dg", args_.dg, forward.g);
    if (p_.decay == Decay::constant) f_.grad_constant_g = per_head(dg);
    else f_.grad_g = token_rows(dg, ragged);
    if (const auto& t = gradient("dinitial_state", args_.dinitial_state, forward.initial_state, check_state))
      f_.grad_initial = {t.data, t.dtype, t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
    f_.grad_a_log = per_head(gradient("da_log", args_.da_log, forward.a_log, check_f32));
    f_.grad_dt_bias = per_head(gradient("ddt_bias", args_.ddt_bias, forward.dt_bias, check_f32));
    check(p_);
    check_overlaps(all_);
    check_apart(workspace, all_);
    return {p_, f_, {}, writes_nothing(all_), nullptr};
  }

 private:
  const MutableTensorView& gradient(const std::string& name, const MutableTensorView& t, const TensorView& of,
                                    void (*check_type)(std::string_view, DType) = check_float) {
    static const MutableTensorView none;
    if (!t) return none;  // whatever its pointer is: there are no dimensions
    if (!of) throw Error(name, "a tensor", "none without " + name.substr(1));
    take(all_, name, t, true);
    check_type(name, t.dtype);
    if (!same_shape(t, of)) throw Error(name, "shape " + shape_text(t), name.substr(1) + "'s, " + shape_text(of));
    return t;
  }
  static HeadGradient per_head(const MutableTensorView& t) {
    return {t.data, t.dtype, t.strides[0], t.ndim > 1 ? t.strides[1] : 0};
  }

  const DeltaRuleBackwardArgs& args_;
  P p_{};
  DeltaRuleBackwardParams f_{};
  std::vector<Checked> all_;
};

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

DeltaRuleBackwardProblem DeltaRuleBackwardProblem::of(const DeltaRuleBackwardArgs& args) {
  return std::get<P>(validate(args).problem);
}

void check(const DeltaRuleBackwardProblem& p) {
  check(static_cast<const DeltaRuleProblem&>(p));
  if (p.slots) throw Error("slots", "a pool", "none: states in pools have no gradients");
}

Call validate(const DeltaRuleBackwardArgs& args, std::span<const std::byte> workspace) {
  const FloatEnvironment environment;  // for the default scale
  return Validator(args).run(workspace);
}

}  // namespace rapt
