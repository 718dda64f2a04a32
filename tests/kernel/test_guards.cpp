// Guards: what they find, that they find nothing where nothing is wrong, and that they change no bit.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "operations/attention/sampler.hpp"
#include "rapt/rapt.hpp"
#include "support/cases.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using Guard = GuardReport::Guard;
using Kind = GuardReport::Kind;

/// Three workers in turn on the calling thread, after which one bit of memory may flip.
class Faulty final : public Executor {
 public:
  std::string_view name() const noexcept override { return "faulty"; }
  int concurrency() const override { return 3; }
  void run(int workers, void (*work)(void*, int), void* argument) override {
    for (int i = 0; i < workers; ++i) work(argument, i);
    if (target) *target ^= mask;
  }

  std::uint8_t* target = nullptr;
  std::uint8_t mask = 0;
};

/// Every guard, and what they say.
struct Watch {
  std::shared_ptr<Faulty> executor = std::make_shared<Faulty>();
  std::vector<GuardReport> reports;

  Context context(const char* words, const std::string& entry = {}) {
    ContextOptions options;
    options.executor = executor;
    options.kernel = entry;
    options.guards = Guards::parse(words);
    options.guards->handler = [this](const GuardReport& report) { reports.push_back(report); };
    return Context(options);
  }
  std::vector<GuardReport> of(Kind kind) const {
    std::vector<GuardReport> found;
    for (const GuardReport& report : reports)
      if (report.kind == kind) found.push_back(report);
    return found;
  }
  /// The one finding that there is.
  GuardReport finding() const {
    const auto found = of(Kind::finding);
    std::string all;
    for (const GuardReport& report : reports) all += to_string(report) + '\n';
    INFO(all);
    REQUIRE(found.size() == 1);
    return found[0];
  }
};

template <class P>
auto inputs_of(const P& problem) {
  return typename CaseOf<P>::type(problem);
}

/// All guards have nothing to say of `problem` on `entry`, and its results are those without them.
template <class P>
void check_silence(const P& problem, const std::string& entry = {}, const char* words = "nan,shadow=6,determinism") {
  Watch watch;
  auto watched = inputs_of(problem), alone = inputs_of(problem);
  watched.run(watch.context(words, entry));
  ContextOptions options;
  options.executor = watch.executor;
  options.kernel = entry;
  alone.run(Context(options));
  INFO(problem.to_string() << " on " << entry);
  for (const GuardReport& report : watch.of(Kind::finding)) FAIL_CHECK(to_string(report));
  const auto a = watched.outputs(), b = alone.outputs();
  for (std::size_t i = 0; i < a.size(); ++i)
    if (*a[i]) CHECK(same_bits(*a[i], *b[i]));
}

/// The finding of one call of `c`, which is that an input or a score is not finite.
template <class Inputs>
GuardReport found_in(Inputs& c, const char* words = "nan,determinism") {
  Watch watch;
  c.run(watch.context(words));
  return watch.finding();
}

using Indices = std::vector<std::int64_t>;

Case attention_case(const std::string& words) {
  return Case(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=5 sk=9 d=8 lse " + words));
}

}  // namespace

