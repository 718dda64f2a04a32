// The task observer: which tasks a call has, on which threads, and what they say of it.
#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "operations/append_kv/case.hpp"
#include "operations/attention/case.hpp"
#include "operations/attention_backward/case.hpp"
#include "operations/delta_rule_backward/case.hpp"
#include "operations/index_scores/case.hpp"
#include "operations/merge_states/case.hpp"
#include "operations/select_topk/case.hpp"
#include "rapt/rapt.hpp"
#include "support/catch.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using Kind = Task::Kind;

struct Seen {
  Task task;
  std::string problem, entry;
  std::thread::id thread;
};

/// What an observer is told, in the order it is told.
struct Record {
  std::mutex mutex;
  std::vector<Seen> seen;

  Context context(int threads) {
    ContextOptions options;
    options.executor = std::make_shared<ThreadExecutor>(threads);
    options.task_observer = [this](const Task& task) {
      const std::lock_guard lock(mutex);
      seen.push_back({task, to_string(task.problem), std::string(task.entry), std::this_thread::get_id()});
    };
    return Context(options);
  }
  std::vector<Seen> of(Kind kind) const {
    std::vector<Seen> found;
    std::copy_if(seen.begin(), seen.end(), std::back_inserter(found),
                 [&](const Seen& s) { return s.task.kind == kind; });
    return found;
  }
};

bool within(const Task& inner, const Task& outer) {
  return outer.begin <= inner.begin && inner.begin <= inner.end && inner.end <= outer.end;
}

auto inputs_of(const AttentionProblem& p) {
  return Case(p);
}
auto inputs_of(const AttentionBackwardProblem& p) {
  return BackwardCase(p);
}
auto inputs_of(const AppendKvProblem& p) {
  return AppendCase(p);
}
auto inputs_of(const MergeStatesProblem& p) {
  return MergeCase(p);
}
auto inputs_of(const DeltaRuleProblem& p) {
  return DeltaRuleCase(p);
}
auto inputs_of(const DeltaRuleBackwardProblem& p) {
  return DeltaRuleBackwardCase(p);
}
auto inputs_of(const IndexScoresProblem& p) {
  return IndexScoresCase(p);
}
auto inputs_of(const SelectTopkProblem& p) {
  return SelectTopkCase(p);
}

void run(const AttentionArgs& args, const Context& context) {
  attention(args, context);
}
void run(const AttentionBackwardArgs& args, const Context& context) {
  attention_backward(args, context);
}
void run(const AppendKvArgs& args, const Context& context) {
  append_kv(args, context);
}
void run(const MergeStatesArgs& args, const Context& context) {
  merge_states(args, context);
}
void run(const DeltaRuleArgs& args, const Context& context) {
  delta_rule(args, context);
}
void run(const DeltaRuleBackwardArgs& args, const Context& context) {
  delta_rule_backward(args, context);
}
void run(const IndexScoresArgs& args, const Context& context) {
  index_scores(args, context);
}
void run(const SelectTopkArgs& args, const Context& context) {
  select_topk(args, context);
}

// Items of one task that its worker did on its own thread, while it was at work.
void check_items(const Record& record, const Plan& plan) {
  std::map<int, Seen> workers;
  for (const Seen& w : record.of(Kind::worker)) {
    CHECK(w.task.worker >= 0);
    CHECK(w.task.worker < plan.threads());
    CHECK(workers.emplace(w.task.worker, w).second);
  }
  CHECK(std::ssize(workers) == plan.threads());
  std::vector<int> done(static_cast<std::size_t>(plan.work_items()));
  for (const Seen& item : record.of(Kind::item)) {
    REQUIRE(workers.count(item.task.worker) == 1);
    const Seen& worker = workers.at(item.task.worker);
    CHECK(item.thread == worker.thread);
    CHECK(within(item.task, worker.task));
    REQUIRE(item.task.item >= 0);
    REQUIRE(item.task.item + item.task.items <= plan.work_items());
    for (std::int64_t i = 0; i < item.task.items; ++i) ++done[static_cast<std::size_t>(item.task.item + i)];
  }
  CHECK(std::count(done.begin(), done.end(), 1) == plan.work_items());
}

}  // namespace

