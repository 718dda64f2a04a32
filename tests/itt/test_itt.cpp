// What profilers are told by ITT, as a collector of the tests' own hears it.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "collector.hpp"
#include "operations/attention/case.hpp"
#include "rapt/rapt.hpp"
#include "support/catch.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

Context threads(int count) {
  ContextOptions options;
  options.executor = std::make_shared<ThreadExecutor>(count);
  return Context(options);
}

// What the collector was told of call(). The environment is read at the process's first call.
template <class Call>
std::vector<IttEvent> heard(const Call& call) {
  static const auto events = [] {
    ::setenv("INTEL_LIBITTNOTIFY64", RAPT_TEST_COLLECTOR, 1);
    ::setenv("INTEL_ITTNOTIFY_GROUPS", "all", 1);
    return reinterpret_cast<IttEvents>(dlsym(dlopen(RAPT_TEST_COLLECTOR, RTLD_NOW), "rapt_itt_events"));
  }();
  REQUIRE(events != nullptr);
  events();
  call();
  return events();
}

// Names of tasks by thread, each as often as it was; in the order of their ends. Fails where one is left open.
std::map<std::string, int> tasks_of(const std::vector<IttEvent>& events) {
  std::map<std::thread::id, std::vector<std::string>> open;
  std::map<std::string, int> count;
  for (const IttEvent& e : events) {
    if (e.what == "task_begin") open[e.thread].push_back(e.name);
    if (e.what != "task_end") continue;
    REQUIRE(!open[e.thread].empty());
    std::string path;
    for (const std::string& name : open[e.thread]) path += (path.empty() ? "" : " > ") + name;
    ++count[path];
    open[e.thread].pop_back();
  }
  for (const auto& [thread, names] : open) CHECK(names.empty());
  return count;
}

}  // namespace

TEST_CASE("a profiler sees calls by their entries, and what workers did within them", "[itt]") {
  const Context context = threads(3);
  Case c(AttentionProblem::parse("attention b=1 hq=2 sq=1 sk=9000 d=64"));
  const Plan plan(c.args(), context);
  const std::string entry(plan.entry()), worker = entry + ": worker", item = worker + " > " + entry + ": item";
  REQUIRE(plan.threads() == 3);
  const std::vector<IttEvent> events = heard([&] { attention(c.args(), context); });
  const std::map<std::string, int> wanted{{"validate", 1},
                                          {"plan", 1},
                                          {worker, 3},
                                          {item, static_cast<int>(plan.work_items())},
                                          {item + " > " + entry + ": combine", 2}};
  CHECK(tasks_of(events) == wanted);

  const auto is = [](const char* what) { return [what](const IttEvent& e) { return e.what == what; }; };
  const auto begin = std::find_if(events.begin(), events.end(), is("region_begin"));
  REQUIRE(begin != events.end());
  CHECK(begin->name == entry);
  CHECK(begin->id != IttId());
  CHECK((begin - 1)->what == "id_create");
  CHECK((begin - 1)->id == begin->id);
  const auto end = std::find_if(begin, events.end(), is("region_end"));
  REQUIRE(events.end() - end == 2);
  CHECK(end->id == begin->id);
  CHECK((end + 1)->what == "id_destroy");
  CHECK((end + 1)->id == begin->id);
  for (const IttEvent& e : events)
    if (e.what == "task_begin") CHECK(e.parent == (e.name.find(entry) == 0 ? begin->id : IttId()));
}

TEST_CASE("calls that run at once are regions apart", "[itt][threads]") {
  const Context context = threads(2);
  const std::vector<IttEvent> events = heard([&] {
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i)
      callers.emplace_back([&] {
        Case c(AttentionProblem::parse("attention b=1 hq=4 sq=100 d=32"));
        for (int n = 0; n < 5; ++n) attention(c.args(), context);
      });
    for (std::thread& caller : callers) caller.join();
  });
  std::map<IttId, int> open;
  int regions = 0;
  for (const IttEvent& e : events) {
    if (e.what == "region_begin") {
      ++regions;
      CHECK(++open[e.id] == 1);
    }
    if (e.what == "region_end") CHECK(--open[e.id] == 0);
    if (e.what == "task_begin" && e.parent != IttId()) CHECK(open[e.parent] == 1);
  }
  CHECK(regions == 15);
}

TEST_CASE("a profiler gets the end of calls that fail", "[itt]") {
  Case c(AttentionProblem::parse("attention b=1 hq=2 sq=20 d=16"));
  AttentionArgs wrong = c.args();
  wrong.q.data = nullptr;
  CHECK(tasks_of(heard([&] { CHECK_THROWS_AS(attention(wrong), Error); })) ==
        std::map<std::string, int>{{"validate", 1}});

  class Throwing final : public Executor {
    std::string_view name() const noexcept override { return "throwing"; }
    int concurrency() const override { return 2; }
    void run(int, void (*)(void*, int), void*) override { throw std::runtime_error("no threads"); }
  };
  ContextOptions options;
  options.executor = std::make_shared<Throwing>();
  Case large(AttentionProblem::parse("attention b=1 hq=8 sq=200 d=64"));
  const std::vector<IttEvent> events =
      heard([&] { CHECK_THROWS_AS(attention(large.args(), Context(options)), std::runtime_error); });
  CHECK(tasks_of(events) == std::map<std::string, int>{{"validate", 1}, {"plan", 1}});
  CHECK(std::count_if(events.begin(), events.end(), [](const IttEvent& e) { return e.what == "region_end"; }) == 1);
}

TEST_CASE("profiler and observer listen side by side", "[itt]") {
  int calls = 0;
  ContextOptions options;
  options.task_observer = [&](const Task& task) { calls += task.kind == Task::Kind::call; };
  Case c(AttentionProblem::parse("attention b=1 hq=2 sq=20 d=16"));
  CHECK(!heard([&] { attention(c.args(), Context(options)); }).empty());
  CHECK(calls == 1);
}