TEST_CASE("guards: sampled problems have nothing wrong, and keep their bits", "[guards][long]") {
  std::mt19937_64 random(707);
  SampleOptions options = kEverythingCached;
  options.products = std::int64_t{1} << 18;
  for (int i = 0; i < 24; ++i) {
    const AttentionProblem p = sample(random, options);
    for (const std::string& entry : usable_entries(p))
      if (selected(entry)) check_silence(p, entry);
  }
  options = kEverything;
  options.products = std::int64_t{1} << 16;
  for (int i = 0; i < 4; ++i) {
    const AttentionBackwardProblem p = sample_backward(random, options);
    for (const std::string& entry : usable_entries(p))
      if (selected(entry)) check_silence(p, entry);
    check_silence(sample_delta_rule(random));
    check_silence(sample_delta_rule_backward(random));
    check_silence(sample_index_scores(random));
    check_silence(sample_select_topk(random), "", "determinism");  // NaN is among its scores
  }
  for (const char* text :
       {"append_kv b=2 hk=2 n=3 sk=20 d=8", "append_kv new=f32 kv=i8 b=2 hk=2 n=30 sk=20 d=8 ring groups=2",
        "append_kv dtype=bf16 b=3 hk=2 n=4 sk=40 d=8 page=4 ragged=9"})
    check_silence(AppendKvProblem::parse(text));
  for (const char* text : {"rotary_append_kv new=bf16 kv=i8 b=2 hk=2 n=3 sk=20 d=8 groups=1 hq=4 norm",
                           "rotary_append_kv b=2 hk=2 n=3 sk=0 d=8 hq=2 no_cache positions"})
    check_silence(RotaryAppendKvProblem::parse(text));
  check_silence(MergeStatesProblem::parse("merge_states rows=60 dv=16 count=3 lse"));
}

TEST_CASE("guards: numbers that are not finite are followed to where they first appear", "[guards]") {
  const auto place = [](Case& c) {
    const GuardReport report = found_in(c);
    CHECK(report.guard == Guard::nan);
    CHECK_FALSE(std::isfinite(report.value));
    CHECK(report.seen.tensor == "out");
    return report.place;
  };
  const auto check = [](const GuardReport::Place& found, const char* tensor, const Indices& index) {
    CHECK(found.tensor == tensor);
    CHECK(found.index == index);
  };
  {
    Case c = attention_case("causal align=bottom_right");
    c.q.at({1, 2, 3, 4}) = kInf;
    check(place(c), "q", {1, 2, 3, 4});
  }
  {
    Case c = attention_case("q=f8e4m3 q_scale");
    c.q.at<std::uint8_t>({1, 2, 3, 4}) = 0x7f;
    check(place(c), "q", {1, 2, 3, 4});
  }
  for (const std::uint64_t seed : {2, 3, 4, 5}) {
    // The first two rows see no key.
    Case c(AttentionProblem::parse("attention q=f8e4m3 q_scale b=2 hq=4 hk=2 sq=5 sk=9 d=8 causal align=-2"), seed);
    const auto& shape = c.q_scale.layout().shape;
    const Indices at{shape[0] == 1 ? 0 : 1, 2, shape[2] == 1 ? 0 : 3, 0};
    c.q_scale.at({at[0], 2, at[2], 0}) = kInf;
    check(place(c), "q_scale", at);
  }
  {
    Case c(AttentionProblem::parse("attention q=f8e4m3 q_scale b=2 hq=4 hk=2 sq=5 sk=9 d=8 ragged_q=7"), 3);
    c.q_scale.at({6, 2, 0}) = kNan;
    check(place(c), "q_scale", {6, 2, 0});
  }
  {
    Case c = attention_case("");
    c.k.at({1, 0, 6, 7}) = kNan;
    c.v.at({1, 0, 3, 2}) = kNan;
    check(place(c), "k", {1, 0, 6, 7});
  }
  {
    Case c = attention_case("softcap=3");
    c.v.at({0, 1, 8, 2}) = -kInf;
    const GuardReport report = found_in(c);
    check(report.place, "v", {0, 1, 8, 2});
    CHECK(report.value == -static_cast<double>(kInf));
    CHECK(report.seen.index == Indices{0, 2, 0, 2});
    CHECK(to_string(report).find("nan: v[0, 1, 8, 2] is -inf, first seen in out[0, 2, 0, 2]; attention b=2") == 0);
  }
  {
    Case c = attention_case("bias=hqk");
    c.bias.at({0, 3, 2, 1}) = kNan;
    check(place(c), "score.bias", {0, 3, 2, 1});
  }
  {
    Case c = attention_case("alibi align=bottom_right");
    c.alibi.at({2}) = kNan;
    check(place(c), "score.alibi", {2});
  }
  {
    Case c = attention_case("sinks");
    c.sinks.at({3}) = kNan;
    check(place(c), "score.sinks", {3});
  }
  {
    Case c = attention_case("");  // q.k past the range of fp32
    for (std::int64_t i = 0; i < 8; ++i) c.q.at({1, 3, 4, i}) = 1e30f, c.k.at({1, 1, 5, i}) = 1e30f;
    check(place(c), "scores", {1, 3, 4, 5});
  }
  {
    Case c(AttentionProblem::parse("attention b=1 hq=1 sq=2 d=4 out=f16 lse"));
    for (std::int64_t j = 0; j < 2; ++j) c.v.at({0, 0, j, 3}) = 1e5f;
    const GuardReport report = found_in(c);  // nothing is wrong but the type of out
    check(report.place, "out", {0, 0, 0, 3});
    CHECK(report.seen.tensor.empty());
  }
  {
    Case c(AttentionProblem::parse("attention kv=i8 b=2 hq=2 sq=3 sk=12 d=8 seqlens page=4 groups=2"));
    set_index(c.seqlens, 0, 12);
    const std::int64_t page = index_at(c.block_table, {0, 1});
    c.v_scale.at({page, 1, 3, 1}) = kNan;
    check(place(c), "kv.v_scale", {page, 1, 3, 1});
  }
  {
    Case c(AttentionProblem::parse("attention b=1 hq=2 hk=1 sq=2 sk=3 d=8 gathered"), 1, Placement::heap, 10);
    for (std::int64_t i = 0; i < c.indices.size(); ++i) set_index(c.indices, i, i);
    c.counts = Tensor();
    for (std::int64_t i = 0; i < c.k.size(); ++i) c.k.flat(i) = 1, c.v.flat(i) = 1;
    c.k.at({0, 0, 4, 1}) = kNan;
    check(place(c), "k", {0, 0, 4, 1});
  }
  {
    Case c(AttentionProblem::parse("attention b=3 hq=2 sq=6 sk=7 d=8 ragged_q=9 ragged_k=11"));
    c.k.at({10, 1, 5}) = kNan;
    check(place(c), "k", {10, 1, 5});
  }
}