TEST_CASE("tasks of every operation say what its workers did", "[api][threads]") {
  const char* const text = GENERATE(
      "attention b=1 hq=4 hk=2 sq=150 sk=200 d=64 causal align=bottom_right", "attention b=1 hq=1 sq=20 d=16",
      "attention b=1 hq=1 sq=1 sk=9000 d=64", "attention_backward b=1 hq=2 sq=200 d=64",
      "attention_backward b=1 hq=2 sq=4 sk=2000 d=64", "attention_backward b=1 hq=2 sq=30 sk=40 d=64 gathered pool=100",
      "append_kv new=f32 kv=i8 b=2 hk=4 n=90 sk=100 d=64 groups=1", "merge_states rows=900 dv=64 count=3 lse",
      "delta_rule b=1 hq=4 t=100 d=64 beta state", "delta_rule_backward b=1 hq=4 hv=8 t=60 d=64 beta state",
      "index_scores b=1 sq=2 sk=9000 h=8 d=64 align=bottom_right topk=20", "select_topk rows=90 sk=2000 n=20");
  const int threads = GENERATE(1, 3);
  CAPTURE(text, threads);
  Record record;
  const Context context = record.context(threads);
  const Problem problem = parse_problem(text);
  const Plan plan(problem, context);
  const Cost cost = std::visit(
      [&](const auto& p) {
        auto inputs = inputs_of(p);
        run(inputs.args(), context);
        return cost_of(inputs.args());
      },
      problem);
  check_items(record, plan);

  for (const Kind kind : {Kind::validate, Kind::plan, Kind::call}) CHECK(record.of(kind).size() == 1);
  const Seen& call = record.seen.back();
  CHECK(call.task.kind == Kind::call);
  CHECK(call.thread == std::this_thread::get_id());
  CHECK(call.task.cost.flops == cost.flops);
  CHECK(call.task.cost.bytes == cost.bytes);
  CHECK(cost.bytes > 0);
  for (const Seen& s : record.seen) {
    CHECK(within(s.task, call.task));
    CHECK(s.task.call == call.task.call);
    CHECK(s.task.threads == plan.threads());
    CHECK(s.entry == plan.entry());
    CHECK(parse_problem(s.problem) == problem);
    CHECK((s.task.worker >= 0) ==
          (s.task.kind == Kind::worker || s.task.kind == Kind::item || s.task.kind == Kind::combine));
    if (s.task.kind != Kind::call) CHECK(s.task.cost.bytes == 0);
  }
  CHECK(record.of(Kind::validate)[0].task.end == record.of(Kind::plan)[0].task.begin);
}

TEST_CASE("splits are combined within the item of the last of them", "[api][threads]") {
  for (const char* text : {"attention b=1 hq=2 sq=1 sk=9000 d=64", "attention_backward b=1 hq=2 sq=4 sk=2000 d=64",
                           "index_scores b=1 sq=2 sk=9000 h=8 d=64 align=bottom_right topk=20"}) {
    Record record;
    const Context context = record.context(3);
    std::visit([&](const auto& p) { run(inputs_of(p).args(), context); }, parse_problem(text));
    CAPTURE(text);
    const std::vector<Seen> items = record.of(Kind::item), combines = record.of(Kind::combine);
    CHECK(combines.size() == 2);  // of each head, or query
    for (const Seen& c : combines)
      CHECK(std::count_if(items.begin(), items.end(), [&](const Seen& item) {
              return item.task.worker == c.task.worker && item.thread == c.thread && within(c.task, item.task);
            }) == 1);
  }
}

TEST_CASE("splits of few rows are combined by all workers, some rows each", "[api][threads]") {
  Record record;
  const Context context = record.context(8);
  run(inputs_of(AttentionProblem::parse("attention b=1 hq=64 hk=1 sq=1 sk=8800 d=16 dv=512")).args(), context);
  const std::vector<Seen> items = record.of(Kind::item), combines = record.of(Kind::combine);
  CHECK(combines.size() >= 8);  // 8 rows each, at most
  for (const Seen& c : combines)
    CHECK(std::none_of(items.begin(), items.end(), [&](const Seen& item) {
      return item.task.worker == c.task.worker && within(c.task, item.task);
    }));
}

TEST_CASE("calls of a plan have no task for planning; refused ones have none at all", "[api]") {
  Record record;
  const Context context = record.context(1);
  Case c(AttentionProblem::parse("attention b=1 hq=2 sq=20 d=16"));
  const Plan plan(c.args(), context);
  CHECK(record.seen.empty());
  plan.run(c.args());
  CHECK(record.of(Kind::plan).empty());
  CHECK(record.of(Kind::validate).size() == 1);
  const auto first = record.seen.back().task.call;
  plan.run(c.args());
  CHECK(record.seen.back().task.call > first);
  const std::size_t before = record.seen.size();
  AttentionArgs wrong = c.args();
  wrong.q.data = nullptr;
  CHECK_THROWS_AS(plan.run(wrong), Error);
  CHECK_THROWS_AS(attention(wrong, context), Error);
  CHECK(record.seen.size() == before);
}

TEST_CASE("a call that has nothing to write has tasks, but no workers", "[api]") {
  Record record;
  const Context context = record.context(1);
  Case c(AttentionProblem::parse("attention b=0 hq=2 sq=20 d=16"));
  attention(c.args(), context);
  CHECK(record.of(Kind::worker).empty());
  REQUIRE(!record.seen.empty());
  CHECK(record.seen.back().task.kind == Kind::call);
  CHECK(record.seen.back().task.cost.flops == 0);
}

TEST_CASE("watching changes no bit", "[api][threads]") {
  const AttentionProblem problem = AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=100 d=64 causal lse");
  Record record;
  Case watched(problem), alone(problem);
  attention(watched.args(), record.context(3));
  attention(alone.args());
  CHECK(!record.seen.empty());
  CHECK(same_bits(watched.out, alone.out));
  CHECK(same_bits(watched.lse, alone.lse));
}
