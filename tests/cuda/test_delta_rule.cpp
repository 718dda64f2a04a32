// delta_rule on a GPU, beyond what tests of every entry ask.
#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "operations/delta_rule/check.hpp"
#include "streams.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

const char* const kProblems[] = {"dtype=bf16 b=5 hq=2 hv=4 t=1 d=128 decay=head gate beta l2norm state slots",
                                 "b=3 hq=3 t=1 d=60 dv=100 decay=channel gate beta l2norm state",
                                 "dtype=f16 state_dtype=bf16 b=4 hq=4 t=1 d=64 dv=128 decay=channel beta state slots",
                                 "dtype=bf16 b=2 hq=4 hv=8 t=130 d=64 decay=channel gate beta l2norm state",
                                 "b=5 hq=4 t=60 d=128 ragged=160 decay=head beta state slots",
                                 "dtype=bf16 b=3 hq=2 t=75 d=128 decay=head gate beta l2norm state slots",
                                 "b=3 hq=2 t=4 d=48 decay=channel beta state slots steps=4",
                                 "b=2 hq=36 hk=2 t=20 d=200 dv=30 decay=constant rule=gated state"};

// Calls test(entry, case, bits) for the entries on a GPU, with the bits that a call leaves.
void each_case(const std::function<void(const std::string&, DeltaRuleCase&, const DeltaRuleBits&)>& test) {
  for (const char* words : kProblems)
    for (const std::string& entry : every_entry(problem_of(words)))
      for (const std::uint64_t seed : {1, 9}) {  // of 1 states are updated in place, of 9 they are apart
        if (device_of(entry) != DeviceType::cuda) continue;
        DeltaRuleCase c(problem_of(words), seed);
        INFO(entry << ": " << words << ", seed " << seed);
        test(entry, c, bits_on(c, forced(entry)));
      }
}

DeltaRuleBits bits_of(const DeltaRuleCase& c) {
  return {c.out.values(), c.final ? c.final.values() : std::vector<float>()};
}

}  // namespace

TEST_CASE("cuda: delta_rule by a graph, beside other calls, a thousand times", "[kernel]") {
  std::size_t cases = 0, repeated = 0;
  each_case([&](const std::string& entry, DeltaRuleCase& c, const DeltaRuleBits& once) {
    const Stream stream, other;
    ++cases;
    c.clear();
    const DeviceCallOf<DeltaRuleArgs> there(c.args());
    {
      const Graph graph(stream, [&] { delta_rule(there.args(), on(stream, entry)); });
      graph.replay();
      check(cudaStreamSynchronize(stream.handle));
    }
    there.finish();
    CHECK((bits_of(c) == once));
    if (c.in_place) return;  // a second run would go on from the first one's states
    ++repeated;
    DeltaRuleCase busy(c.problem, 7);
    busy.clear();
    const DeviceCallOf<DeltaRuleArgs> beside(busy.args());
    const Context context = on(stream, entry), load = on(other, entry);
    for (int i = 0; i < 1000; ++i) {
      if (i % 4 == 0) delta_rule(beside.args(), load);
      delta_rule(there.args(), context);
      if (i % 250 != 249) continue;
      check(cudaStreamSynchronize(stream.handle));
      c.clear();
      there.finish();
      REQUIRE((bits_of(c) == once));
    }
    check(cudaStreamSynchronize(other.handle));
  });
  CHECK(2 * repeated == cases);
}

TEST_CASE("cuda: delta_rule has one token's bits in both kernels, however states lie", "[kernel]") {
  const std::string decode = "delta_rule_decode.f32.cuda.sm90a", whole = "delta_rule.f32.cuda";
  for (const char* words : kProblems) {
    const DeltaRuleProblem problem = problem_of(words);
    const std::vector<std::string> entries = every_entry(problem);
    if (std::find(entries.begin(), entries.end(), decode) == entries.end()) continue;
    for (const Spacing spacing : {Spacing::dense, Spacing::gaps})
      for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        INFO(words << ", seed " << seed);
        DeltaRuleCase c(problem, seed, Placement::heap, spacing);
        const DeltaRuleBits wanted = bits_on(c, forced(whole));
        CHECK((bits_on(c, forced(decode)) == wanted));
      }
  }
}

