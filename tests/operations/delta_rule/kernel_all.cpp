// delta_rule on every entry, against float64.
#include <cmath>
#include <cstddef>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "operations/delta_rule/check.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

const char* const kFeatures[] = {
    "t=70 d=24 dv=20 rule=linear",
    "t=70 d=24 dv=20 rule=delta",
    "t=70 d=24 dv=20 rule=delta beta",
    "hq=18 hk=2 t=9 d=24 dv=20 decay=channel beta state",
    "hq=20 hk=2 t=9 d=200 dv=36 decay=channel beta state",
    "b=0 hq=2 t=1 d=24 dv=20 beta state slots",
    "t=70 d=24 dv=20 rule=gated decay=constant",
    "t=70 d=24 dv=20 rule=gated decay=head",
    "t=70 d=24 dv=20 rule=gated decay=channel",
    "t=70 d=24 dv=20",
    "t=70 d=24 dv=20 beta",
    "t=70 d=24 dv=20 decay=constant beta",
    "t=70 d=24 dv=20 decay=head beta",
    "t=70 d=24 dv=20 decay=channel beta",
    "t=70 d=24 dv=20 decay=constant gate beta",
    "t=70 d=24 dv=20 decay=head gate beta",
    "t=70 d=24 dv=20 decay=channel gate beta",
    "t=70 d=24 dv=20 rule=gated decay=channel gate",
    "t=70 d=24 dv=20 l2norm",
    "t=70 d=24 dv=20 rule=linear l2norm",
    "t=70 d=24 dv=20 decay=channel beta state",
    "b=3 hq=2 t=30 d=24 dv=20 decay=channel beta state",
    "b=3 hq=2 t=30 d=24 dv=20 decay=head beta state slots",
    "b=3 hq=2 t=5 d=24 dv=20 decay=head beta state slots steps=5",
    "b=3 hq=2 t=4 d=24 dv=20 decay=channel beta state slots steps=6",
    "hq=2 hv=6 t=30 d=24 dv=20 decay=head beta state",
    "hq=2 hv=2 hk=6 t=30 d=24 dv=20 decay=channel beta state",
    "hq=6 hk=2 t=30 d=24 dv=20 decay=channel beta state",
    "hq=6 hk=2 t=30 d=24 dv=20 rule=gated decay=head",
    "hq=12 hk=2 hv=4 t=30 d=24 dv=20 decay=head beta",
    "hq=1 hk=4 t=30 d=24 dv=20 beta",
    "b=4 hq=2 t=30 d=24 dv=20 ragged=70 decay=head beta state",
    "b=4 hq=2 t=30 d=24 dv=20 ragged=70 decay=constant gate beta state slots",
    "b=3 hq=2 t=4 d=24 dv=20 ragged=7 decay=channel beta state slots steps=4",
    "b=0 hq=2 t=4 d=8 state",
    "b=2 hq=2 t=0 d=8 dv=5 decay=head beta state",
    "b=2 hq=0 t=3 d=8",
    "dtype=bf16 b=2 hq=2 t=30 d=24 dv=20 decay=channel beta state",
    "dtype=f16 b=2 hq=2 t=30 d=24 dv=20 decay=channel gate beta l2norm state",
    "dtype=bf16 out=f32 b=2 hq=2 t=30 d=24 dv=20 decay=head beta",
    "dtype=bf16 hq=4 hk=2 t=90 d=24 dv=40 decay=channel gate beta l2norm state",
    "dtype=bf16 b=3 hq=6 hk=2 t=50 d=40 dv=20 ragged=80 rule=gated decay=head state slots",
    "dtype=bf16 hq=2 hv=4 t=90 d=24 dv=20 rule=linear state",
    "dtype=f16 out=bf16 b=2 hq=2 t=30 d=24 dv=20 decay=constant beta",
    "out=f16 b=2 hq=2 t=30 d=24 dv=20 rule=gated decay=head",
    "state_dtype=bf16 b=3 hq=2 t=30 d=24 dv=20 decay=channel beta state",
    "state_dtype=bf16 b=2 hq=2 t=1 d=24 dv=40 decay=channel beta state",
    "state_dtype=bf16 b=2 hq=2 t=0 d=24 dv=20 decay=channel beta state",
    "dtype=bf16 state_dtype=bf16 b=3 hq=2 t=1 d=24 dv=128 decay=head gate beta l2norm state slots",
    "dtype=bf16 state_dtype=bf16 b=3 hq=2 t=4 d=24 dv=20 decay=channel beta state slots steps=5",
    "state_dtype=bf16 b=4 hq=2 t=30 d=24 dv=20 ragged=70 decay=constant gate beta state slots",
};

}  // namespace

