// delta_rule_backward on every entry: against float64, and what its bits may not depend on.
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "operations/delta_rule_backward/case.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;
using C = DeltaRuleBackwardCase;
using Bits = std::vector<std::byte>;

DeltaRuleBackwardProblem problem_of(const std::string& words) {
  return DeltaRuleBackwardProblem::parse("delta_rule_backward " + words);
}

/// Every entry, each into fresh poison, within the bounds of float64.
void check_every_entry(C& c) {
  const DeltaRuleBackwardReference reference = oracle_delta_rule_backward(c.args());
  for (const std::string& entry : every_entry(c.problem)) {
    INFO(entry << ": " << c.problem.to_string());
    c.clear();
    c.run(forced(entry));
    const Verdict verdict = c.verdict(reference);
    INFO(describe(verdict.errors));
    REQUIRE(verdict.violation == "");
  }
}

/// Every byte of a gradient, gaps included.
Bits bits_of(const Tensor& tensor) {
  return {tensor.buffer().data(), tensor.buffer().data() + tensor.buffer().size()};
}
/// Those of all gradients on an entry.
std::vector<Bits> bits_on(C& c, const Context& context) {
  c.clear();
  c.run(context);
  std::vector<Bits> bits;
  for (const Tensor* gradient : c.gradients()) bits.push_back(*gradient ? bits_of(*gradient) : Bits());
  return bits;
}

/// A case with an initial and a final state, and with all that a gate has.
C whole(const DeltaRuleBackwardProblem& problem, std::uint64_t seed, Decays decays) {
  for (;; ++seed) {
    C c(problem, seed, Placement::heap, Spacing::dense, decays);
    if (c.problem.state && !(c.dinitial_state && c.dfinal_state)) continue;
    if (!c.problem.gate || (c.da_log && c.ddt_bias)) return c;
  }
}

/// Without the gradients that are sums over sequences.
void drop_sums(C& c) {
  c.da_log = {}, c.ddt_bias = {};
  if (c.problem.decay == Decay::constant) c.dg = {};
}

/// The call for one sequence alone.
DeltaRuleBackwardArgs sequence_of(C& c, int64_t sequence) {
  DeltaRuleBackwardArgs args = c.args();
  DeltaRuleArgs& f = args.forward;
  const bool ragged = static_cast<bool>(f.cu_seqlens);
  int64_t begin = 0;
  for (int64_t i = 0; ragged && i < sequence; ++i) begin += c.inputs.length(i);
  const auto take = [&](auto& t) { t = tokens_of(t, ragged, sequence, begin, c.inputs.length(sequence)); };
  take(f.q), take(f.k), take(f.v), take(f.beta), take(args.dout);
  take(args.dq), take(args.dk), take(args.dv), take(args.dbeta);
  if (f.g.ndim != 1) take(f.g), take(args.dg);
  for (TensorView* t : {&f.initial_state, &args.dfinal_state})
    if (*t) *t = slice(*t, 0, sequence, 1);
  if (args.dinitial_state) args.dinitial_state = slice(args.dinitial_state, 0, sequence, 1);
  f.cu_seqlens = {}, f.out = {}, f.final_state = {};
  return args;
}

