// The oracle of the delta rule's gradients against central differences of the forward's, and its verdicts against wrong
// results.
#include <cmath>
#include <functional>

#include "operations/attention_backward/central_differences.hpp"
#include "operations/delta_rule_backward/case.hpp"
#include "support/catch.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

constexpr float kStep = 0x1p-9f;

double loss(DeltaRuleBackwardCase& c) {
  const DeltaRuleReference r = oracle_delta_rule(c.args().forward);
  double sum = 0;
  for (std::int64_t i = 0; i < c.dout.size(); ++i)
    sum += static_cast<double>(c.dout.flat(i)) * r.out[static_cast<std::size_t>(i)];
  for (std::int64_t i = 0; c.dfinal_state && i < c.dfinal_state.size(); ++i)
    sum += static_cast<double>(c.dfinal_state.flat(i)) * r.state[static_cast<std::size_t>(i)];
  return sum;
}

void check_slopes(const std::string& words, std::uint64_t seed) {
  DeltaRuleBackwardCase c(DeltaRuleBackwardProblem::parse("delta_rule_backward " + words), seed);
  DeltaRuleCase& f = c.inputs;
  for (Tensor* t : {&f.q, &f.k, &f.v, &f.g, &f.beta, &f.initial, &f.a_log, &f.dt_bias}) coarsen(*t, kStep);
  const DeltaRuleBackwardReference r = oracle_delta_rule_backward(c.args());
  const auto check = [&](const char* name, Tensor& of, const DeltaRuleGradient& gradient) {
    REQUIRE(gradient.value.size() == (of ? static_cast<std::size_t>(of.size()) : 0));
    double largest = 0;
    for (const double x : gradient.value) largest = std::max(largest, std::abs(x));
    const std::int64_t stride = 1 + static_cast<std::int64_t>(gradient.value.size()) / 25;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(gradient.value.size()); i += stride) {
      INFO(words << ", seed " << seed << ": " << name << " " << i);
      const auto at = static_cast<std::size_t>(i);
      CHECK(gradient.computed[at]);
      CHECK(gradient.value[at] == Approx(slope(loss, c, of.flat(i), kStep)).epsilon(1e-6).margin(1e-7 * (1 + largest)));
    }
  };
  check("dq", f.q, r.dq), check("dk", f.k, r.dk), check("dv", f.v, r.dv), check("dg", f.g, r.dg);
  check("dbeta", f.beta, r.dbeta), check("dinitial_state", f.initial, r.dinitial_state);
  check("da_log", f.a_log, r.da_log), check("ddt_bias", f.dt_bias, r.ddt_bias);
}

}  // namespace

TEST_CASE("oracle of delta_rule's gradients: central differences of every input under every feature",
          "[unit][numbers]") {
  for (const char* words :
       {"t=5 d=3 dv=4 rule=linear", "t=1 d=1", "t=5 d=3 dv=4 rule=delta", "t=5 d=3 dv=2 rule=delta beta",
        "t=5 d=3 dv=2 rule=gated decay=constant", "t=5 d=3 dv=2 rule=gated decay=head gate",
        "t=5 d=3 dv=2 rule=gated decay=channel gate", "t=6 d=3 dv=4 beta l2norm",
        "t=6 d=3 dv=2 decay=constant beta state", "t=6 d=3 dv=2 decay=head beta state",
        "t=6 d=3 dv=2 decay=channel beta state", "t=4 d=3 dv=2 decay=constant gate beta state",
        "t=4 d=3 dv=2 decay=head gate beta l2norm", "t=4 d=3 dv=2 decay=channel gate beta l2norm state",
        "b=2 hq=6 hk=2 t=3 d=3 dv=2 decay=head beta state",
        "b=2 hq=2 hk=3 hv=6 t=3 d=3 dv=2 decay=channel gate beta state",
        "b=2 hq=1 hk=4 hv=2 t=3 d=3 dv=2 decay=constant gate beta l2norm",
        "b=4 hq=2 t=4 d=3 dv=2 ragged=9 decay=channel beta state",
        "b=3 hq=1 hv=2 t=4 d=2 dv=3 ragged=7 decay=head gate beta state"})
    for (std::uint64_t seed = 0; seed < 10; ++seed) check_slopes(words, seed);
}