TEST_CASE("guards: what a call hides may hold anything", "[guards]") {
  Watch watch;
  Case c = attention_case("causal align=bottom_right mask=k");
  const Context context = watch.context("nan");
  for (std::int64_t i = 0; i < 9; ++i) c.mask.flat<bool>(i) = i != 3;
  for (std::int64_t d = 0; d < 8; ++d) c.k.at({0, 0, 3, d}) = kNan, c.v.at({0, 0, 3, d}) = kNan;
  c.run(context);
  CHECK(watch.reports.empty());
}

TEST_CASE("guards: other operations name the input, too", "[guards]") {
  const auto check = [](const GuardReport& report, const char* tensor, const Indices& index) {
    CHECK(report.guard == Guard::nan);
    CHECK(report.place.tensor == tensor);
    CHECK(report.place.index == index);
  };
  {
    BackwardCase c(AttentionBackwardProblem::parse("attention_backward b=2 hq=2 sq=5 sk=6 d=8 causal align=top_left"));
    c.inputs.k.at({0, 1, 5, 0}) = kNan;  // no row sees it
    c.dout.at({1, 0, 4, 3}) = kInf;
    check(found_in(c), "dout", {1, 0, 4, 3});
  }
  {
    AppendCase c(AppendKvProblem::parse("append_kv new=f32 kv=f16 b=2 hk=2 n=3 sk=20 d=8"));
    c.k.fresh.at({1, 0, 2, 3}) = kNan;
    check(found_in(c), "k_new", {1, 0, 2, 3});
  }
  {
    AppendCase c(AppendKvProblem::parse("append_kv new=f32 kv=f16 b=1 hk=1 n=1 sk=20 d=8"));
    c.v.fresh.at({0, 0, 0, 3}) = 1e6f;  // past the end of the type
    const std::int64_t row = index_at(c.seqlens, 0);
    check(found_in(c), "cache.v", {0, 0, row, 3});
  }
  for (const char* tensor : {"q", "k_new"}) {
    RotaryCase c(RotaryAppendKvProblem::parse("rotary_append_kv b=2 hk=2 n=3 sk=20 d=8 hq=2 rotary=4 norm"));
    (tensor == std::string("q") ? c.q : c.append.k.fresh).at({1, 0, 2, 3}) = kNan;
    check(found_in(c), tensor, {1, 0, 2, 3});
  }
  {
    RotaryCase c(RotaryAppendKvProblem::parse("rotary_append_kv b=1 hk=1 n=3 sk=0 d=8 hq=2 rows no_cache"));
    c.cos.at({0, 1, 2}) = kInf;
    check(found_in(c), "cos", {0, 1, 2});
  }
  {
    MergeCase c(MergeStatesProblem::parse("merge_states rows=1 dv=4 count=2 lse"), 2);
    for (Tensor& lse : c.lses)
      for (std::int64_t i = 0; i < lse.size(); ++i) lse.flat(i) = 1;
    for (Tensor& out : c.outs)
      for (std::int64_t i = 0; i < out.size(); ++i) out.flat(i) = 1;
    c.outs[1].flat(3) = kNan;
    const GuardReport report = found_in(c);
    CHECK(report.place.tensor == "outs[1]");
    CHECK(report.place.index.back() == 3);
  }
  {
    DeltaRuleCase c(DeltaRuleProblem::parse("delta_rule b=2 hq=2 t=4 d=8 beta"));
    c.v.flat(5) = kNan;
    CHECK(found_in(c).place.tensor == "v");
  }
  {
    IndexScoresCase c(IndexScoresProblem::parse("index_scores b=1 sq=3 h=2 d=8 sk=6 align=bottom_right topk=2"));
    c.weights.at({0, 2, 1}) = kNan;
    check(found_in(c), "weights", {0, 2, 1});
  }
  {
    IndexScoresCase c(IndexScoresProblem::parse("index_scores b=1 sq=3 h=2 d=8 sk=6 align=bottom_right scores"));
    c.k.at({0, 5, 1}) = kNan;
    check(found_in(c), "k", {0, 5, 1});
  }
  {
    SelectTopkCase c(SelectTopkProblem::parse("select_topk rows=1 sk=9 n=2"), 0);
    c.scores.flat(4) = kNan;
    CHECK(found_in(c).place.index.back() == 4);
  }
}