const char* const kFeatures[] = {
    "t=50 d=24 dv=20 rule=linear",
    "t=50 d=24 dv=20 rule=linear state",
    "t=50 d=24 dv=20 rule=delta",
    "t=50 d=24 dv=20 rule=delta beta",
    "t=50 d=24 dv=20 rule=gated decay=constant",
    "t=50 d=24 dv=20 rule=gated decay=head",
    "t=50 d=24 dv=20 rule=gated decay=channel state",
    "t=50 d=24 dv=20",
    "t=50 d=24 dv=20 beta",
    "t=50 d=24 dv=20 decay=constant beta",
    "t=50 d=24 dv=20 decay=head beta",
    "t=50 d=24 dv=20 decay=channel beta",
    "t=50 d=24 dv=20 decay=constant gate beta",
    "t=50 d=24 dv=20 decay=head gate beta",
    "t=50 d=24 dv=20 decay=channel gate beta",
    "t=50 d=24 dv=20 rule=gated decay=constant gate",
    "t=50 d=24 dv=20 rule=gated decay=channel gate",
    "t=50 d=24 dv=20 l2norm",
    "t=50 d=24 dv=20 rule=linear l2norm",
    "t=50 d=24 dv=20 decay=channel gate beta l2norm state",
    "t=50 d=24 dv=20 decay=channel beta state",
    "b=3 hq=2 t=30 d=24 dv=20 decay=channel beta state",
    "hq=2 hv=6 t=30 d=24 dv=20 decay=head beta state",
    "hq=2 hv=2 hk=6 t=30 d=24 dv=20 decay=channel beta state",
    "hq=6 hk=2 t=30 d=24 dv=20 decay=channel beta state",
    "hq=6 hk=2 t=30 d=24 dv=20 rule=gated decay=head",
    "hq=12 hk=2 hv=4 t=30 d=24 dv=20 decay=head beta",
    "hq=1 hk=4 t=30 d=24 dv=20 beta",
    "b=2 hq=2 hk=3 hv=6 t=30 d=24 dv=20 decay=channel gate beta l2norm state",
    "b=2 hq=2 hk=6 hv=3 t=30 d=24 dv=20 decay=constant gate beta",
    "b=4 hq=2 t=30 d=24 dv=20 ragged=70 decay=head beta state",
    "b=5 hq=2 hk=3 hv=6 t=30 d=24 dv=20 ragged=40 decay=constant gate beta state",
    "b=4 hq=2 t=25 d=7 dv=20 ragged=25 decay=channel gate beta state",
    "b=0 hq=2 t=4 d=8 decay=head gate state",
    "b=2 hq=2 t=0 d=8 dv=5 decay=channel gate beta state",
    "b=3 hq=2 t=0 d=8 dv=5 ragged=0 decay=constant beta state",
    "b=2 hq=0 t=3 d=8",
    "dtype=bf16 b=2 hq=2 t=30 d=24 dv=20 decay=channel beta state",
    "dtype=f16 b=2 hq=2 t=30 d=24 dv=20 decay=channel gate beta l2norm state",
    "dtype=bf16 out=f32 b=2 hq=2 hv=4 t=30 d=24 dv=20 decay=head gate beta",
    "dtype=bf16 state_dtype=bf16 b=2 hq=2 t=30 d=24 dv=20 decay=channel beta state",
    "dtype=f16 out=bf16 b=2 hq=2 t=30 d=24 dv=20 decay=constant beta",
    "out=f16 b=2 hq=2 t=30 d=24 dv=20 rule=gated decay=head",
};

}  // namespace

TEST_CASE("delta_rule_backward: each feature alone, within the bounds of float64", "[kernel][long]") {
  const Spacing spacing = GENERATE(Spacing::dense, Spacing::gaps);
  for (const char* words : kFeatures)
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      INFO("seed " << seed);
      C c(problem_of(words), seed, Placement::heap, spacing);
      check_every_entry(c);
    }
}

TEST_CASE("delta_rule_backward: of() describes what a case was made from", "[kernel]") {
  for (const char* words : kFeatures)
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      const DeltaRuleBackwardProblem problem = problem_of(words);
      C c(problem, seed, Placement::heap, seed % 2 ? Spacing::gaps : Spacing::dense);
      CHECK(DeltaRuleBackwardProblem::of(c.args()).to_string() == problem.to_string());
    }
}

TEST_CASE("delta_rule_backward: sampled problems, and nothing outside of the tensors is touched", "[kernel][long]") {
  std::mt19937_64 random(601);
  for (int i = 0; i < 100; ++i) {
    const DeltaRuleBackwardProblem problem = sample_delta_rule_backward(random);
    const std::uint64_t seed = random() % 1000;
    INFO("seed " << seed);
    C c(problem, seed, i % 2 ? Placement::front : Placement::back, i % 3 ? Spacing::gaps : Spacing::dense);
    c.protect_inputs();
    check_every_entry(c);
  }
}

TEST_CASE("delta_rule_backward: every size of d and dv", "[kernel]") {
  const std::vector<int64_t> sizes = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 128, 200, 256};
  for (const int64_t d : sizes)
    for (const int64_t dv : sizes) {
      DeltaRuleBackwardProblem problem = problem_of("t=4 d=1 decay=channel beta state");
      problem.d = d, problem.dv = dv;
      if (d + dv <= 66) problem.t = 30;
      C c(problem, static_cast<std::uint64_t>(d + 3 * dv));
      check_every_entry(c);
    }
}

