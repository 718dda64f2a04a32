// append_kv, merge_states and select_topk on every entry: against float64; they, rotary_append_kv, attention_backward,
// delta_rule and its gradients, and index_scores on threads and executors, planned and forced.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "rapt/plan.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;

/// What these operations are asked: every way to keep a cache and every type, sizes that leave remainders.
const std::vector<std::string> kAppends = {
    "append_kv b=2 hk=2 n=3 sk=9 d=8",
    "append_kv b=3 hk=2 n=5 sk=40 d=33 dv=17",
    "append_kv b=3 hk=1 n=7 sk=20 d=64 ragged=11",
    "append_kv b=3 hk=2 n=9 sk=64 d=40 page=16",
    "append_kv b=4 hk=2 n=6 sk=24 d=20 dv=12 ragged=13 page=1",
    "append_kv b=3 hk=2 n=4 sk=6 d=16 ring",
    "append_kv b=2 hk=2 n=17 sk=5 d=24 ring",
    "append_kv b=4 hk=1 n=12 sk=5 d=24 ragged=30 ring",
    "append_kv b=2 hk=3 n=4 sk=12 d=48 dv=32 values_are_keys",
    "append_kv b=3 hk=1 n=9 sk=32 d=24 dv=7 ragged=14 page=4 values_are_keys",
    "append_kv b=0 hk=2 n=3 sk=9 d=8",
    "append_kv b=2 hk=0 n=3 sk=9 d=8",
    "append_kv b=2 hk=2 n=0 sk=9 d=8",
};
const std::vector<std::string> kQuantizedAppends = {
    "append_kv kv=i8 b=2 hk=2 n=5 sk=11 d=24 dv=40 groups=1",
    "append_kv kv=i8 b=2 hk=2 n=5 sk=20 d=24 page=4 k_groups=3 v_groups=1 zeros",
    "append_kv kv=i8 b=3 hk=2 n=5 sk=11 d=24 groups=4 zeros given_scales",
    "append_kv kv=i8 b=3 hk=2 n=7 sk=4 d=24 ring groups=1 given_scales",
    "append_kv kv=i4x2 b=2 hk=2 n=5 sk=11 d=24 dv=40 groups=2",
    "append_kv kv=i4x2 b=3 hk=1 n=5 sk=16 d=68 ragged=9 page=8 groups=2 zeros",
    "append_kv kv=i4x2 b=2 hk=2 n=5 sk=11 d=24 groups=1 zeros given_scales",
    "append_kv kv=f8e4m3 b=2 hk=2 n=5 sk=11 d=37 dv=5",
    "append_kv kv=f8e4m3 b=2 hk=2 n=5 sk=12 d=36 page=3 k_groups=4 v_groups=2",
    "append_kv kv=f8e4m3 b=2 hk=2 n=5 sk=11 d=24 groups=3 given_scales",
    "append_kv kv=f8e5m2 b=2 hk=2 n=5 sk=11 d=37 dv=9 values_are_keys",
    "append_kv kv=f8e5m2 b=2 hk=2 n=9 sk=4 d=36 ring groups=2",
    "append_kv kv=f8e5m2 b=4 hk=2 n=5 sk=10 d=24 page=1 groups=1 given_scales",
    "append_kv kv=f8e4m3 b=2 hk=1 n=5 sk=16 d=45 dv=24 page=4 k_groups=5 v_groups=3 tail=5 tail_dtype=bf16 "
    "values_are_keys",
    "append_kv kv=i4x2 b=3 hk=2 n=5 sk=11 d=33 dv=8 ring k_groups=8 v_groups=2 tail=1 zeros values_are_keys",
    "append_kv kv=i8 b=3 hk=2 n=5 sk=11 d=29 dv=12 ragged=9 groups=3 tail=17 tail_dtype=f16 zeros given_scales",
    "append_kv kv=f8e5m2 b=2 hk=2 n=5 sk=11 d=37 dv=9 tail=20 values_are_keys",
};
const std::vector<std::string> kMerges = {
    "merge_states rows=30 dv=64 count=2 lse",  "merge_states rows=7 dv=1 count=1 lse",
    "merge_states rows=60 dv=37 count=9",      "merge_states rows=4 dv=576 count=3 lse",
    "merge_states rows=1 dv=128 count=64 lse", "merge_states rows=0 dv=8 count=2 lse",
};