TEST_CASE("guards: a state that is updated in place is looked at before", "[guards]") {
  std::vector<float> q(8, 0.1f), v(8, 1), out(8), state(64, 0.5f);
  DeltaRuleArgs args;
  args.q = args.k = TensorView(q.data(), {1, 1, 1, 8});
  args.v = TensorView(v.data(), {1, 1, 1, 8});
  args.out = MutableTensorView(out.data(), {1, 1, 1, 8});
  args.final_state = MutableTensorView(state.data(), {1, 1, 8, 8});
  args.initial_state = args.final_state;
  Watch watch;
  const Context context = watch.context("nan,determinism");
  delta_rule(args, context);  // the second run starts from where the first one did
  CHECK(watch.reports.empty());
  state[9] = kNan;
  delta_rule(args, context);
  CHECK(watch.finding().place.tensor == "initial_state");
  CHECK(watch.finding().place.index == Indices{0, 0, 1, 1});
}

TEST_CASE("guards: the shadow sees a result past the contract's bounds", "[guards]") {
  // One row, so that it is looked at. A column of ones, whose sum is no small difference: one bit changes it by a half
  // or more.
  for (const DType dtype : kFloatTypes) {
    Case c(typed("attention b=1 hq=1 sq=1 sk=9000 d=64 lse", dtype));
    for (std::int64_t j = 0; j < 9000; ++j) c.v.at({0, 0, j, 7}) = 1;
    Watch watch;
    const Context context = watch.context("shadow=2");
    REQUIRE(Plan(c.args(), context).threads() > 1);  // else nobody asks the executor
    const std::size_t size = size_of(dtype);
    watch.executor->target = static_cast<std::uint8_t*>(c.out.mutable_view().data) + 7 * size + size - 1;
    watch.executor->mask = 0x02;
    c.run(context);
    const GuardReport report = watch.finding();
    INFO(to_string(report));
    CHECK(report.guard == Guard::shadow);
    CHECK(report.place.tensor == "out");
    CHECK(report.place.index == Indices{0, 0, 0, 7});
    CHECK(report.value == static_cast<double>(c.out.at({0, 0, 0, 7})));
    CHECK(std::abs(report.value - report.wanted) > report.bound);
    CHECK(report.bound > 0);
  }
}

