// A tuning changes no bit of a result, and its plans keep to max_workspace_bytes().
#include <cmath>
#include <random>

#include "operations/attention/sampler.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

enum class Draw : std::uint8_t { min, max, random };

/// Every value that plans of the entry have, at an end of its range or anywhere in it.
TuningValues drawn(const EntryInfo& entry, Draw draw, std::mt19937_64& random) {
  TuningValues values = entry.tuning;
  for (const TuningKey& key : tuning_keys()) {
    if (values.*key.value == -1) continue;
    const double share = std::uniform_real_distribution<double>()(random);
    const auto between = static_cast<std::int64_t>(
                             static_cast<double>(key.min + 1) *
                             std::pow(static_cast<double>(key.max + 1) / static_cast<double>(key.min + 1), share)) -
                         1;
    values.*key.value = draw == Draw::min ? key.min : draw == Draw::max ? key.max : between;
  }
  return values;
}

template <class P>
typename CaseOf<P>::type inputs_of(const P& problem) {
  if constexpr (std::is_same_v<P, AttentionBackwardProblem>)
    return BackwardCase(problem, 1, Placement::heap, {}, BackwardCase::Forward::library);
  else return typename CaseOf<P>::type(problem);
}

/// How many plans of all that were tried were not the default's.
struct Tried {
  int plans = 0, changed = 0;
};

template <class P>
void check_bits(const P& problem, std::mt19937_64& random, Tried& tried) {
  auto inputs = inputs_of(problem);
  for (const std::string& entry : threaded_entries(problem)) {
    const EntryInfo info = info_of(entry);
    if (info.phase == Phase::naive || !selected(entry)) continue;  // the naive ones have threads alone, and take long
    ContextOptions options;
    options.executor = std::make_shared<ThreadExecutor>(4);
    options.kernel = entry;
    options.tuning.emplace();
    const Context plain(options);
    const std::vector<std::byte> wanted = bits_on(inputs, plain);
    for (const Draw draw : {Draw::min, Draw::max, Draw::random}) {
      options.tuning->entries = {{entry, drawn(info, draw, random)}};
      const Context tuned(options);
      const Plan plan(problem, tuned);
      INFO(to_string(*options.tuning) << plan.explain());
      CHECK((bits_on(inputs, tuned) == wanted));
      CHECK(max_workspace_bytes(problem, tuned) >= plan.workspace_bytes());
      ++tried.plans, tried.changed += plan.explain() != Plan(problem, plain).explain();
    }
  }
}

}  // namespace

TEST_CASE("tuning: no value changes a bit, whatever the problem", "[kernel][numbers]") {
  std::mt19937_64 random(22);
  Tried tried;
  SampleOptions options = kEverythingCached;
  options.products = std::int64_t{1} << 21;
  for (int i = 0; i < 20; ++i) check_bits(sample(random, options), random, tried);
  options.caches = false;
  for (int i = 0; i < 8; ++i) check_bits(sample_backward(random, options), random, tried);
  for (int i = 0; i < 8; ++i) check_bits(sample_delta_rule(random), random, tried);
  for (int i = 0; i < 3; ++i) check_bits(sample_delta_rule_backward(random), random, tried);
  for (int i = 0; i < 8; ++i) check_bits(sample_index_scores(random), random, tried);
  for (int i = 0; i < 3; ++i) check_bits(sample_select_topk(random), random, tried);
  // Larger ones: several panels to an item, and to a worker; ranges of keys of gradients; lists in several steps;
  // splits.
  for (const char* text :
       {"attention hq=2 sq=700 sk=600 d=32 causal align=bottom_right lse",
        "attention dtype=bf16 hq=2 hk=1 sq=400 sk=500 d=64 lse",
        "attention b=5 hq=2 sq=150 d=32 ragged_q=400 ragged_k=500 lse", "attention hq=16 hk=1 sq=1 sk=4000 d=32 lse",
        "attention dtype=bf16 b=2 hq=4 hk=1 sq=20 sk=1500 d=64 dv=32 lse",
        "attention_backward hq=2 sq=300 sk=1100 d=32 dlse",
        "attention_backward dtype=bf16 hq=2 sq=250 sk=900 d=64 causal align=bottom_right",
        "attention_backward hq=2 sq=20 sk=300 d=32 gathered pool=700",
        "attention_backward dtype=bf16 hq=40 hk=1 sq=6 sk=500 d=32 gathered pool=900",
        "delta_rule dtype=bf16 hq=2 t=150 d=64 dv=200 decay=channel beta state",
        "index_scores dtype=bf16 sq=3 sk=6000 h=8 d=64 align=bottom_right topk=300 scores",
        "append_kv kv=i8 b=3 hk=2 n=200 sk=400 d=64 groups=2", "merge_states dtype=bf16 rows=500 dv=96 count=3 lse",
        "select_topk rows=40 sk=3000 n=300"})
    std::visit([&](const auto& problem) { check_bits(problem, random, tried); }, parse_problem(text));
  INFO(tried.changed << " of " << tried.plans);
  CHECK(tried.changed >= tried.plans / 4);
}