TEST_CASE("delta_rule_backward: every number of tokens and strength of decay", "[kernel][long]") {
  for (const int64_t t : {0, 1, 2, 3, 22, 23, 24, 25, 47, 48, 49, 72, 100, 500})
    for (const Decays decays : kAllDecays)
      for (const char* words : {"t=1 d=20 dv=12 decay=channel beta state", "t=1 d=20 dv=12 decay=head beta state",
                                "t=1 d=20 dv=12 rule=gated decay=channel state"}) {
        DeltaRuleBackwardProblem problem = problem_of(words);
        problem.t = t;
        INFO("decays " << static_cast<int>(decays));
        C c(problem, 7, Placement::heap, Spacing::dense, decays);
        check_every_entry(c);
      }
}

TEST_CASE("delta_rule_backward: errors of long sequences are a few units of fp32, however strong the decay",
          "[kernel][numbers]") {
  for (const Decays decays : kAllDecays)
    for (const char* words :
         {"t=600 d=64 decay=channel beta state", "t=600 d=128 dv=32 decay=head beta state",
          "t=600 d=64 rule=gated decay=channel state", "t=300 d=64 dv=16 decay=channel gate beta l2norm state",
          "t=600 d=32 rule=delta beta", "t=600 d=32 rule=linear"}) {
      C c(problem_of(words), 3, Placement::heap, Spacing::dense, decays);
      const DeltaRuleBackwardReference reference = oracle_delta_rule_backward(c.args());
      for (const std::string& entry : every_entry(c.problem)) {
        c.clear();
        c.run(forced(entry));
        // Terms of sums over all tokens cancel, and dg has the gate's errors.
        for (const double limit : {2e-5, 2e-6, 1e-6}) {
          if (limit < 2e-5) drop_sums(c);
          if (limit < 2e-6) c.dg = {};
          const Verdict verdict = c.verdict(reference);
          INFO(entry << ": " << c.problem.to_string() << ", decays " << static_cast<int>(decays) << ", "
                     << describe(verdict.errors));
          CHECK(verdict.violation == "");
          CHECK(verdict.errors.rel_frobenius < limit);
        }
        c = C(problem_of(words), 3, Placement::heap, Spacing::dense, decays);
      }
    }
}

TEST_CASE("delta_rule_backward: which gradients are wanted changes no bit of them", "[kernel]") {
  for (const char* words :
       {"b=2 hq=2 hk=3 hv=6 t=30 d=20 dv=24 decay=channel gate beta l2norm state",
        "b=2 hq=4 hk=2 t=30 d=20 dv=24 decay=constant gate beta state", "b=2 hq=2 t=30 d=20 dv=24 rule=linear state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      const Context context = forced(entry);
      C c = whole(problem_of(words), 2, Decays::some);
      const std::vector<Bits> all = bits_on(c, context);
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (!*c.gradients()[i]) continue;
        C one = whole(problem_of(words), 2, Decays::some);
        for (std::size_t other = 0; other < all.size(); ++other)
          if (other != i) *one.gradients()[other] = {};
        INFO(entry << ": gradient " << i << " alone, " << words);
        CHECK(bits_on(one, context)[i] == all[i]);
        C rest = whole(problem_of(words), 2, Decays::some);
        *rest.gradients()[i] = {};
        std::vector<Bits> others = bits_on(rest, context);
        others[i] = all[i];
        CHECK(others == all);
      }
      C none = whole(problem_of(words), 2, Decays::some);
      for (Tensor* gradient : none.gradients()) *gradient = {};
      none.run(context);
    }
}

TEST_CASE("delta_rule_backward: results without a gradient have one of 0", "[kernel]") {
  for (const char* words :
       {"b=2 hq=2 hv=4 t=30 d=20 dv=24 decay=channel beta state", "b=2 hq=6 hk=2 t=30 d=20 decay=head gate state",
        "b=4 hq=2 t=26 d=20 ragged=50 rule=gated decay=constant state"}) {
    for (const bool no_dout : {true, false})
      for (const bool no_state : {true, false}) {
        C c = whole(problem_of(words), 3, Decays::some);
        if (every_entry(c.problem).empty()) continue;  // RAPT_TEST_ENTRIES has others
        if (no_dout) c.dout = {};
        if (no_state) c.dfinal_state = {};
        INFO((no_dout ? "no dout " : "") << (no_state ? "no dfinal_state" : ""));
        check_every_entry(c);
        for (const Tensor* gradient : c.outputs())
          for (const float x : gradient->values())
            if (no_dout && no_state) REQUIRE(x == 0);
      }
  }
}