TEST_CASE("guards: the shadow sees a gradient past the contract's bounds", "[guards]") {
  BackwardCase c(AttentionBackwardProblem::parse(
      "attention_backward b=1 hq=2 sq=150 sk=160 d=64 causal align=bottom_right softcap=2 bias=hqk dropout=0.2"));
  Watch watch;
  const Context context = watch.context("shadow=300");
  REQUIRE(Plan(c.args(), context).threads() > 1);
  c.run(context);
  CHECK(watch.reports.empty());
  watch.executor->target = static_cast<std::uint8_t*>(c.dq.mutable_view().data) + (150 + 30) * 64 * 4 + 5 * 4 + 3;
  watch.executor->mask = 0x80;  // its sign
  c.run(context);
  const GuardReport report = watch.finding();
  CHECK(report.place.tensor == "dq");
  CHECK(report.place.index == Indices{0, 1, 30, 5});
  CHECK(std::abs(report.value + report.wanted) < 1e-5);
}

TEST_CASE("guards: the shadow looks at other rows in every call, and at all of them in time", "[guards][long]") {
  Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=64 sk=300 d=32 lse"));
  Watch watch;
  const Context context = watch.context("shadow=16");
  REQUIRE(Plan(c.args(), context).threads() > 1);
  watch.executor->target = static_cast<std::uint8_t*>(c.lse.mutable_view().data) + (1 * 4 + 2) * 64 * 4 + 37 * 4 + 3;
  watch.executor->mask = 0x02;
  for (int i = 0; i < 64; ++i) c.run(context);  // twice as many rows as there are
  REQUIRE(!watch.reports.empty());
  CHECK(std::ssize(watch.reports) <= 4);
  for (const GuardReport& report : watch.reports) {
    CHECK(report.place.tensor == "lse");
    CHECK(report.place.index == Indices{1, 2, 37});
  }
}

TEST_CASE("guards: a tolerance below 1 is an alarm before the bound", "[guards]") {
  Case c(AttentionProblem::parse("attention b=1 hq=2 sq=60 d=32 lse"));
  Watch watch;
  c.run(watch.context("shadow=9"));
  CHECK(watch.reports.empty());
  c.run(watch.context("shadow=9,tolerance=1e-6"));
  CHECK(watch.finding().guard == Guard::shadow);
}

