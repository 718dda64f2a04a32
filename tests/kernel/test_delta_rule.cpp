// delta_rule on every entry: against float64, and what its bits may not depend on.
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "support/delta_rule_case.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"
#include "support/sampler.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

DeltaRuleProblem problem_of(const std::string& words) {
  return DeltaRuleProblem::parse("delta_rule " + words);
}

/// Every entry, each into fresh poison, within the bounds of float64.
void check_every_entry(DeltaRuleCase& c) {
  std::map<DType, std::optional<DeltaRuleReference>> references;  // by the type of products' operands
  for (const std::string& entry : every_entry(c.problem)) {
    INFO(entry << ": " << c.problem.to_string());
    c.clear();
    c.run(forced(entry));
    std::optional<DeltaRuleReference>& reference = references[c.operands];
    if (!reference) reference = c.reference();
    const Verdict verdict = c.verdict(*reference);
    INFO(describe(verdict.errors));
    REQUIRE(verdict.violation == "");
  }
}

/// The bits of out and of the final state on an entry.
struct Bits {
  std::vector<float> out, state;
  friend bool operator==(const Bits& a, const Bits& b) {
    const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
      return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
    };
    return same(a.out, b.out) && same(a.state, b.state);
  }
};
Bits bits_on(DeltaRuleCase& c, const Context& context) {
  c.clear();
  c.run(context);
  return {c.out.values(), c.final ? c.final.values() : std::vector<float>()};
}

/// The call for tokens [first, first + count) of one sequence, which starts from and leaves its own state.
DeltaRuleArgs part_of(DeltaRuleCase& c, int64_t sequence, int64_t first, int64_t count) {
  DeltaRuleArgs args = c.args();
  const bool ragged = static_cast<bool>(args.cu_seqlens);
  int64_t begin = first;
  for (int64_t i = 0; ragged && i < sequence; ++i) begin += c.length(i);
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.beta}) *t = tokens_of(*t, ragged, sequence, begin, count);
  if (args.g.ndim != 1) args.g = tokens_of(args.g, ragged, sequence, begin, count);
  args.out = tokens_of(args.out, ragged, sequence, begin, count);
  if (args.initial_state) args.initial_state = slice(args.initial_state, 0, sequence, 1);
  if (args.final_state) args.final_state = slice(args.final_state, 0, sequence, 1);
  args.cu_seqlens = {};
  return args;
}

/// A case with an initial and a final state, apart.
DeltaRuleCase case_with_states(const DeltaRuleProblem& problem, std::uint64_t seed, Decays decays) {
  for (;; ++seed) {
    DeltaRuleCase c(problem, seed, Placement::heap, Spacing::dense, decays);
    if (c.initial && c.final && !c.in_place) return c;
  }
}