TEST_CASE("delta_rule: each feature alone, within the bounds of float64", "[kernel][long]") {
  const Spacing spacing = GENERATE(Spacing::dense, Spacing::gaps);
  for (const char* words : kFeatures)
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      INFO("seed " << seed);
      DeltaRuleCase c(problem_of(words), seed, Placement::heap, spacing);
      check_every_entry(c);
    }
}

TEST_CASE("delta_rule: of() describes what a case was made from", "[kernel]") {
  for (const char* words : kFeatures)
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      const DeltaRuleProblem problem = problem_of(words);
      DeltaRuleCase c(problem, seed, Placement::heap, seed % 2 ? Spacing::gaps : Spacing::dense);
      CHECK(DeltaRuleProblem::of(c.args()).to_string() == problem.to_string());
    }
}

TEST_CASE("delta_rule: sampled problems, and nothing outside of the tensors is touched", "[kernel][long]") {
  std::mt19937_64 random(501);
  for (int i = 0; i < 80; ++i) {
    const DeltaRuleProblem problem = sample_delta_rule(random);
    DeltaRuleCase c(problem, random() % 1000, i % 2 ? Placement::front : Placement::back,
                    i % 3 ? Spacing::gaps : Spacing::dense);
    c.protect_inputs();
    check_every_entry(c);
  }
}

TEST_CASE("delta_rule: every size of d and dv", "[kernel][long]") {
  const std::vector<int64_t> sizes = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 128, 200, 256};
  for (const int64_t d : sizes)
    for (const int64_t dv : sizes) {
      DeltaRuleProblem problem = problem_of("t=4 d=1 decay=channel beta state");
      problem.d = d, problem.dv = dv;
      DeltaRuleCase c(problem, static_cast<std::uint64_t>(d + 3 * dv));
      check_every_entry(c);
    }
  for (const int64_t d : {1, 16, 33, 100, 256})  // tiles take 32 at a time
    for (const int64_t dv : {1, 17, 32, 48, 256}) {
      DeltaRuleProblem problem = problem_of("dtype=bf16 t=50 d=1 decay=channel beta state");
      problem.d = d, problem.dv = dv;
      DeltaRuleCase c(problem, static_cast<std::uint64_t>(d + 3 * dv));
      check_every_entry(c);
    }
}

TEST_CASE("delta_rule: values of fp32 beside keys of bf16 are read to their end and no further", "[kernel]") {
  for (const int64_t dv : {8, 16, 48}) {
    DeltaRuleProblem problem = problem_of("dtype=bf16 t=50 d=20 dv=1 decay=channel beta");
    problem.dv = dv;
    DeltaRuleCase c(problem, 3, Placement::back);
    Tensor v(DType::f32, c.v.layout(), Placement::back);
    for (int64_t i = 0; i < v.size(); ++i) v.flat(i) = c.v.flat(i);
    c.v = std::move(v);
    c.protect_inputs();
    check_every_entry(c);
  }
}