const std::vector<std::string> kSelections = {
    "select_topk rows=30 sk=300 n=20", "select_topk rows=12 sk=2000 n=900", "select_topk rows=20 sk=33 n=40",
    "select_topk rows=1 sk=100 n=1",   "select_topk rows=0 sk=100 n=10",    "select_topk rows=6 sk=0 n=4",
};

std::vector<AppendKvProblem> appends() {
  std::vector<AppendKvProblem> problems;
  for (const DType dtype : kFloatTypes) {
    for (const std::string& text : kQuantizedAppends) {
      problems.push_back(AppendKvProblem::parse(text));
      problems.back().new_dtype = dtype;
    }
    for (const DType kv : kFloatTypes)
      for (const std::string& text : kAppends) {
        problems.push_back(AppendKvProblem::parse(text));
        problems.back().new_dtype = dtype, problems.back().kv_dtype = kv;
      }
  }
  return problems;
}

std::vector<MergeStatesProblem> merges() {
  std::vector<MergeStatesProblem> problems;
  for (const DType dtype : kFloatTypes)
    for (const DType out : kFloatTypes)
      for (const std::string& text : kMerges) {
        problems.push_back(MergeStatesProblem::parse(text));
        problems.back().dtype = dtype, problems.back().out_dtype = out;
      }
  return problems;
}

/// Calls use(problem) for every problem of these operations.
template <class Use>
void for_each_problem(const Use& use) {
  for (const AppendKvProblem& problem : appends()) use(problem);
  for (const MergeStatesProblem& problem : merges()) use(problem);
  for (const std::string& text : kSelections) use(SelectTopkProblem::parse(text));
}

/// A problem of each operation that is large enough for several workers.
template <class Use>
void for_large_problems(const Use& use) {
  use(AppendKvProblem::parse("append_kv kv=i8 b=3 hk=2 n=300 sk=400 d=128 groups=2 zeros"));
  use(AppendKvProblem::parse("append_kv dtype=bf16 b=5 hk=3 n=200 sk=1024 d=64 ragged=700 page=16"));
  use(AppendKvProblem::parse("append_kv kv=f16 b=2 hk=3 n=700 sk=300 d=64 ring"));
  use(RotaryAppendKvProblem::parse(
      "rotary_append_kv new=bf16 kv=i8 b=3 hk=2 n=100 sk=200 d=64 page=10 groups=2 hq=4 norm"));
  use(RotaryAppendKvProblem::parse("rotary_append_kv b=3 hk=1 n=150 sk=0 d=64 ragged=400 no_cache hq=3 rows"));
  use(MergeStatesProblem::parse("merge_states rows=900 dv=96 count=3 lse"));
  use(MergeStatesProblem::parse("merge_states dtype=bf16 rows=210 dv=512 count=17"));
  use(AttentionBackwardProblem::parse("attention_backward b=2 hq=4 hk=2 sq=200 sk=333 d=40 dlse"));
  use(AttentionBackwardProblem::parse("attention_backward sq=640 d=64 causal bias=qk sinks dbias dsinks"));
  use(AttentionBackwardProblem::parse(
      "attention_backward dtype=bf16 b=3 hq=4 hk=2 sq=150 sk=200 d=64 dv=24 causal align=bottom_right alibi "
      "ragged_q=330 ragged_k=410 dout=f32 dalibi"));
  use(AttentionBackwardProblem::parse("attention_backward hq=2 sq=30 sk=3000 d=64 alibi align=0 dalibi"));
  use(AttentionBackwardProblem::parse(
      "attention_backward b=3 hq=2 sq=300 sk=1500 d=40 ragged_q=400 ragged_k=3000 sinks dsinks"));
  use(AttentionBackwardProblem::parse("attention_backward dtype=bf16 hq=2 sq=100 sk=2500 d=64 sinks dsinks"));
  use(AttentionBackwardProblem::parse(
      "attention_backward dtype=bf16 hq=2 sq=300 sk=500 d=40 causal align=bottom_right softcap=8 alibi dalibi"));
  use(AttentionBackwardProblem::parse("attention_backward b=2 hq=2 sq=3 sk=32769 d=8 seqlens"));
  use(AttentionBackwardProblem::parse("attention_backward b=2 hq=4 hk=2 sq=333 d=40 causal dropout=0.2"));
  use(AttentionBackwardProblem::parse("attention_backward b=2 hq=6 hk=2 sq=50 sk=300 d=40 gathered pool=700 dlse"));
  use(AttentionBackwardProblem::parse(
      "attention_backward dtype=bf16 hq=100 sq=20 hk=1 sk=500 d=64 dv=40 gathered pool=900 sinks dsinks"));
  use(DeltaRuleProblem::parse("delta_rule hq=1 t=60 d=128 dv=256 decay=channel beta state"));
  use(DeltaRuleProblem::parse(
      "delta_rule dtype=bf16 b=3 hq=6 hk=2 hv=6 t=50 d=100 dv=72 decay=head gate beta ragged=90"));
  use(DeltaRuleProblem::parse("delta_rule b=5 hq=2 t=1 d=256 decay=constant state slots steps=2"));
  use(DeltaRuleProblem::parse("delta_rule b=3 hq=2 t=1 d=100 dv=200 decay=channel beta state"));
  use(DeltaRuleBackwardProblem::parse("delta_rule_backward hq=4 t=60 d=64 dv=100 decay=channel beta state"));
  use(DeltaRuleBackwardProblem::parse(
      "delta_rule_backward dtype=bf16 b=3 hq=2 hk=3 hv=6 t=50 d=50 dv=72 decay=head gate beta ragged=90"));
  use(IndexScoresProblem::parse("index_scores b=2 sq=60 sk=300 h=9 d=40 align=bottom_right topk=50 scores"));
  use(IndexScoresProblem::parse("index_scores dtype=bf16 b=3 sq=1 sk=9000 h=32 d=64 align=bottom_right topk=700"));
  use(IndexScoresProblem::parse(
      "index_scores q=bf16 k=f8e4m3 b=3 sq=20 sk=512 h=33 d=128 full linear scales seqlens ranges page=32 topk=64"));
  use(SelectTopkProblem::parse("select_topk rows=40 sk=5000 n=300"));
}

