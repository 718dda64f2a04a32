#include "operations/delta_rule_backward/case.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "operations/attention/case.hpp"

namespace rapt::testing {

DeltaRuleBackwardCase::DeltaRuleBackwardCase(const DeltaRuleBackwardProblem& given, std::uint64_t seed,
                                             Placement placement, Spacing spacing, std::optional<Decays> decays)
    : problem(given), inputs(given, seed, placement, spacing, decays) {
  std::mt19937_64 random(seed * 64 + 33);
  const auto like = [&](const Tensor& of, std::optional<DType> type) {
    if (!of) return Tensor();
    const Layout& layout = of.layout();
    const Dims shape(layout.shape.begin(), layout.shape.begin() + layout.ndim);
    Dims order(shape.size());
    std::iota(order.begin(), order.end(), 0);
    if (spacing == Spacing::gaps) std::shuffle(order.begin(), order.end(), random);
    else if (order.size() > 2 && random() % 2) std::swap(order[order.size() - 3], order[order.size() - 2]);
    if (!type) type = spacing == Spacing::gaps && random() % 2 ? kFloatTypes[random() % 3] : of.dtype();
    return Tensor(*type, spacing == Spacing::gaps ? layout_of(shape, order, 3, 1) : layout_of(shape, order), placement);
  };
  dout = like(inputs.out, problem.out_dtype), fill_normal(dout, std::mt19937_64(seed * 64 + 20));
  dfinal_state = like(inputs.final, inputs.final.dtype());
  fill_normal(dfinal_state, std::mt19937_64(seed * 64 + 21));
  dq = like(inputs.q, {}), dk = like(inputs.k, {}), dv = like(inputs.v, {});
  dg = like(inputs.g, {}), dbeta = like(inputs.beta, {});
  dinitial_state = like(inputs.initial, inputs.initial.dtype());
  da_log = like(inputs.a_log, DType::f32), ddt_bias = like(inputs.dt_bias, DType::f32);
}

DeltaRuleBackwardArgs DeltaRuleBackwardCase::args() {
  DeltaRuleBackwardArgs args;
  args.forward = inputs.args();
  args.forward.initial_state = inputs.initial.view();
  args.dout = dout.view(), args.dfinal_state = dfinal_state.view();
  args.dq = dq.mutable_view(), args.dk = dk.mutable_view(), args.dv = dv.mutable_view();
  args.dg = dg.mutable_view(), args.dbeta = dbeta.mutable_view();
  args.dinitial_state = dinitial_state.mutable_view();
  args.da_log = da_log.mutable_view(), args.ddt_bias = ddt_bias.mutable_view();
  return args;
}

void DeltaRuleBackwardCase::protect_inputs() {
  inputs.protect_inputs();
  for (Tensor* tensor : {&inputs.out, &inputs.final, &dout, &dfinal_state}) tensor->buffer().protect();
}

std::vector<Tensor*> DeltaRuleBackwardCase::outputs() {
  std::vector<Tensor*> wanted = gradients();
  std::erase_if(wanted, [](const Tensor* tensor) { return !*tensor; });
  return wanted;
}

void DeltaRuleBackwardCase::clear() {
  for (Tensor* tensor : outputs()) tensor->poison();
}

Verdict DeltaRuleBackwardCase::verdict(const DeltaRuleBackwardReference& r) {
  const DeltaRuleGradient* const references[] = {&r.dq,     &r.dk,      &r.dv, &r.dg, &r.dbeta, &r.dinitial_state,
                                                 &r.da_log, &r.ddt_bias};
  const char* const names[] = {"dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "da_log", "ddt_bias"};
  Verdict worst;
  worst.errors.frobenius_limit = worst.errors.max_abs_limit = HUGE_VAL;
  for (std::size_t i = 0; i < std::size(names); ++i) {
    const Tensor& gradient = *gradients()[i];
    if (!gradient) continue;
    Tally tally;
    for (std::size_t at = 0; at < references[i]->value.size(); ++at) {
      if (!references[i]->computed[at]) continue;
      const float got = gradient.flat(static_cast<std::int64_t>(at));
      const double want = references[i]->value[at],
                   bound = delta_rule_bound(want, references[i]->sigma[at], 0, gradient.dtype());
      const bool may_overflow = gradient.dtype() == DType::f16 && std::abs(want) + bound >= 65520;
      if (!may_overflow || static_cast<double>(got) != std::copysign(HUGE_VAL, want)) tally.add(got, want, bound);
    }
    if (!gradient.gaps_intact()) tally.violate("memory between its elements was written");
    const Verdict verdict = tally.verdict();
    worst.errors.rel_frobenius = std::max(worst.errors.rel_frobenius, verdict.errors.rel_frobenius);
    worst.errors.max_abs = std::max(worst.errors.max_abs, verdict.errors.max_abs);
    worst.errors.max_bound = std::max(worst.errors.max_bound, verdict.errors.max_bound);
    worst.errors.nonfinite_agree = worst.errors.nonfinite_agree && verdict.errors.nonfinite_agree;
    if (worst.violation.empty() && !verdict.violation.empty())
      worst.violation = std::string(names[i]) + ": " + verdict.violation;
  }
  return worst;
}

std::vector<DType> CaseOf<DeltaRuleBackwardProblem>::types(const DeltaRuleBackwardProblem& p) {
  return {p.dtype, p.out_dtype};
}
double CaseOf<DeltaRuleBackwardProblem>::tensor_bytes(const DeltaRuleBackwardProblem& p) {
  // With every input a gradient of its size, and one of out, which is counted already.
  const double outs = (p.ragged >= 0 ? real(p.ragged) : real(p.b) * real(p.t)) *
                      std::max(real(p.hq), real(p.state_heads())) * real(p.dv) * bytes_of(p.out_dtype);
  return 2 * CaseOf<DeltaRuleProblem>::tensor_bytes(p) - outs;
}
CaseOf<DeltaRuleBackwardProblem>::Sizes CaseOf<DeltaRuleBackwardProblem>::sizes(const DeltaRuleBackwardProblem& p) {
  return CaseOf<DeltaRuleProblem>::sizes(p);
}
Verdict CaseOf<DeltaRuleBackwardProblem>::verify(DeltaRuleBackwardCase& inputs, const Context& context,
                                                 std::int64_t rows) {
  inputs.clear();
  inputs.run(context);
  const DeltaRuleBackwardProblem& p = inputs.problem;
  return inputs.verdict(rows == 0 ? 1 : std::max<std::int64_t>(p.b * p.state_heads(), 1));
}

}  // namespace rapt::testing