TEST_CASE("oracle of delta_rule's gradients: blocks of tokens meet", "[unit][numbers]") {
  DeltaRuleBackwardCase c(
      DeltaRuleBackwardProblem::parse("delta_rule_backward t=150 d=2 dv=2 decay=channel beta state"), 3,
      Placement::heap, Spacing::dense, Decays::weak);
  for (Tensor* t : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.inputs.g}) coarsen(*t, kStep);
  const DeltaRuleBackwardReference r = oracle_delta_rule_backward(c.args());
  for (const std::int64_t i : {0, 126, 127, 128, 129, 254, 257, 299}) {
    const auto at = static_cast<std::size_t>(i);
    CHECK(r.dq.value[at] == Approx(slope(loss, c, c.inputs.q.flat(i), kStep)).epsilon(1e-6).margin(1e-7));
    CHECK(r.dk.value[at] == Approx(slope(loss, c, c.inputs.k.flat(i), kStep)).epsilon(1e-6).margin(1e-7));
    CHECK(r.dg.value[at] == Approx(slope(loss, c, c.inputs.g.flat(i), kStep)).epsilon(1e-6).margin(1e-7));
  }
}

TEST_CASE("oracle of delta_rule's gradients: a step computes some heads as all are computed", "[unit][numbers]") {
  DeltaRuleBackwardCase c(
      DeltaRuleBackwardProblem::parse("delta_rule_backward b=3 hq=4 hk=8 t=5 d=3 dv=2 decay=channel gate beta state"),
      2);
  const DeltaRuleBackwardReference all = oracle_delta_rule_backward(c.args()),
                                   some = oracle_delta_rule_backward(c.args(), 4);
  const auto check = [](const DeltaRuleGradient& whole, const DeltaRuleGradient& part, bool sum) {
    std::size_t computed = 0;
    for (std::size_t i = 0; i < whole.value.size(); ++i) {
      CHECK(whole.computed[i]);
      if (!part.computed[i]) continue;
      ++computed;
      CHECK(part.value[i] == whole.value[i]);
      CHECK(part.sigma[i] == whole.sigma[i]);
    }
    // Two heads of eight in each sequence and the last two: those sums are complete that have some of every sequence.
    CHECK(computed * 24 == whole.value.size() * (sum ? 6 : 8));
  };
  check(all.dq, some.dq, false), check(all.dk, some.dk, false), check(all.dv, some.dv, false);
  check(all.dg, some.dg, false), check(all.dbeta, some.dbeta, false);
  check(all.dinitial_state, some.dinitial_state, false);
  check(all.da_log, some.da_log, true), check(all.ddt_bias, some.ddt_bias, true);
}

TEST_CASE("oracle of delta_rule's gradients: verdicts see what is wrong", "[unit][numbers]") {
  const DeltaRuleBackwardProblem problem = DeltaRuleBackwardProblem::parse(
      "delta_rule_backward b=2 hq=2 t=30 d=16 dv=8 decay=channel gate beta l2norm state");
  for (std::uint64_t seed = 0; seed < 10; ++seed)
    for (const Spacing spacing : {Spacing::dense, Spacing::gaps}) {
      DeltaRuleBackwardCase c(problem, seed, Placement::heap, spacing, Decays::some);
      const DeltaRuleBackwardReference r = oracle_delta_rule_backward(c.args());
      const DeltaRuleGradient* const references[] = {&r.dq,     &r.dk,      &r.dv, &r.dg, &r.dbeta, &r.dinitial_state,
                                                     &r.da_log, &r.ddt_bias};
      INFO("seed " << seed);
      CHECK(c.verdict(r).violation != "");  // nothing is written
      for (std::size_t i = 0; i < c.gradients().size(); ++i)
        for (std::int64_t at = 0; *c.gradients()[i] && at < c.gradients()[i]->size(); ++at)
          c.gradients()[i]->flat(at) = static_cast<float>(references[i]->value[static_cast<std::size_t>(at)]);
      REQUIRE(c.verdict(r).violation == "");
      for (Tensor* gradient : c.outputs()) {
        std::int64_t largest = 0;
        for (std::int64_t at = 0; at < gradient->size(); ++at)
          if (std::fabs(gradient->flat(at)) > std::fabs(gradient->flat(largest))) largest = at;
        const bool of_decay = gradient == &c.dg || gradient == &c.da_log || gradient == &c.ddt_bias;
        const float right = gradient->flat(largest), off = of_decay                          ? 1.3f
                                                           : gradient->dtype() == DType::f32 ? 1.0003f
                                                                                             : 1.02f;
        for (const float wrong : {right * off, std::nanf("")}) {
          gradient->flat(largest) = wrong;
          CHECK(c.verdict(r).violation != "");
        }
        gradient->flat(largest) = right;
        if (spacing == Spacing::dense) continue;
        std::byte* const gap = gradient->buffer().data() + size_of(gradient->dtype());
        const std::byte before = *gap;
        *gap = std::byte{0};
        CHECK(c.verdict(r).violation.ends_with("memory between its elements was written"));
        *gap = before;
      }
      REQUIRE(c.verdict(r).violation == "");
    }
}