TEST_CASE("cuda: delta_rule gives a state the same bits beside few or many others", "[kernel]") {
  // More states than a GPU computes at once: it hands some over within their tokens.
  for (const char* words : {"dtype=bf16 b=9 hq=16 t=50 d=128 decay=channel gate beta l2norm state",
                            "dtype=bf16 b=10 hq=16 t=50 d=40 dv=100 decay=head beta state",
                            "dtype=bf16 b=5 hq=40 t=100 d=20 dv=100 ragged=270 decay=channel gate beta state",
                            "dtype=bf16 b=5 hq=60 t=70 d=100 dv=20 decay=head beta l2norm state",
                            "dtype=bf16 b=3 hq=40 t=100 d=128 ragged=250 decay=channel gate beta l2norm state",
                            "dtype=bf16 b=5 hq=30 t=50 d=64 ragged=130 decay=channel beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      if (device_of(entry) != DeviceType::cuda) continue;
      INFO(entry << ": " << words);
      const Forced context = forced(entry);
      DeltaRuleCase c = case_with_states(problem_of(words), 2, Decays::some);
      const DeltaRuleBits together = bits_on(c, context);
      c.clear();
      for (int64_t i = 0; i < c.problem.b; ++i) run(part_of(c, i, 0, c.length(i)), context);
      CHECK((bits_of(c) == together));
    }
}

TEST_CASE("cuda: delta_rule where products of a token's rows would be out of range", "[kernel]") {
  constexpr int64_t kToken = 21;  // neither the first of its chunk nor the last
  const char* const words = "dtype=bf16 b=1 hq=2 t=70 d=64 dv=72 decay=channel beta state";
  const auto scale_row = [](Tensor& t, float by) {
    for (int64_t i = 0; i < t.layout().shape[3]; ++i) t.at({0, kToken, 0, i}) *= by;
  };
  const std::vector<std::pair<const char*, std::function<void(DeltaRuleCase&)>>> changes = {
      {"growth",
       [](DeltaRuleCase& c) {
         c.g.at({0, kToken, 0, 5}) = 12.f;
       }},
      {"growth, and a decay after it",
       [](DeltaRuleCase& c) {
         c.g.at({0, kToken, 0, 5}) = 40.f, c.g.at({0, kToken + 1, 0, 5}) = -45.f;
       }},
      {"a decay to 0",
       [](DeltaRuleCase& c) {
         c.g.at({0, kToken, 0, 5}) = -std::numeric_limits<float>::infinity();
       }},
      {"a long key", [&](DeltaRuleCase& c) { scale_row(c.k, 50); }},
      {"a huge query", [&](DeltaRuleCase& c) { scale_row(c.q, 0x1p65f); }},
      {"small queries after a strong decay",
       [&](DeltaRuleCase& c) {
         for (int64_t j = 0; j < 64; ++j) c.g.at({0, kToken, 0, j}) = -79.f;
         scale_row(c.q, 0x1p-22f);
       }},
      {"a huge beta", [](DeltaRuleCase& c) {
         c.beta.at({0, kToken, 0}) = 1000.f;
       }}};
  for (const auto& [what, change] : changes)
    for (const std::string& entry : every_entry(problem_of(words))) {
      if (device_of(entry) != DeviceType::cuda) continue;
      INFO(entry << ": " << what);
      DeltaRuleCase c = case_with_states(problem_of(words), 3, Decays::mostly_weak);
      c.beta_sigmoid = c.beta_double = false;
      const std::vector<float> before = bits_on(c, forced(entry)).out;
      change(c);
      const std::vector<float> after = bits_on(c, forced(entry)).out;
      CHECK(c.verdict().violation == "");
      // Earlier tokens and the other head keep their bits.
      for (std::size_t i = 0; i < after.size(); ++i)
        if (const auto at = static_cast<int64_t>(i); at / (2 * 72) < kToken || at / 72 % 2 == 1)
          REQUIRE(after[i] == before[i]);
    }
}

TEST_CASE("cuda: delta_rule where a token writes what no number is large enough for", "[kernel]") {
  const char* const words = "dtype=bf16 b=1 hq=2 t=40 d=64 dv=72 decay=channel beta state";
  for (const std::string& entry : every_entry(problem_of(words))) {
    if (device_of(entry) != DeviceType::cuda) continue;
    INFO(entry);
    DeltaRuleCase c = case_with_states(problem_of(words), 3, Decays::mostly_weak);
    c.beta_sigmoid = false, c.beta_double = true;
    const std::vector<float> before = bits_on(c, forced(entry)).out;
    c.v.at({0, 21, 0, 5}) = 3e38f, c.beta.at({0, 21, 0}) = 1.f;
    const std::vector<float> after = bits_on(c, forced(entry)).out;
    // Earlier tokens and the other head keep their bits.
    for (std::size_t i = 0; i < after.size(); ++i)
      if (const auto at = static_cast<int64_t>(i); at / (2 * 72) < 21 || at / 72 % 2 == 1)
        REQUIRE(after[i] == before[i]);
  }
}

TEST_CASE("cuda: delta_rule of more sequences or heads than a grid has rows", "[kernel]") {
  for (const char* words :
       {"b=70000 hq=1 t=1 d=4 decay=head beta state", "b=1 hq=70000 t=2 d=4 decay=channel beta state"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      if (device_of(entry) != DeviceType::cuda) continue;
      INFO(entry << ": " << words);
      DeltaRuleCase c(problem_of(words), 9);
      c.clear();
      c.run(forced(entry));
      CHECK(c.verdict().violation == "");
    }
}

TEST_CASE("cuda: delta_rule touches no memory that slots and starts out of range name", "[kernel]") {
  for (const char* words :
       {"b=3 hq=2 t=1 d=64 decay=head beta state slots", "b=3 hq=2 t=5 d=64 decay=head beta state slots",
        "b=4 hq=2 t=9 d=20 ragged=20 decay=channel beta state slots",
        "b=3 hq=2 t=4 d=20 decay=head beta state slots steps=4", "b=3 hq=2 t=4 d=20 ragged=9 beta state slots steps=4"})
    for (const std::string& entry : every_entry(problem_of(words))) {
      if (device_of(entry) != DeviceType::cuda) continue;
      INFO(entry << ": " << words);
      DeltaRuleCase c = case_with_states(problem_of(words), 3, Decays::weak);
      const auto set = [](Tensor& t, const std::vector<int64_t>& values) {
        for (int64_t i = 0; i < t.size(); ++i) {
          const int64_t x = values[static_cast<std::size_t>(i) % values.size()];
          if (t.dtype() == DType::i64) t.flat<int64_t>(i) = x;
          else t.flat<std::int32_t>(i) = static_cast<std::int32_t>(x);
        }
      };
      c.clear();
      const std::vector<float> before = c.final.values();
      set(c.state_slots, {1 << 30, -1, 100});
      if (c.accepted) set(c.accepted, {-3, 1 << 30});
      if (c.cu_seqlens) set(c.cu_seqlens, {-5, 7, 3, 1 << 30});
      run(c.args(), forced(entry));  // which looks at the memory around the tensors
      const std::vector<float> after = c.final.values();
      CHECK(std::memcmp(before.data(), after.data(), before.size() * sizeof(float)) == 0);
    }
}