TEST_CASE("delta_rule_backward: a sequence has the bits that it has alone, ragged or in a batch", "[kernel][numbers]") {
  for (const char* words : {"b=5 hq=4 hk=2 t=70 d=20 dv=40 ragged=200 decay=channel beta state",
                            "b=3 hq=2 hv=4 t=67 d=24 decay=head gate beta l2norm state",
                            "b=4 hq=2 hk=3 hv=6 t=26 d=24 dv=8 ragged=26 decay=head beta state",
                            "dtype=bf16 b=4 hq=2 t=40 d=36 dv=12 ragged=90 decay=constant beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      INFO(entry << ": " << words);
      const Context context = forced(entry);
      C c = whole(problem_of(words), 2, Decays::some);
      drop_sums(c);
      const std::vector<Bits> together = bits_on(c, context);
      c.clear();
      for (int64_t i = 0; i < c.problem.b; ++i) delta_rule_backward(sequence_of(c, i), context);
      for (std::size_t i = 0; i < together.size(); ++i) {
        INFO("gradient " << i);
        CHECK((*c.gradients()[i] ? bits_of(*c.gradients()[i]) : Bits()) == together[i]);
      }
    }
}

TEST_CASE("delta_rule_backward: where tensors lie changes no bit", "[kernel]") {
  for (const char* words : {"b=2 hq=4 hk=2 t=40 d=20 dv=24 decay=channel gate beta state",
                            "b=3 hq=2 t=25 d=33 dv=17 decay=constant beta state"})
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      C dense(problem_of(words), seed), gaps(problem_of(words), seed, Placement::heap, Spacing::gaps);
      for (C* c : {&dense, &gaps})
        for (Tensor* gradient : c->outputs()) *gradient = Tensor(DType::f32, gradient->layout());
      for (const std::string& entry : every_entry(dense.problem)) {
        INFO(entry << ": " << words << ", seed " << seed);
        bits_on(dense, forced(entry)), bits_on(gaps, forced(entry));
        for (std::size_t i = 0; i < dense.outputs().size(); ++i) {
          INFO("gradient " << i);
          CHECK(same_bits(*dense.outputs()[i], *gaps.outputs()[i]));
        }
      }
    }
}

TEST_CASE("delta_rule_backward: 1 to 5 threads write the same bits", "[kernel][numbers]") {
  const auto executor = std::make_shared<ThreadExecutor>(5);
  for (const char* words :
       {"hq=6 t=100 d=64 dv=100 decay=channel beta state", "b=2 hq=2 hk=3 hv=6 t=60 d=50 decay=head gate beta l2norm",
        "b=5 hq=2 hk=2 hv=12 t=49 d=33 dv=64 ragged=130 decay=constant gate beta state",
        "hq=1 hk=9 hv=1 t=200 d=64 rule=gated decay=channel"}) {
    C c(problem_of(words), 4);
    const std::string entry = usable_entries(c.problem).front();
    const std::vector<Bits> serial = bits_on(c, forced(entry));
    for (const int threads : {1, 2, 3, 5})
      for (int run = 0; run < 2; ++run) {
        INFO(entry << " on " << threads << ": " << words);
        REQUIRE((bits_on(c, forced(entry, executor, threads)) == serial));
      }
  }
}

