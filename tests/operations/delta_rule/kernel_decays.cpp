// delta_rule with decays and gates of any strength.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "operations/delta_rule/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;
using Bits = DeltaRuleBits;

}  // namespace

// Kernels may go by how long windows have been so far.
TEST_CASE("delta_rule: decays that are strong for a long time, then weak, then strong", "[kernel]") {
  const DeltaRuleProblem problem = problem_of("dtype=bf16 b=1 hq=1 t=4600 d=20 dv=8 decay=head beta state");
  DeltaRuleCase c(problem, 5);
  for (int64_t t = 0; t < problem.t; ++t)
    c.g.flat(t) = t < 4100 || t > 4350 ? -40.f - static_cast<float>(t % 7) : -0.03f;
  check_every_entry(c);
  for (const std::string& entry : every_entry(problem)) {
    const std::vector<float> whole = bits_on(c, forced(entry)).out;
    for (const int64_t cut : {90, 1100, 3100, 4150, 4360}) {
      INFO(entry << ", cut at " << cut);
      c.clear();
      run(part_of(c, 0, 0, cut), forced(entry));
      CHECK(std::equal(whole.begin(), whole.begin() + cut * problem.dv, c.out.values().begin()));
    }
  }
}

TEST_CASE("delta_rule: decays of 0 and 1, and growth", "[kernel]") {
  for (const char* words :
       {"hq=2 t=140 d=20 dv=24 decay=channel beta state", "hq=2 t=140 d=20 dv=24 decay=head beta state",
        "hq=2 t=140 d=20 dv=24 rule=gated decay=channel state", "dtype=bf16 hq=2 t=140 d=20 decay=head beta state"}) {
    const auto with = [&](const std::function<float(int64_t)>& g_of) {
      DeltaRuleCase c = case_with_states(problem_of(words), 8, Decays::weak);
      for (int64_t i = 0; i < c.g.size(); ++i) c.g.flat(i) = g_of(i);
      return c;
    };
    const auto check = [&](const std::function<float(int64_t)>& g_of) {
      DeltaRuleCase c = with(g_of);
      check_every_entry(c);
    };
    std::mt19937_64 random(3);
    for (const float forget : {-kInf, -1e30f, -600.f, -100.f, -87.5f}) {
      INFO("g " << forget);
      check([&](int64_t) { return forget; });
      check([&](int64_t) { return random() % 10 ? -0.1f : forget; });
    }
    check([&](int64_t) { return static_cast<float>(random() % 100) * 1e-3f; });        // up to e^0.1 a token
    check([&](int64_t i) { return i / 40 % 2 ? 3.f : -3.f; });                         // up and down
    check([&](int64_t) { return static_cast<float>(random() % 200) * 0.01f - 1.f; });  // e^-1 to e^1
    // A decay of 1 is none.
    DeltaRuleCase one = with([](int64_t) { return 0.f; });
    for (const std::string& entry : every_entry(one.problem)) {
      INFO(entry << ": " << words);
      const Bits bits = bits_on(one, forced(entry));
      DeltaRuleArgs args = one.args();
      args.g = {};
      one.clear();
      run(args, forced(entry));
      CHECK((Bits{one.out.values(), one.final.values()} == bits));
    }
  }
}

TEST_CASE("delta_rule: gates of any strength", "[kernel][numbers]") {
  for (const char* words : {"hq=2 t=60 d=20 dv=24 decay=channel gate beta state", "hq=2 t=60 d=20 decay=head gate beta",
                            "hq=2 t=60 d=20 rule=gated decay=channel gate"})
    for (const float size : {0.1f, 1.f, 8.f, 40.f, 200.f})
      for (const bool bounded : {false, true})
        for (const float bound : {-5.f, -0.f, -1e4f}) {
          DeltaRuleCase c(problem_of(words), 11);
          std::mt19937_64 random(5);
          std::uniform_real_distribution<float> uniform(-size, size);
          for (int64_t i = 0; i < c.g.size(); ++i) c.g.flat(i) = uniform(random);
          c.gate_lower_bound.reset();
          if (bounded) c.gate_lower_bound = bound;
          INFO("gates to " << size << (bounded ? ", bounded by " : "") << bound);
          check_every_entry(c);
        }
}

TEST_CASE("delta_rule: a gate whose rate is past fp32 keeps or forgets the state", "[kernel]") {
  const float a_log = 100, one = 1, nothing = 0;
  struct Gate {
    float g;
    std::optional<float> bound;
    float state;
  };
  for (const Gate& gate :
       {Gate{-200, {}, 1}, Gate{0, {}, 0}, Gate{0, -5.f, std::exp(-2.5f)}, Gate{1, -5.f, std::exp(-5.f)}})
    for (const std::string& entry : every_entry(problem_of("t=1 d=1 decay=head gate state"))) {
      float state = 1, out = 0;
      DeltaRuleArgs args;
      args.q = {&one, {1, 1, 1, 1}}, args.k = {&nothing, {1, 1, 1, 1}}, args.v = args.k;
      args.g = {&gate.g, {1, 1, 1}}, args.a_log = {&a_log, {1}};
      args.gate = true, args.gate_lower_bound = gate.bound;
      args.out = {&out, {1, 1, 1, 1}}, args.final_state = {&state, {1, 1, 1, 1}}, args.initial_state = args.final_state;
      run(args, forced(entry));
      INFO(entry << ": g = " << gate.g << ", state " << state);
      CHECK(std::abs(state - gate.state) < 1e-6f);
      CHECK(out == state);
    }
}