template <class P>
typename CaseOf<P>::type inputs_of(const P& problem, std::uint64_t seed = 1, Placement placement = Placement::heap,
                                   Spacing spacing = Spacing::dense) {
  if constexpr (std::is_same_v<P, AttentionBackwardProblem>) return BackwardCase(problem, seed, placement);
  else return typename CaseOf<P>::type(problem, seed, placement, spacing);
}

std::string chosen(const Problem& problem, const Context& context = Context()) {
  return std::string(Plan(problem, context).entry());
}

Problem parsed(const char* text) {
  return parse_problem(text);
}
const Problem kAppend = parsed("append_kv dtype=bf16 b=2 hk=2 n=1 sk=64 d=64");
const Problem kMerge = parsed("merge_states dtype=bf16 rows=8 dv=64 count=2");
const Problem kAttention = parsed("attention hq=2 sq=64 d=64 dtype=bf16");
const Problem kBackward = parsed("attention_backward hq=2 sq=64 d=64 dtype=bf16");
const Problem kDelta = parsed("delta_rule hq=2 t=8 d=64 beta");
const Problem kIndex = parsed("index_scores sq=8 h=2 d=64 topk=4");
const Problem kSelect = parsed("select_topk rows=8 sk=64 n=4");
const Problem kDeltaBackward = parsed("delta_rule_backward dtype=bf16 hq=2 t=8 d=64 beta");
const std::vector<Problem> kAll = {kAppend, kMerge, kAttention, kBackward, kDelta, kDeltaBackward, kIndex, kSelect};

// The first entry that takes it and need not be forced.
std::string first_choice(const Problem& problem) {
  std::vector<EntryInfo> all = entries();
  std::erase_if(all, [](const EntryInfo& entry) { return !entry.opt_in.empty(); });
  for (const std::string& name : usable_entries(problem))
    if (std::any_of(all.begin(), all.end(), [&](const EntryInfo& entry) { return entry.name == name; })) return name;
  return {};
}

}  // namespace

TEST_CASE("operations: every entry is within the bounds of float64", "[kernel]") {
  const Spacing spacing = GENERATE(Spacing::dense, Spacing::gaps);
  for_each_problem([&](const auto& problem) {
    for (const std::uint64_t seed : {1, 2, 3}) {
      auto inputs = inputs_of(problem, seed, Placement::heap, spacing);
      for (const std::string& entry : every_entry(problem)) {
        INFO(entry << ": " << problem.to_string() << ", seed " << seed);
        inputs.clear();
        inputs.run(forced(entry));
        const Verdict verdict = inputs.verdict();
        INFO(describe(verdict.errors));
        REQUIRE(verdict.violation == "");
      }
    }
  });
}