const char* const kFeatures[] = {
    "t=70 d=24 dv=20 rule=linear",
    "t=70 d=24 dv=20 rule=delta",
    "t=70 d=24 dv=20 rule=delta beta",
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

TEST_CASE("delta_rule: each feature alone, within the bounds of float64", "[kernel]") {
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

TEST_CASE("delta_rule: sampled problems, and nothing outside of the tensors is touched", "[kernel]") {
  std::mt19937_64 random(501);
  for (int i = 0; i < 80; ++i) {
    const DeltaRuleProblem problem = sample_delta_rule(random);
    DeltaRuleCase c(problem, random() % 1000, i % 2 ? Placement::front : Placement::back,
                    i % 3 ? Spacing::gaps : Spacing::dense);
    c.protect_inputs();
    check_every_entry(c);
  }
}

TEST_CASE("delta_rule: every size of d and dv", "[kernel]") {
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

TEST_CASE("delta_rule: every number of tokens and strength of decay", "[kernel]") {
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

TEST_CASE("delta_rule: errors of long sequences are a few units of fp32, however strong the decay", "[kernel]") {
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
TEST_CASE("delta_rule: flash-linear-attention's cases, by its tolerance", "[kernel]") {
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
      if (entry.find("naive") != std::string::npos) continue;
      c.clear();
      delta_rule(args, forced(entry));
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

TEST_CASE("delta_rule: later tokens change no bit of earlier ones", "[kernel]") {
  for (const Decays decays : kAllDecays)
    for (const char* words :
         {"b=1 hq=2 t=140 d=20 dv=24 decay=channel beta", "b=1 hq=4 hk=2 t=140 d=20 dv=24 decay=head beta",
          "b=1 hq=2 t=140 d=20 rule=linear", "dtype=bf16 b=1 hq=4 hk=2 t=140 d=20 dv=24 decay=channel beta"})
      for (const std::string& entry : every_entry(problem_of(words))) {
        const Context context = forced(entry);
        DeltaRuleCase c(problem_of(words), 5, Placement::heap, Spacing::dense, decays);
        const std::vector<float> whole = bits_on(c, context).out;
        const auto row = static_cast<int64_t>(whole.size()) / 140;  // of a token, wherever it lies in memory
        const auto prefix_is = [&](int64_t count, const std::vector<float>& other) {
          return std::memcmp(whole.data(), other.data(), static_cast<std::size_t>(count * row) * sizeof(float)) == 0;
        };
        for (const int64_t cut : {139, 129, 128, 127, 100, 81, 66, 65, 64, 63, 33, 17, 16, 3, 2, 1}) {
          INFO(entry << ": " << words << ", decays " << static_cast<int>(decays) << ", cut at " << cut);
          c.clear();
          delta_rule(part_of(c, 0, 0, cut), context);
          REQUIRE(prefix_is(cut, c.out.values()));
          const float later = cut % 2 ? kNan : 0.7f;
          for (Tensor* t : {&c.q, &c.k, &c.v, &c.g, &c.beta})
            for (int64_t i = t->size() / 140 * cut; i < t->size(); ++i) t->flat(i) = t == &c.g ? -later : later;
          REQUIRE(prefix_is(cut, bits_on(c, context).out));
        }
      }
}

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
      delta_rule(part_of(c, 0, 0, cut), forced(entry));
      CHECK(std::equal(whole.begin(), whole.begin() + cut * problem.dv, c.out.values().begin()));
    }
  }
}

TEST_CASE("delta_rule: decode has the bits of a longer sequence's first token", "[kernel]") {
  for (const char* words :
       {"b=3 hq=2 t=1 d=64 dv=80 decay=channel beta state",
        "b=2 hq=4 hk=2 t=1 d=20 dv=33 decay=head gate beta l2norm state",
        "b=2 hq=2 hk=1 t=1 d=130 dv=256 decay=channel beta state", "b=2 hq=2 t=1 d=17 dv=100 rule=gated decay=constant",
        "dtype=bf16 b=4 hq=2 t=1 d=128 decay=head beta state slots",
        "dtype=bf16 state_dtype=bf16 b=4 hq=2 t=1 d=128 decay=head beta state slots",
        "b=3 hq=2 t=1 d=36 dv=12 ragged=2 beta state"})
    for (const std::string& decode : every_entry(problem_of(words))) {
      if (decode.find("_decode") == std::string::npos) continue;
      std::string prefill = decode;
      prefill.erase(prefill.find("_decode"), 7);
      for (const std::uint64_t seed : {1, 2, 3, 4}) {
        INFO(decode << ": " << words << ", seed " << seed);
        DeltaRuleCase c(problem_of(words), seed);
        CHECK((bits_on(c, forced(decode)) == bits_on(c, forced(prefill))));
      }
    }
}

TEST_CASE("delta_rule: a sequence has the bits that it has alone, ragged or in a batch", "[kernel]") {
  for (const char* words : {"b=5 hq=4 hk=2 t=70 d=20 dv=40 ragged=200 decay=channel beta state",
                            "b=3 hq=2 hv=4 t=67 d=24 decay=head gate beta l2norm state",
                            "dtype=bf16 b=4 hq=2 t=40 d=36 dv=12 ragged=90 decay=constant beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      INFO(entry << ": " << words);
      const Context context = forced(entry);
      DeltaRuleCase c = case_with_states(problem_of(words), 2, Decays::some);
      const Bits together = bits_on(c, context);
      c.clear();
      for (int64_t i = 0; i < c.problem.b; ++i) delta_rule(part_of(c, i, 0, c.length(i)), context);
      CHECK((Bits{c.out.values(), c.final.values()} == together));
    }
}

TEST_CASE("delta_rule: heads that share q, k or v have the bits of copies", "[kernel]") {
  struct Shared {
    const char *words, *copies;
    int64_t q, k, v;  // heads that share one
  };
  for (const Shared& s :
       {Shared{"hq=2 hv=6 t=70 d=20 dv=24 decay=head", "hq=6 t=70 d=20 dv=24 decay=head", 3, 3, 1},
        Shared{"dtype=bf16 hq=2 hv=6 t=70 d=20 decay=head", "dtype=bf16 hq=6 t=70 d=20 decay=head", 3, 3, 1},
        Shared{"hq=4 hk=4 hv=2 t=70 d=20 dv=24 decay=channel", "hq=4 t=70 d=20 dv=24 decay=channel", 1, 1, 2},
        Shared{"hq=1 hk=4 t=70 d=20 dv=24 decay=head", "hq=4 t=70 d=20 dv=24 decay=head", 4, 1, 1}}) {
    DeltaRuleCase few(problem_of(s.words), 9), many(problem_of(s.copies), 9);
    few.scale = many.scale;
    const auto copy = [](Tensor& to, const Tensor& from, int64_t group) {
      const int64_t heads = to.layout().shape[2], size = to.layout().shape[3];
      for (int64_t i = 0; i < to.size(); ++i) {
        const int64_t t = i / size / heads, h = i / size % heads / group;
        to.flat(i) = from.flat((t * (heads / group) + h) * size + i % size);
      }
    };
    copy(many.q, few.q, s.q), copy(many.k, few.k, s.k), copy(many.v, few.v, s.v);
    for (int64_t i = 0; i < few.g.size(); ++i) many.g.flat(i) = few.g.flat(i);
    for (const std::string& entry : every_entry(few.problem)) {
      INFO(entry << ": " << s.words);
      CHECK((bits_on(few, forced(entry)) == bits_on(many, forced(entry))));
    }
  }
  // Query heads of one state.
  DeltaRuleCase few(problem_of("hq=6 hk=2 t=70 d=20 dv=24 decay=head"), 9);
  for (const std::string& entry : every_entry(few.problem)) {
    const std::vector<float> whole = bits_on(few, forced(entry)).out;
    for (int64_t r = 0; r < 3; ++r) {
      INFO(entry << ", query " << r << " of each state");
      DeltaRuleArgs args = few.args();
      args.q = slice(args.q, 2, r, 2), args.out = slice(args.out, 2, r, 2);
      args.q.strides[2] *= 3, args.out.strides[2] *= 3;
      few.clear();
      delta_rule(args, forced(entry));
      const std::vector<float> one = few.out.values();
      for (std::size_t i = 0; i < whole.size(); ++i)
        if (static_cast<int64_t>(i) / 24 % 3 == r) REQUIRE(std::memcmp(&whole[i], &one[i], sizeof(float)) == 0);
    }
  }
}

TEST_CASE("delta_rule: where tensors lie changes no bit", "[kernel]") {
  for (const char* words : {"b=2 hq=2 t=70 d=20 dv=24 decay=channel beta state",
                            "b=3 hq=2 t=3 d=33 dv=17 decay=head beta state slots steps=3"})
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      DeltaRuleCase dense(problem_of(words), seed), gaps(problem_of(words), seed, Placement::heap, Spacing::gaps);
      for (const std::string& entry : every_entry(dense.problem)) {
        INFO(entry << ": " << words << ", seed " << seed);
        const Bits bits = bits_on(dense, forced(entry));
        CHECK((bits_on(gaps, forced(entry)) == bits));
        if (!dense.in_place) continue;
        DeltaRuleArgs args = dense.args();  // from a state of its own
        args.initial_state = dense.initial.view();
        dense.clear();
        delta_rule(args, forced(entry));
        CHECK((Bits{dense.out.values(), dense.final.values()} == bits));
      }
    }
}

TEST_CASE("delta_rule: 1 to 16 threads write the same bits", "[kernel][threads]") {
  const auto executor = std::make_shared<ThreadExecutor>(16);
  for (const char* words : {"hq=2 t=100 d=128 dv=200 decay=channel beta state", "b=3 hq=3 t=40 d=100 decay=head beta",
                            "dtype=bf16 hq=2 t=100 d=128 dv=200 decay=channel beta state",
                            "b=16 hq=2 t=1 d=128 decay=head gate beta state slots"}) {
    DeltaRuleCase c(problem_of(words), 4);
    for (const std::string& entry : {usable_entries(c.problem).front()}) {
      const Bits serial = bits_on(c, forced(entry));
      for (int threads = 1; threads <= 16; ++threads) {
        INFO(entry << " on " << threads << ": " << words);
        REQUIRE((bits_on(c, forced(entry, executor, threads)) == serial));
      }
    }
  }
}

TEST_CASE("delta_rule: a prompt and then one token at a time", "[kernel]") {
  for (const char* words : {"b=2 hq=4 hk=2 t=90 d=20 dv=24 decay=channel beta state",
                            "b=1 hq=2 hv=4 t=90 d=64 decay=head gate beta l2norm state",
                            "dtype=bf16 b=1 hq=2 hv=4 t=90 d=64 decay=head gate beta l2norm state",
                            "b=1 hq=2 t=90 d=17 rule=gated decay=constant state"})
    for (const Decays decays : kAllDecays) {
      DeltaRuleCase c = case_with_states(problem_of(words), 6, decays);
      for (const std::string& entry : every_entry(c.problem)) {
        INFO(entry << ": " << words << ", decays " << static_cast<int>(decays));
        const Context context = forced(entry);
        c.operands = operands_of(entry);
        c.clear();
        for (int64_t b = 0; b < c.problem.b; ++b)
          for (int64_t t = 0; t < 90; t += t < 60 ? 60 : 1) {
            DeltaRuleArgs args = part_of(c, b, t, t < 60 ? 60 : 1);
            if (t > 0) args.initial_state = args.final_state;
            delta_rule(args, context);
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
  const auto call = [&](DeltaRuleCase& c, Tensor& pool, const TensorView& counts, const Context& context,
                        int64_t tokens) {
    DeltaRuleArgs args = c.args();
    for (TensorView* t : {&args.q, &args.k, &args.v, &args.g, &args.beta}) *t = slice(*t, 1, 0, tokens);
    args.out = slice(args.out, 1, 0, tokens);
    args.initial_state = pool.view(), args.final_state = pool.mutable_view();
    args.state_slots = TensorView(slots.data(), {b, n}), args.accepted = counts;
    c.clear();
    delta_rule(args, context);
  };
  for (const std::string& entry : every_entry(draft)) {
    INFO(entry);
    const Context context = forced(entry);
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
    const Context context = forced(entry);
    DeltaRuleArgs args = c.args();
    args.initial_state = args.final_state = {}, args.state_slots = {};
    c.clear();
    delta_rule(args, context);
    const std::vector<float> from_zero = c.out.values();
    for (int64_t i = 0; i < pool.size(); ++i) pool.flat(i) = 3;
    args.initial_state = pool.view(), args.final_state = pool.mutable_view();
    args.state_slots = TensorView(none, {3});
    c.clear();
    delta_rule(args, context);
    CHECK(c.out.values() == from_zero);
    for (int64_t i = 0; i < pool.size(); ++i) REQUIRE(pool.flat(i) == 3);
    args.state_slots = TensorView(slots, {3});
    c.clear();
    delta_rule(args, context);
    const std::vector<float> out = c.out.values();
    constexpr std::size_t kSequence = 5 * 2 * 12;
    for (std::size_t b = 0; b < 3; ++b)
      CHECK((std::memcmp(&out[b * kSequence], &from_zero[b * kSequence], kSequence * sizeof(float)) == 0) == (b == 1));
    for (int64_t i = 0; i < pool.size(); ++i) REQUIRE((pool.flat(i) == 3) == (i / 288 != 4 && i / 288 != 2));
  }
}

TEST_CASE("delta_rule: NaN and Inf stay where the recurrence takes them", "[kernel]") {
  constexpr int64_t t = 70, d = 20, dv = 24;
  enum class In { q, k, v, g, beta };
  for (const char* words :
       {"b=2 hq=2 t=70 d=20 dv=24 decay=channel beta state", "b=2 hq=2 t=70 d=20 dv=24 decay=head beta state",
        "b=2 hq=2 t=70 d=20 dv=24 rule=gated decay=channel state",
        "dtype=bf16 b=2 hq=2 t=70 d=20 dv=24 decay=channel beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      const Context context = forced(entry);
      DeltaRuleCase c = case_with_states(problem_of(words), 1, Decays::mostly_weak);
      c.beta_sigmoid = c.beta_double = false;
      const Bits before = bits_on(c, context);
      for (const In in : {In::q, In::k, In::v, In::g, In::beta})
        for (const int64_t token : {0, 33, 64, 69})
          for (const float value : {kNan, kInf}) {
            constexpr int64_t column = 7;
            if ((value == kInf && in != In::v) || (in == In::beta && !c.beta)) continue;
            Element element = in == In::q              ? c.q.at({1, token, 0, 5})
                              : in == In::k            ? c.k.at({1, token, 0, 5})
                              : in == In::v            ? c.v.at({1, token, 0, column})
                              : in == In::beta         ? c.beta.at({1, token, 0})
                              : c.g.layout().ndim == 4 ? c.g.at({1, token, 0, 5})
                                                       : c.g.at({1, token, 0});
            const float own = element;
            element = value;
            const Bits after = bits_on(c, context);
            element = own;
            INFO(entry << ": " << words << ", in " << static_cast<int>(in) << " at token " << token);
            int64_t reached = 0;
            const auto hit = [&](int64_t b, int64_t at, int64_t h, int64_t j) {
              if (b != 1 || h != 0 || at < token) return false;
              return in == In::q ? at == token : in == In::v ? j == column : true;
            };
            const auto is_right = [](const std::vector<float>& got, const std::vector<float>& was, const auto& harmed) {
              for (std::size_t i = 0; i < got.size(); ++i)
                if (harmed(static_cast<int64_t>(i)) ? std::isfinite(got[i]) : got[i] != was[i]) return false;
              return true;
            };
            CHECK(is_right(after.out, before.out, [&](int64_t i) {
              const bool harmed = hit(i / (t * 2 * dv), i / (2 * dv) % t, i / dv % 2, i % dv);
              reached += harmed;
              return harmed;
            }));
            CHECK(reached > 0);
            Bits kept = after;  // but for rows of a state that only round otherwise: those beside an unknown decay
            const bool rows_apart = c.problem.rule == UpdateRule::gated && (in == In::k || in == In::g);
            const auto of_head = [](int64_t i) { return i / (2 * d * dv) == 1 && i / (d * dv) % 2 == 0; };
            for (std::size_t i = 0; rows_apart && i < kept.state.size(); ++i)
              if (const auto at = static_cast<int64_t>(i); of_head(at) && at / dv % d != 5)
                kept.state[i] = before.state[i];
            CHECK(is_right(kept.state, before.state, [&](int64_t i) {
              if (!of_head(i) || in == In::q) return false;
              return in == In::v ? i % dv == column : !rows_apart || i / dv % d == 5;
            }));
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
      delta_rule(args, forced(entry));
      CHECK((Bits{one.out.values(), one.final.values()} == bits));
    }
  }
}

TEST_CASE("delta_rule: gates of any strength", "[kernel]") {
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
      delta_rule(args, forced(entry));
      INFO(entry << ": g = " << gate.g << ", state " << state);
      CHECK(std::abs(state - gate.state) < 1e-6f);
      CHECK(out == state);
    }
}

TEST_CASE("delta_rule: verdicts see what is wrong", "[kernel]") {
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
