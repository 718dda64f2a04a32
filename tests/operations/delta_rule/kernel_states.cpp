// delta_rule from the state that a call before left: decode, speculative decoding, pools of states.
#include <cstring>
#include <string>
#include <vector>

#include "operations/delta_rule/check.hpp"

using namespace rapt;
using namespace rapt::testing;
using std::int64_t;

TEST_CASE("delta_rule: a prompt and then one token at a time", "[kernel][long]") {
  for (const char* words : {"b=2 hq=4 hk=2 t=90 d=20 dv=24 decay=channel beta state",
                            "b=1 hq=2 hv=4 t=90 d=64 decay=head gate beta l2norm state",
                            "dtype=bf16 b=1 hq=2 hv=4 t=90 d=64 decay=head gate beta l2norm state",
                            "b=1 hq=2 t=90 d=17 rule=gated decay=constant state"})
    for (const Decays decays : kAllDecays) {
      DeltaRuleCase c = case_with_states(problem_of(words), 6, decays);
      for (const std::string& entry : every_entry(c.problem)) {
        INFO(entry << ": " << words << ", decays " << static_cast<int>(decays));
        const Forced context = forced(entry);
        c.operands = operands_of(entry);
        c.clear();
        for (int64_t b = 0; b < c.problem.b; ++b)
          for (int64_t t = 0; t < 90; t += t < 60 ? 60 : 1) {
            DeltaRuleArgs args = part_of(c, b, t, t < 60 ? 60 : 1);
            if (t > 0) args.initial_state = args.final_state;
            run(args, context);
          }
        const Verdict verdict = c.verdict();
        INFO(describe(verdict.errors));
        REQUIRE(verdict.violation == "");
      }
    }
}

TEST_CASE("delta_rule: speculative decoding resumes from what was accepted", "[kernel]") {
  constexpr int64_t b = 3, n = 4, h = 2, d = 20;
  const DeltaRuleProblem draft = problem_of("b=3 hq=2 t=4 d=20 decay=channel beta state slots steps=4");
  DeltaRuleCase first(draft, 3), second(draft, 4);
  // Slots 0 to 11 are the drafts' and the last one nobody's; the sequences start from zeros.
  std::vector<std::int32_t> slots(b * n), accepted = {1, 4, 2};
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int32_t>((5 * i + 2) % slots.size());
  const Layout layout(Dims{b * n + 1, h, d, d});
  const auto call = [&](DeltaRuleCase& c, Tensor& pool, const TensorView& counts, const Forced& context,
                        int64_t tokens) {
    DeltaRuleArgs args = c.args();
    for (TensorView* t : {&args.q, &args.k, &args.v, &args.g, &args.beta}) *t = slice(*t, 1, 0, tokens);
    args.out = slice(args.out, 1, 0, tokens);
    args.initial_state = pool.view(), args.final_state = pool.mutable_view();
    args.state_slots = TensorView(slots.data(), {b, n}), args.accepted = counts;
    c.clear();
    run(args, context);
  };
  for (const std::string& entry : every_entry(draft)) {
    INFO(entry);
    const Forced context = forced(entry);
    Tensor pool(DType::f32, layout);
    for (int64_t i = 0; i < pool.size(); ++i) pool.flat(i) = 0;
    call(first, pool, {}, context, n);
    call(second, pool, TensorView(accepted.data(), {b}), context, n);
    const std::vector<float> resumed = second.out.values();
    for (int64_t i = 0; i < b; ++i) {
      // The same with no more tokens in the first call than this sequence had accepted.
      const auto count = accepted[static_cast<std::size_t>(i)];
      Tensor own(DType::f32, layout);
      for (int64_t at = 0; at < own.size(); ++at) own.flat(at) = 0;
      call(first, own, {}, context, count);
      const std::vector<std::int32_t> all(b, count);
      call(second, own, TensorView(all.data(), {b}), context, n);
      const std::vector<float> wanted = second.out.values();
      const auto row = static_cast<std::size_t>(n * h * d), at = static_cast<std::size_t>(i) * row;
      CHECK(std::memcmp(&wanted[at], &resumed[at], row * sizeof(float)) == 0);
      for (int64_t step = 0; step < n; ++step) {
        const int64_t slot = slots[static_cast<std::size_t>(i * n + step)] * h * d * d;
        for (int64_t e = slot; e < slot + h * d * d; ++e) REQUIRE(own.flat(e) == pool.flat(e));
      }
    }
    for (int64_t e = b * n * h * d * d; e < pool.size(); ++e) REQUIRE(pool.flat(e) == 0);
  }
}

TEST_CASE("delta_rule: of a negative slot the state is 0, and none is kept", "[kernel]") {
  const DeltaRuleProblem p = problem_of("b=3 hq=2 t=5 d=12 decay=head beta state slots");
  DeltaRuleCase c(p, 3);
  const std::int32_t slots[] = {4, -1, 2}, none[] = {-7, -1, -2};
  Tensor pool(DType::f32, Layout(Dims{6, 2, 12, 12}));
  for (const std::string& entry : every_entry(p)) {
    INFO(entry);
    const Forced context = forced(entry);
    DeltaRuleArgs args = c.args();
    args.initial_state = args.final_state = {}, args.state_slots = {};
    c.clear();
    run(args, context);
    const std::vector<float> from_zero = c.out.values();
    for (int64_t i = 0; i < pool.size(); ++i) pool.flat(i) = 3;
    args.initial_state = pool.view(), args.final_state = pool.mutable_view();
    args.state_slots = TensorView(none, {3});
    c.clear();
    run(args, context);
    CHECK(c.out.values() == from_zero);
    for (int64_t i = 0; i < pool.size(); ++i) REQUIRE(pool.flat(i) == 3);
    args.state_slots = TensorView(slots, {3});
    c.clear();
    run(args, context);
    const std::vector<float> out = c.out.values();
    constexpr std::size_t kSequence = 5 * 2 * 12;
    for (std::size_t b = 0; b < 3; ++b)
      CHECK((std::memcmp(&out[b * kSequence], &from_zero[b * kSequence], kSequence * sizeof(float)) == 0) == (b == 1));
    for (int64_t i = 0; i < pool.size(); ++i) REQUIRE((pool.flat(i) == 3) == (i / 288 != 4 && i / 288 != 2));
  }
}