TEST_CASE("delta_rule: every number of tokens and strength of decay", "[kernel][long]") {
  for (const int64_t t : {0, 1, 2, 3, 16, 17, 33, 63, 64, 65, 80, 81, 97, 127, 130, 1000})
    for (const Decays decays : kAllDecays)
      for (const char* words :
           {"t=1 d=20 dv=12 decay=channel beta state", "t=1 d=20 dv=12 decay=head beta state",
            "t=1 d=20 dv=12 rule=gated decay=channel state", "dtype=bf16 t=1 d=20 dv=12 decay=channel beta state"}) {
        DeltaRuleProblem problem = problem_of(words);
        problem.t = t;
        INFO("decays " << static_cast<int>(decays));
        DeltaRuleCase c(problem, 7, Placement::heap, Spacing::dense, decays);
        check_every_entry(c);
      }
}

TEST_CASE("delta_rule: errors of long sequences are a few units of fp32, however strong the decay",
          "[kernel][numbers]") {
  for (const Decays decays : kAllDecays)
    for (const char* words :
         {"t=600 d=64 decay=channel beta state", "t=600 d=128 dv=32 decay=head beta state",
          "t=600 d=64 rule=gated decay=channel state", "t=600 d=64 dv=16 decay=channel beta l2norm state"}) {
      DeltaRuleCase c(problem_of(words), 3, Placement::heap, Spacing::dense, decays);
      const DeltaRuleReference reference = c.reference();
      for (const std::string& entry : every_entry(c.problem)) {
        c.clear();
        c.run(forced(entry));
        const Verdict verdict = c.verdict(reference);
        INFO(entry << ": " << c.problem.to_string() << ", decays " << static_cast<int>(decays) << ", "
                   << describe(verdict.errors));
        CHECK(verdict.violation == "");
        CHECK(verdict.errors.rel_frobenius < 6e-7);
      }
    }
}

// flash-linear-attention's tests/ops/test_kda.py and test_gated_delta.py: its sizes, and its 0.005 of the root mean
// square.
TEST_CASE("delta_rule: flash-linear-attention's cases, by its tolerance", "[kernel][numbers]") {
  struct Sizes {
    int64_t t, h, hv, d;
  };
  const auto check = [](const DeltaRuleProblem& problem, Dims starts, float normaliser) {
    DeltaRuleCase c(problem, 42);
    std::mt19937_64 random(42);
    c.beta_sigmoid = c.beta_double = false, c.scale.reset();
    for (Tensor* t : {&c.q, &c.k, &c.v}) fill_normal(*t, std::mt19937_64(random()));
    std::uniform_real_distribution<float> uniform;
    for (int64_t i = 0; i < c.beta.size(); ++i) c.beta.flat(i) = 1 / (1 + std::exp(-uniform(random)));
    for (int64_t i = 0; i < c.g.size(); ++i)
      c.g.flat(i) = -std::log1p(std::exp(-uniform(random))) / normaliser;  // logsigmoid
    DeltaRuleArgs args = c.args();
    const Tensor cu_seqlens = index_tensor(starts, 1, Placement::heap);
    if (!starts.empty()) args.cu_seqlens = cu_seqlens.view();
    const DeltaRuleReference reference = oracle_delta_rule(args, c.initial.view(), {1, 31});
    for (const std::string& entry : every_entry(problem)) {
      if (info_of(entry).phase == Phase::naive) continue;
      c.clear();
      run(args, forced(entry));
      double error = 0, squares = 0;
      for (int64_t i = 0; i < c.out.size(); ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (!reference.computed[at]) continue;
        error += std::pow(static_cast<double>(c.out.flat(i)) - reference.out[at], 2);
        squares += std::pow(reference.out[at], 2);
      }
      INFO(entry << ": " << problem.to_string() << ": " << std::sqrt(error / squares));
      CHECK(squares > 0);
      CHECK(error <= 0.005 * 0.005 * squares);
      double state_error = 0, state_squares = 0;
      for (int64_t i = 0; c.final && i < c.final.size(); ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (!reference.state_computed[at]) continue;
        state_error += std::pow(static_cast<double>(c.final.flat(i)) - reference.state[at], 2);
        state_squares += std::pow(reference.state[at], 2);
      }
      CHECK(state_error <= 0.005 * 0.005 * state_squares);
    }
  };
  DeltaRuleProblem p = problem_of("t=1 d=1 decay=channel beta l2norm state");
  int number = 0;  // of the case: types and decays take turns
  const auto vary = [&] {
    p.dtype = p.out_dtype = number % 2 ? DType::f16 : DType::bf16, p.decay = number % 3 ? Decay::channel : Decay::head;
    ++number;
  };
  for (const Sizes& s : {Sizes{63, 1, 1, 64}, Sizes{500, 3, 3, 60}, Sizes{1000, 3, 3, 64}, Sizes{1024, 4, 4, 100},
                         Sizes{1024, 4, 4, 128}, Sizes{1500, 4, 4, 128}, Sizes{2048, 8, 8, 64}, Sizes{1024, 2, 4, 64},
                         Sizes{1024, 2, 8, 128}, Sizes{160, 2, 4, 64}}) {
    vary();
    p.t = s.t, p.hq = p.hk = s.h, p.hv = s.hv, p.d = p.dv = s.d;
    check(p, {}, s.t % 500 == 0 ? 0.1f : 1);
  }
  p.hq = p.hk = p.hv = 4, p.d = p.dv = 60;
  for (const Dims& starts :
       {Dims{0, 15}, Dims{0, 256, 500, 1000}, Dims{0, 15, 100, 300, 1200, 2000}, Dims{0, 100, 300, 1200, 3000, 4096}}) {
    vary();
    p.b = static_cast<int64_t>(starts.size()) - 1, p.ragged = starts.back(), p.t = 0;
    for (std::size_t i = 1; i < starts.size(); ++i) p.t = std::max(p.t, starts[i] - starts[i - 1]);
    check(p, starts, 1);
  }
}