TEST_CASE("operations: verdicts see what is wrong", "[kernel]") {
  const auto violation = [](auto& inputs, const auto& spoil) {
    inputs.clear();
    inputs.run(Context());
    REQUIRE(inputs.verdict().violation == "");
    spoil();
    return inputs.verdict().violation;
  };
  MergeCase merge(MergeStatesProblem::parse("merge_states rows=30 dv=8 count=2 lse"), 3, Placement::heap,
                  Spacing::gaps);
  CHECK(violation(merge, [&] { merge.out.flat(17) *= 1.001f; }) != "");
  CHECK(violation(merge, [&] { merge.out.flat(17) = NAN; }) != "");
  CHECK(violation(merge, [&] { merge.lse.flat(7) += 1e-3f; }) != "");
  CHECK(violation(merge, [&] { merge.out.buffer().data()[4] = std::byte{0}; }) != "");  // between two elements
  AppendCase append(AppendKvProblem::parse("append_kv kv=i8 b=2 hk=2 n=3 sk=9 d=8 groups=1 zeros tail=2 dv=6"), 4);
  CHECK(violation(append, [&] { append.k.cache.at<std::uint8_t>({0, 0, 0, 0}) ^= 2; }) != "");
  CHECK(violation(append, [&] { append.k.scale.at({0, 0, 0, 0}) *= 1.01f; }) != "");
  CHECK(violation(append, [&] { append.v.cache.at<std::uint8_t>({0, 1, 8, 5}) ^= 1; }) != "");  // no row goes there
  CHECK(violation(append, [&] { append.v.zero.at({0, 1, 8, 0}) = 1; }) != "");
  CHECK(violation(append, [&] { append.tail.at({0, 0, 0, 1}) *= 1.0000002f; }) != "");
  CHECK(violation(append, [&] { append.tail.at({0, 1, 8, 1}) = 1; }) != "");
  AppendCase copy(AppendKvProblem::parse("append_kv b=2 hk=2 n=3 sk=9 d=8"), 4);
  CHECK(violation(copy, [&] { copy.k.cache.at({0, 0, 0, 0}) *= 1.0000002f; }) != "");
  AppendCase given(AppendKvProblem::parse("append_kv kv=f8e4m3 b=2 hk=2 n=3 sk=9 d=8 groups=1 given_scales"), 4);
  CHECK(violation(given, [&] { given.v.scale.flat(0) *= 1.0000002f; }) != "");
}

TEST_CASE("operations: of() describes what a case was made from", "[kernel]") {
  for_each_problem([](auto problem) {
    for (const std::uint64_t seed : {1, 2, 3, 4}) {
      auto inputs = inputs_of(problem, seed, Placement::heap, seed % 2 ? Spacing::gaps : Spacing::dense);
      CHECK(decltype(problem)::of(inputs.args()).to_string() == problem.to_string());
    }
  });
}

TEST_CASE("operations: nothing outside of the tensors is touched", "[kernel]") {
  const Placement placement = GENERATE(Placement::front, Placement::back);
  const Spacing spacing = GENERATE(Spacing::dense, Spacing::gaps);
  for_each_problem([&](const auto& problem) {
    auto inputs = inputs_of(problem, 5, placement, spacing);
    inputs.protect_inputs();
    for (const std::string& entry : every_entry(problem)) {
      INFO(entry << ": " << problem.to_string());
      inputs.clear();
      inputs.run(forced(entry));
      REQUIRE(inputs.verdict().violation == "");
    }
  });
}

TEST_CASE("operations: every ISA writes the same bits", "[kernel]") {
  for_each_problem([](const auto& problem) {
    auto inputs = inputs_of(problem, 6, Placement::heap, Spacing::gaps);
    const std::vector<std::string> entries = usable_entries(problem);
    const std::vector<std::byte> first = bits_on(inputs, forced(entries.front()));
    for (const std::string& entry : entries) {
      INFO(entry << ": " << problem.to_string());
      REQUIRE((bits_on(inputs, forced(entry)) == first));
    }
  });
}