TEST_CASE("guards: a bit that differs in a second run is found", "[guards]") {
  for (const char* text :
       {"attention b=1 hq=4 hk=2 sq=150 sk=200 d=64 causal align=bottom_right lse",
        "attention_backward b=1 hq=2 sq=200 d=64", "merge_states rows=900 dv=64 count=3 lse",
        "delta_rule b=1 hq=4 t=100 d=64 beta state", "delta_rule_backward b=1 hq=4 hv=8 t=60 d=64 beta state",
        "index_scores b=1 sq=2 sk=9000 h=8 d=64 align=bottom_right topk=20", "select_topk rows=90 sk=2000 n=20"}) {
    CAPTURE(text);
    std::visit(
        [&](const auto& p) {
          auto c = inputs_of(p);
          Watch watch;
          const Context context = watch.context("determinism");
          REQUIRE(Plan(Problem(p), context).threads() > 1);
          Tensor& result = *c.outputs()[0];
          watch.executor->target = reinterpret_cast<std::uint8_t*>(result.buffer().data());
          watch.executor->mask = 1;
          c.run(context);
          const GuardReport report = watch.finding();
          CHECK(report.guard == Guard::determinism);
          CHECK(report.place.index == Indices(static_cast<std::size_t>(result.layout().ndim), 0));
          CHECK(report.problem == to_string(Problem(p)));
          CHECK(report.entry == Plan(Problem(p), context).entry());
        },
        parse_problem(text));
  }
}

TEST_CASE("guards: a call on one worker runs again on several", "[guards]") {
  Case c(AttentionProblem::parse("attention b=1 hq=4 hk=2 sq=150 sk=200 d=64 lse"));
  Watch watch;
  CountingAllocator allocator;
  auto* const last = static_cast<std::uint8_t*>(c.out.mutable_view().data) + (4 * 150 * 64 - 1) * sizeof(float);
  ContextOptions options;
  options.executor = watch.executor;
  const Plan several(c.args(), Context(options));  // as the second run's
  options.threads = 1;
  options.task_observer = [&](const Task& task) { *last ^= task.kind == Task::Kind::worker; };
  options.guards = Guards::parse("determinism");
  options.guards->handler = [&](const GuardReport& report) { watch.reports.push_back(report); };
  options.allocator = allocator.get();
  const Context context(options);
  const Plan one(c.args(), context);
  REQUIRE((one.threads() == 1 && several.threads() > 1));
  one.run(c.args());
  CHECK(watch.finding().place.index == Indices{0, 3, 149, 63});  // so that all workers' rows before it are there
  const std::size_t results = (4 * 150 * 64 + 4 * 150) * sizeof(float);
  CHECK(allocator.peak_bytes == one.workspace_bytes() + results + several.workspace_bytes());
}

TEST_CASE("guards say what they do not watch, once of a context or every time", "[guards]") {
  Watch watch;
  const Context context = watch.context("shadow=1,determinism");
  AppendCase c(AppendKvProblem::parse("append_kv b=1 hk=1 n=1 sk=20 d=8"));
  for (int i = 0; i < 3; ++i) c.run(context);
  REQUIRE(watch.reports.size() == 2);
  for (const GuardReport& report : watch.reports) {
    CHECK(report.kind == Kind::not_watched);
    CHECK(to_string(report).find("not watched: " + report.reason) != std::string::npos);
  }
  CHECK(watch.reports[0].guard == Guard::shadow);
  CHECK(watch.reports[1].guard == Guard::determinism);
  MergeCase other(MergeStatesProblem::parse("merge_states rows=2 dv=4 count=2"));
  other.run(context);
  CHECK(watch.reports.size() == 3);

  Case vast = attention_case("");  // all of its rows are past the shadow's bounds, which one report says of each call
  for (std::int64_t i = 0; i < vast.v.size(); ++i) vast.v.flat(i) = 1e31f;
  ContextOptions options;
  options.guards = Guards::parse("shadow=8");
  options.guards->handler = [&](const GuardReport& report) { watch.reports.push_back(report); };
  options.guards->repeat_not_watched = true;
  const Context repeating(options);
  for (int i = 0; i < 2; ++i) vast.run(repeating);
  REQUIRE(watch.reports.size() == 5);
  CHECK(watch.reports[4].kind == Kind::not_watched);
  CHECK(to_string(watch.reports[3]) == to_string(watch.reports[4]));
}