TEST_CASE("delta_rule: verdicts see what is wrong", "[kernel][long]") {
  const auto violation = [](DeltaRuleCase& c, const std::function<void()>& spoil) {
    c.clear();
    c.run(Context());
    REQUIRE(c.verdict().violation == "");
    spoil();
    return c.verdict().violation;
  };
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    DeltaRuleCase c(problem_of("b=2 hq=2 t=40 d=16 dv=8 decay=channel beta state slots"), seed, Placement::heap,
                    Spacing::gaps);
    const auto largest = [](Tensor& t) {
      int64_t at = 0;
      for (int64_t i = 0; i < t.size(); ++i)
        if (std::fabs(t.flat(i)) > std::fabs(t.flat(at)) || std::isnan(t.flat(at))) at = i;
      return t.flat(at);
    };
    CHECK(violation(c, [&] { largest(c.out) *= 1.0001f; }) != "");
    CHECK(violation(c, [&] { largest(c.out) = kNan; }) != "");
    CHECK(violation(c, [&] { c.out.buffer().data()[4] = std::byte{0}; }) != "");  // between two elements
    if (!c.final) continue;
    CHECK(violation(c, [&] { largest(c.final) *= 1.0001f; }) != "");
    CHECK(violation(c, [&] {  // a slot that is nobody's
            for (int64_t s = 0; s < 5; ++s)
              if (s != c.slot(0) && s != c.slot(1)) c.final.at({s, 0, 0, 0}) = 1;
          }) == "a slot that is nobody's was written");
  }
  // All elements together, by less than any one of them may be off.
  DeltaRuleCase c(problem_of("b=1 hq=2 t=100 d=64 decay=head beta"), 1);
  const DeltaRuleReference reference = c.reference();
  CHECK(violation(c, [&] {
          for (int64_t i = 0; i < c.out.size(); ++i)
            c.out.flat(i) += 5 * static_cast<float>(reference.out_sigma[static_cast<std::size_t>(i)]);
        }).starts_with("relative Frobenius error"));
}