TEST_CASE("operations: executors and thread counts write the same bits", "[kernel][threads][numbers]") {
  int runs = 0;  // executors take turns at one thread
  for_large_problems([&](const auto& problem) {
    auto inputs = inputs_of(problem);
    for (const std::string& entry : threaded_entries(problem)) {
      REQUIRE(CaseOf<std::decay_t<decltype(problem)>>::verify(inputs, forced(entry), 16).violation == "");
      const std::vector<std::byte> serial = bits_on(inputs, forced(entry));
      for (const auto& executor : all_executors()) {
        const int threads = runs++ % 3 == 0 ? 1 : 7;
        INFO(entry << " on " << executor->name() << ", " << threads << ": " << problem.to_string());
        REQUIRE((bits_on(inputs, forced(entry, executor, threads)) == serial));
      }
    }
    const auto executor = std::make_shared<ThreadExecutor>(3);
    bits_on(inputs, forced(usable_entries(problem).front(), executor, 3));
    CHECK(executor->max_workers == 3);
  });
}

TEST_CASE("operations: plans say what runs, and run it", "[kernel][numbers]") {
  std::vector<std::string> lines;
  ContextOptions options;
  options.executor = std::make_shared<ThreadExecutor>(3);
  options.observer = [&](std::string_view line) { lines.emplace_back(line); };
  const Context context(options);
  for_large_problems([&](const auto& problem) {
    auto inputs = inputs_of(problem);
    const std::vector<std::byte> wanted = bits_on(inputs, Context());
    const auto args = inputs.args();
    for (const Plan& plan : {Plan(args, context), Plan(problem, context)}) {
      INFO(plan.explain());
      CHECK(to_string(plan.problem()) == problem.to_string());
      CHECK(plan.entry() == first_choice(problem));
      CHECK(plan.backend() == "cpu");
      CHECK(plan.threads() == 3);
      CHECK(plan.work_items() > 3);
      for (const std::string& word : {problem.to_string(), std::string(plan.entry()), std::string("threads    3"),
                                      std::to_string(plan.workspace_bytes()) + " bytes"})
        CHECK(plan.explain().find(word) != std::string::npos);
      CHECK(plan.candidates().size() >= usable_entries(problem).size());
      for (const Candidate& c : plan.candidates()) {
        const std::string verdict = c.entry == plan.entry() ? "chosen"
                                    : c.refusal.empty()     ? "usable, ranked lower"
                                                            : c.refusal;
        CHECK(plan.explain().find(" " + c.entry + ": " + verdict + "\n") != std::string::npos);
      }
      inputs.clear(), lines.clear();
      plan.run(args);
      CHECK((bits_of(inputs) == wanted));
      REQUIRE(lines.size() == 1);
      CHECK(lines[0] == problem.to_string() + " -> " + std::string(plan.entry()));
    }
    lines.clear();
    inputs.run(context);
    REQUIRE(lines.size() == 1);
    CHECK(lines[0] == problem.to_string() + " -> " + chosen(problem));

    auto other = problem;
    if constexpr (std::is_base_of_v<AppendKvProblem, decltype(other)>) ++other.hk;
    else if constexpr (std::is_same_v<decltype(other), MergeStatesProblem>) ++other.count;
    else if constexpr (std::is_base_of_v<DeltaRuleProblem, decltype(other)>) --other.dv;
    else if constexpr (std::is_same_v<decltype(other), SelectTopkProblem>) ++other.n;
    else ++other.d;
    auto different = inputs_of(other);
    CHECK(refused_argument([&] { Plan(problem, context).run(different.args()); }) == "args");
  });
}

TEST_CASE("operations: a plan refuses the arguments of another operation", "[kernel]") {
  AppendCase append(std::get<AppendKvProblem>(kAppend));
  MergeCase merge(std::get<MergeStatesProblem>(kMerge));
  CHECK(refused_argument([&] { Plan(kAppend).run(merge.args()); }) == "args");
  CHECK(refused_argument([&] { Plan(kMerge).run(append.args()); }) == "args");
  CHECK(refused_argument([&] { Plan(kAttention).run(append.args()); }) == "args");
  BackwardCase backward(std::get<AttentionBackwardProblem>(kBackward));
  CHECK(refused_argument([&] { Plan(kAttention).run(backward.args()); }) == "args");
  CHECK(refused_argument([&] { Plan(kBackward).run(backward.inputs.args()); }) == "args");
  DeltaRuleCase delta(std::get<DeltaRuleProblem>(kDelta));
  CHECK(refused_argument([&] { Plan(kMerge).run(delta.args()); }) == "args");
  CHECK(refused_argument([&] { Plan(kDelta).run(merge.args()); }) == "args");
  DeltaRuleBackwardCase delta_backward(std::get<DeltaRuleBackwardProblem>(kDeltaBackward));
  CHECK(refused_argument([&] { Plan(kDelta).run(delta_backward.args()); }) == "args");
  CHECK(refused_argument([&] { Plan(kDeltaBackward).run(delta.args()); }) == "args");
  IndexScoresCase index(std::get<IndexScoresProblem>(kIndex));
  SelectTopkCase select(std::get<SelectTopkProblem>(kSelect));
  CHECK(refused_argument([&] { Plan(kIndex).run(select.args()); }) == "args");
  CHECK(refused_argument([&] { Plan(kSelect).run(index.args()); }) == "args");
}