TEST_CASE("guards: what the handler throws, the call throws, with its results and tasks complete", "[guards]") {
  Case c = attention_case(""), alone = attention_case("");
  for (Case* each : {&c, &alone}) each->v.at({0, 0, 0, 0}) = kNan;
  ContextOptions options;
  options.guards = Guards::parse("nan");
  options.guards->handler = [](const GuardReport& report) { throw std::runtime_error(to_string(report)); };
  int calls = 0;
  options.task_observer = [&](const Task& task) { calls += task.kind == Task::Kind::call; };
  CHECK_THROWS_AS(attention(c.args(), Context(options)), std::runtime_error);
  CHECK(calls == 1);
  attention(alone.args());
  CHECK(same_bits(c.out, alone.out));
}

TEST_CASE("guards without a handler write a line on standard error", "[guards]") {
  Case c = attention_case("");
  c.v.at({0, 0, 0, 0}) = kNan;
  const ScopedEnvironment environment("RAPT_GUARDS", "nan");
  const Context context;
  std::FILE* const lines = std::tmpfile();
  REQUIRE(lines != nullptr);
  std::fflush(stderr);
  const int saved = dup(STDERR_FILENO);
  REQUIRE(dup2(fileno(lines), STDERR_FILENO) >= 0);
  attention(c.args(), context);
  std::fflush(stderr);
  dup2(saved, STDERR_FILENO);
  close(saved);
  std::rewind(lines);
  char line[200] = "";
  REQUIRE(std::fgets(line, sizeof line, lines) != nullptr);
  CHECK(std::string(line).find("rapt: nan: v[0, 0, 0, 0] is nan, first seen in out[0, 0, 0, 0]; ") == 0);
  std::fclose(lines);
}

TEST_CASE("guards are asked for in words, which are read loudly", "[guards]") {
  const Guards guards = Guards::parse("determinism,shadow=16,nan,tolerance=0.5");
  CHECK(guards.nan);
  CHECK(guards.shadow == 16);
  CHECK(guards.tolerance == 0.5);
  CHECK(guards.determinism);
  CHECK(to_string(guards) == "nan,shadow=16,tolerance=0.5,determinism");
  CHECK_FALSE(Guards::parse("").any());
  CHECK(to_string(Guards{}).empty());
  for (const char* words :
       {"nans", "shadow", "shadow=", "shadow=x", "shadow=-1", "shadow=1 ", "tolerance=0", "tolerance=nan",
        "nan,,shadow=1", "nan,tolerance=0.1", ",nan", "nan,", ",", "nan,nan", "shadow=2,shadow=3"}) {
    CAPTURE(words);
    CHECK(refused_argument([&] { Guards::parse(words); }) == "guards");
    const ScopedEnvironment environment("RAPT_GUARDS", words);
    CHECK(refused_argument([] { Context(); }) == "RAPT_GUARDS");
    ContextOptions none;
    none.guards = Guards{};  // the environment is not read
    Context{none};
  }
  const auto refusal = [](const char* words) { return refused_text([&] { Guards::parse(words); }); };
  CHECK(refusal("shadow=2,shadow=3") == "guards: \"shadow=2,shadow=3\"; wanted every word once");
  CHECK(refusal("nan,").starts_with("guards: \"nan,\"; wanted nan, shadow=ROWS"));
  CHECK(refusal("shadow=99999999999999999999") ==
        "guards: \"shadow=99999999999999999999\"; wanted rows, from 0 to 2147483647");
  ContextOptions options;
  options.guards = Guards{};
  options.guards->shadow = -1;
  CHECK(refused_argument([&] { Context{options}; }) == "guards");
  const ScopedEnvironment environment("RAPT_GUARDS", "shadow=3");
  CHECK(Guards::of_environment().shadow == 3);
}