TEST_CASE("delta_rule_backward: NaN and Inf stay in their sequence, and in heads that share something", "[kernel]") {
  for (const char* words : {"b=3 hq=4 hk=2 hv=4 t=50 d=20 dv=24 decay=channel beta state",
                            "b=3 hq=4 hk=2 hv=4 t=50 d=20 dv=24 decay=head beta state",
                            "b=3 hq=2 hk=4 hv=4 t=50 d=20 dv=24 rule=gated decay=channel state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      const Context context = forced(entry);
      C c = whole(problem_of(words), 1, Decays::mostly_weak);
      c.inputs.beta_sigmoid = c.inputs.beta_double = false;
      const std::vector<Bits> before = bits_on(c, context);
      DeltaRuleCase& f = c.inputs;
      Tensor* const all[] = {&f.q, &f.k, &f.v, &f.g, &f.beta, &c.dout, &f.initial, &c.dfinal_state};
      for (std::size_t in = 0; in < std::size(all); ++in)
        for (const int64_t token : {0, 24, 30, 49})
          for (const float value : {kNan, kInf}) {
            Tensor& tensor = *all[in];
            if (!tensor || (value == kInf && in == 3)) continue;
            // The first head of the second sequence.
            Element element = in > 5                      ? tensor.at({1, 0, 5, 7})
                              : tensor.layout().ndim == 3 ? tensor.at({1, token, 0})
                                                          : tensor.at({1, token, 0, 5});
            const float own = element;
            element = value;
            const std::vector<Bits> after = bits_on(c, context);
            element = own;
            INFO(entry << ": " << words << ", input " << in << " at token " << token);
            // State heads 0 and 1 share a head of q or k, so do 2 and 3.
            bool reached = false;
            for (std::size_t i = 0; i < after.size(); ++i) {
              const Tensor& gradient = *c.gradients()[i];
              if (!gradient) continue;
              INFO("gradient " << i);
              const bool of_state = i == 5;
              const Layout& l = gradient.layout();
              const int64_t head_dim = of_state ? 1 : 2, inner = l.ndim == 3 ? 1
                                                                 : of_state  ? l.shape[2] * l.shape[3]
                                                                             : l.shape[3];
              const int64_t heads = l.shape[static_cast<std::size_t>(head_dim)], of_sequence = gradient.size() / 3;
              const auto width = size_of(gradient.dtype());
              Tensor was(gradient.dtype(), gradient.layout());
              std::memcpy(was.buffer().data(), before[i].data(), before[i].size());
              for (int64_t at = 0; at < gradient.size(); ++at) {
                const bool harmed = at / of_sequence == 1 && at / inner % heads < heads / 2;
                const float x = gradient.flat(at), y = was.flat(at);
                if (harmed) reached = reached || !std::isfinite(x);
                else REQUIRE(std::memcmp(&x, &y, width) == 0);
              }
            }
            CHECK(reached);
          }
    }
}

TEST_CASE("delta_rule_backward: decays of 0 and 1, and growth", "[kernel]") {
  for (const char* words :
       {"hq=2 t=80 d=20 dv=24 decay=channel beta state", "hq=2 t=80 d=20 dv=24 decay=head beta state",
        "hq=2 t=80 d=20 dv=24 rule=gated decay=channel state", "dtype=bf16 hq=2 t=80 d=20 decay=head beta state"}) {
    const auto with = [&](const std::function<float(int64_t)>& g_of) {
      C c = whole(problem_of(words), 8, Decays::weak);
      for (int64_t i = 0; i < c.inputs.g.size(); ++i) c.inputs.g.flat(i) = g_of(i);
      return c;
    };
    const auto check = [&](const std::function<float(int64_t)>& g_of) {
      C c = with(g_of);
      check_every_entry(c);
    };
    std::mt19937_64 random(3);
    for (const float forget : {-kInf, -1e30f, -600.f, -100.f, -87.5f}) {
      INFO("g " << forget);
      check([&](int64_t) { return forget; });
      check([&](int64_t) { return random() % 10 ? -0.1f : forget; });
    }
    check([&](int64_t) { return static_cast<float>(random() % 100) * 1e-3f; });        // up to e^0.1 a token
    check([&](int64_t i) { return i / 40 % 2 ? 2.f : -2.f; });                         // up and down
    check([&](int64_t) { return static_cast<float>(random() % 200) * 0.01f - 1.f; });  // e^-1 to e^1
    // A decay of 1 is none.
    C one = with([](int64_t) { return 0.f; });
    one.dg = {};
    for (const std::string& entry : every_entry(one.problem)) {
      INFO(entry << ": " << words);
      const std::vector<Bits> bits = bits_on(one, forced(entry));
      DeltaRuleBackwardArgs args = one.args();
      args.forward.g = {};
      one.clear();
      delta_rule_backward(args, forced(entry));
      for (std::size_t i = 0; i < bits.size(); ++i)
        CHECK((*one.gradients()[i] ? bits_of(*one.gradients()[i]) : Bits()) == bits[i]);
    }
  }
}

TEST_CASE("delta_rule_backward: growth of what tokens erase, and of nothing", "[kernel]") {
  const auto fill_with = [](Tensor& tensor, float x) {
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = x;
  };
  for (const char* words : {"t=60 d=20 dv=24 decay=channel beta state", "t=60 d=20 dv=24 decay=head beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      // Each token erases what those before it wrote, as all have the same key.
      for (const float g : {0.5f, 1.f, 2.f, -2.f}) {  // -2: up by 2 after down by 20
        INFO(entry << ": " << words << ", g " << g);
        C c = whole(problem_of(words), 8, Decays::weak);
        c.inputs.beta_sigmoid = c.inputs.beta_double = false;
        fill_with(c.inputs.q, std::sqrt(1 / 20.f)), fill_with(c.inputs.k, std::sqrt(1 / 20.f));
        fill_with(c.inputs.g, std::abs(g)), fill_with(c.inputs.beta, 1);
        const int64_t channels = c.inputs.g.size() / c.problem.t;
        for (int64_t i = 0; g < 0 && i < c.inputs.g.size(); ++i)
          if (i / channels % 11 == 10) c.inputs.g.flat(i) = 10 * g;
        fill_with(c.inputs.initial, 0), fill_with(c.dfinal_state, 0);
        c.dg = {}, c.dinitial_state = {};  // are about 0
        c.run(forced(entry));
        CHECK(c.verdict().errors.rel_frobenius < 2e-5);
      }
      C c = whole(problem_of(words), 8, Decays::weak);
      fill_with(c.inputs.g, 80);
      for (Tensor* tensor : {&c.inputs.v, &c.inputs.initial, &c.dout, &c.dfinal_state}) fill_with(*tensor, 0);
      bits_on(c, forced(entry));
      for (const Tensor* gradient : c.outputs())
        for (const float x : gradient->values()) REQUIRE(x == 0);
    }
}

TEST_CASE("delta_rule_backward: the decay of a reset has a gradient of 0", "[kernel]") {
  for (const char* words : {"hq=2 t=60 d=20 dv=24 decay=channel beta state", "hq=2 t=60 d=20 decay=head beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      INFO(entry << ": " << words);
      C c = whole(problem_of(words), 5, Decays::resets);
      bits_on(c, forced(entry));
      int64_t resets = 0;
      for (int64_t i = 0; i < c.dg.size(); ++i)
        if (c.inputs.g.flat(i) == -600) {
          ++resets;
          REQUIRE(c.dg.flat(i) == 0);
        }
      CHECK(resets > 0);
    }
}

TEST_CASE("delta_rule_backward: gates of any strength", "[kernel][numbers]") {
  for (const char* words : {"hq=2 t=60 d=20 dv=24 decay=channel gate beta state", "hq=2 t=60 d=20 decay=head gate beta",
                            "hq=2 t=60 d=20 rule=gated decay=channel gate"})
    for (const float size : {0.1f, 1.f, 8.f, 40.f, 200.f})
      for (const bool bounded : {false, true})
        for (const float bound : {-5.f, -0.f, -1e4f}) {
          C c = whole(problem_of(words), 11, Decays::some);
          std::mt19937_64 random(5);
          std::uniform_real_distribution<float> uniform(-size, size);
          for (int64_t i = 0; i < c.inputs.g.size(); ++i) c.inputs.g.flat(i) = uniform(random);
          c.inputs.gate_lower_bound.reset();
          if (bounded) c.inputs.gate_lower_bound = bound;
          INFO("gates to " << size << (bounded ? ", bounded by " : "") << bound);
          check_every_entry(c);
        }
}

TEST_CASE("delta_rule_backward: a gate whose rate is past fp32 has gradients of 0 where it keeps or forgets",
          "[kernel]") {
  for (const bool bounded : {false, true})
    for (const std::string& entry : every_entry(problem_of("t=3 d=2 decay=channel gate beta state"))) {
      C c = whole(problem_of("t=3 d=2 decay=channel gate beta state"), 3, Decays::some);
      c.inputs.a_log.flat(0) = 100, c.inputs.gate_lower_bound.reset();
      if (bounded) c.inputs.gate_lower_bound = -5.f;
      // Far from the middle of a sigmoid; a softplus is 0 in fp32, or not.
      for (int64_t i = 0; i < c.inputs.g.size(); ++i) c.inputs.g.flat(i) = i % 2 ? 3.f : -200.f;
      for (int64_t i = 0; i < c.inputs.dt_bias.size(); ++i) c.inputs.dt_bias.flat(i) = 0;
      INFO(entry << (bounded ? ", bounded" : ""));
      check_every_entry(c);
      for (const Tensor* gradient : {&c.dg, &c.da_log, &c.ddt_bias})
        for (const float x : gradient->values()) CHECK(x == 0);
    }
}