TEST_CASE("operations: a caller's workspace is all that is used", "[kernel][long]") {
  CountingAllocator allocator;
  ContextOptions options;
  options.executor = std::make_shared<ThreadExecutor>(3);
  options.allocator = allocator.get();
  for_large_problems([&](const auto& problem) {
    for (const std::string& entry : usable_entries(problem)) {
      options.kernel = entry;
      const Context context(options);
      auto inputs = inputs_of(problem);
      const std::vector<std::byte> wanted = bits_on(inputs, forced(entry));
      const auto args = inputs.args();
      const Plan plan(args, context);
      const std::size_t bytes = plan.workspace_bytes();
      INFO(plan.explain());
      REQUIRE(bytes > 0);
      // Between guard pages, and with bytes of its own behind it.
      Buffer guarded(bytes, Placement::back), behind(bytes + 64);
      std::memset(behind.data(), 0x5a, behind.size());
      REQUIRE(bytes % 64 == 0);  // else the guarded one is not aligned
      const int before = allocator.allocations;
      for (const std::span<std::byte> workspace : {std::span(guarded.data(), bytes), std::span(behind.data(), bytes)}) {
        inputs.clear();
        plan.run(args, workspace);
        CHECK((bits_of(inputs) == wanted));
      }
      CHECK(allocator.allocations == before);
      for (std::size_t i = bytes; i < behind.size(); ++i) REQUIRE(behind.data()[i] == std::byte{0x5a});

      inputs.clear();
      const std::vector<std::byte> untouched = bits_of(inputs);
      const auto refused = [&](std::span<std::byte> workspace) {
        return refused_argument([&] { plan.run(args, workspace); });
      };
      CHECK(refused({behind.data(), bytes - 1}) == "workspace");
      CHECK(refused({behind.data() + 8, bytes}) == "workspace");
      CHECK(refused({static_cast<std::byte*>(nullptr), bytes}) == "workspace");
      Tensor& output = *inputs.outputs().front();  // it may not be where something is written to
      CHECK(refused({output.buffer().data(), bytes}) != "");
      CHECK((bits_of(inputs) == untouched));
    }
  });
}

TEST_CASE("operations: max_workspace_bytes is enough for smaller calls", "[kernel]") {
  ContextOptions options;
  options.executor = std::make_shared<ThreadExecutor>(8);
  const Context context(options);
  for_large_problems([&](const auto& problem) {
    using P = std::decay_t<decltype(problem)>;
    const std::size_t bytes = max_workspace_bytes(problem, context);
    const auto enough = [&](const P& smaller) {
      INFO(smaller.to_string());
      CHECK(Plan(smaller, context).workspace_bytes() <= bytes);
    };
    enough(problem);
    P smaller = problem;
    if constexpr (std::is_base_of_v<AppendKvProblem, P>) {
      for (; smaller.n > 1; smaller.n /= 2) {
        if (smaller.ragged >= 0) smaller.ragged = (smaller.b - 1) * smaller.n;
        enough(smaller);
      }
      smaller.b = 1, smaller.ragged = smaller.ragged >= 0 ? smaller.n : -1;
      enough(smaller);
    } else if constexpr (std::is_same_v<P, AttentionBackwardProblem>) {
      for (const std::int64_t b : {problem.b, std::int64_t{1}})
        for (smaller.sk = problem.sk; smaller.sk >= 0; smaller.sk -= smaller.sk > 20 ? 17 : 1)
          for (smaller.sq = problem.sq; smaller.sq >= 0; smaller.sq -= smaller.sq > 20 ? 13 : 1) {
            smaller.b = b;
            if (smaller.ragged_q >= 0) smaller.ragged_q = std::min(problem.ragged_q, b * smaller.sq);
            if (smaller.ragged_k >= 0) smaller.ragged_k = std::min(problem.ragged_k, b * smaller.sk);
            if (problem.causal && problem.align == AttentionProblem::Align::none && smaller.sq != smaller.sk) continue;
            enough(smaller);
          }
    } else if constexpr (std::is_base_of_v<DeltaRuleProblem, P>) {
      for (smaller.b = problem.b; smaller.b >= 1; --smaller.b)
        for (smaller.t = problem.t; smaller.t >= 0; smaller.t -= smaller.t > 20 ? 17 : 1) {
          if (smaller.ragged >= 0) smaller.ragged = std::min(problem.ragged, smaller.b * smaller.t);
          enough(smaller);
        }
    } else if constexpr (std::is_same_v<P, IndexScoresProblem>) {
      const std::int64_t rows = std::max<std::int64_t>(problem.page_size, 1);
      for (smaller.b = problem.b; smaller.b >= 0; --smaller.b)
        for (smaller.sk = problem.sk; smaller.sk >= 0; smaller.sk -= smaller.sk > 20 * rows ? 17 * rows : rows)
          for (smaller.sq = problem.sq; smaller.sq >= 0; smaller.sq -= smaller.sq > 20 ? 13 : 1) enough(smaller);
    } else if constexpr (std::is_same_v<P, SelectTopkProblem>) {
      for (; smaller.rows > 0; smaller.rows /= 2)
        for (smaller.sk = problem.sk; smaller.sk > 0; smaller.sk /= 2) enough(smaller);
    } else {
      for (; smaller.rows > 1; smaller.rows /= 2) enough(smaller);
      smaller.count = 1;
      enough(smaller);
    }
  });
}

TEST_CASE("operations: a forced entry is forced for its own operation only", "[kernel]") {
  ScopedEnvironment no_isa("RAPT_ISA", nullptr), no_kernel("RAPT_KERNEL", nullptr);
  for (const Problem& problem : kAll) {
    for (const std::string& entry : usable_entries(problem)) {
      INFO(entry);
      const auto check = [&](const Context& context) {
        CHECK(chosen(problem, context) == entry);
        for (const Problem& other : kAll)
          if (operation_of(other) != operation_of(problem)) CHECK(chosen(other, context) == chosen(other));
      };
      check(forced(entry));
      ScopedEnvironment environment("RAPT_KERNEL", entry.c_str());
      const Context from_environment;
      ScopedEnvironment again("RAPT_KERNEL", nullptr);
      check(from_environment);
    }
  }
}

TEST_CASE("operations: a forced ISA without kernels for an operation leaves it those below", "[kernel]") {
  ScopedEnvironment no_kernel("RAPT_KERNEL", nullptr);
  for (const Isa isa : usable_isas()) {
    ScopedEnvironment environment("RAPT_ISA", std::string(to_string(isa)).c_str());
    const Context context;
    Isa wanted = isa;  // or the best one below it that has vector kernels
    for (const Isa below : usable_isas())
      if (wanted >= Isa::avx512bf16 && below < wanted) wanted = below;
    for (const Problem& problem : {kAppend, kMerge, kDelta, kDeltaBackward, kIndex, kSelect})
      CHECK((chosen(problem, context) + ".").find("." + std::string(to_string(wanted)) + ".") != std::string::npos);
    AppendCase append(std::get<AppendKvProblem>(kAppend));
    append.run(context);
    CHECK(append.verdict().violation == "");
    MergeCase merge(std::get<MergeStatesProblem>(kMerge));
    merge.run(context);
    CHECK(merge.verdict().violation == "");
    DeltaRuleCase delta(std::get<DeltaRuleProblem>(kDelta));
    delta.run(context);
    CHECK(delta.verdict().violation == "");
    DeltaRuleBackwardCase delta_backward(std::get<DeltaRuleBackwardProblem>(kDeltaBackward));
    delta_backward.run(context);
    CHECK(delta_backward.verdict().violation == "");
    IndexScoresCase index(std::get<IndexScoresProblem>(kIndex));
    index.run(context);
    CHECK(index.verdict().violation == "");
    SelectTopkCase select(std::get<SelectTopkProblem>(kSelect));
    select.run(context);
    CHECK(select.verdict().violation == "");
  }
}
