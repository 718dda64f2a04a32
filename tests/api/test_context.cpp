// Context: executors, threads, allocators, observer, and calls from many places at once.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <mutex>
#include <new>
#include <set>
#include <thread>

#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kLarge = "attention b=2 hq=4 hk=2 sq=256 d=64 causal lse";
constexpr std::int64_t kRowStep = 5;  // the oracle computes every fifth row of it: some of each work item

/// The threads that run workers, by the system's numbers.
std::set<pid_t> threads_of(
    Executor& executor, int workers, const std::function<void()>& inside = [] {}) {
  struct Seen {
    const std::function<void()>& inside;
    std::mutex mutex;
    std::set<pid_t> threads;
  } seen{inside, {}, {}};
  executor.run(
      workers,
      [](void* argument, int) {
        auto& s = *static_cast<Seen*>(argument);
        s.inside();
        const std::lock_guard lock(s.mutex);
        s.threads.insert(gettid());
      },
      &seen);
  return seen.threads;
}

/// Runs `body` on a new thread whose OpenMP team has `threads` threads; false if OpenMP is not there.
bool with_team(int threads, const std::function<void()>& body) {
  const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set == nullptr) return false;
  std::thread([&] {
    set(threads);
    body();
  }).join();
  return true;
}

}  // namespace

TEST_CASE("executors have names and at least one worker", "[api]") {
  CHECK(serial_executor()->name() == "serial");
  CHECK(serial_executor()->concurrency() == 1);
  CHECK(tbb_executor()->name() == "tbb");
  for (const auto& executor : all_executors()) CHECK(executor->concurrency() >= 1);
  CHECK(serial_executor() == serial_executor());
  CHECK(tbb_executor() == tbb_executor());
}

TEST_CASE("executors run every worker once", "[api][threads]") {
  for (const auto& executor : all_executors()) {
    for (int workers : {1, 2, 7}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(workers));
      executor->run(
          workers,
          [](void* argument, int index) {
            ++(*static_cast<std::vector<std::atomic<int>>*>(argument))[static_cast<std::size_t>(index)];
          },
          &calls);
      INFO(executor->name());
      for (const auto& count : calls) CHECK(count == 1);
    }
  }
}

TEST_CASE("an OpenMP runtime that is loaded is found", "[api]") {
  const bool there = dlsym(RTLD_DEFAULT, "GOMP_parallel") != nullptr;
  const auto executor = loaded_openmp_executor();
  REQUIRE((executor != nullptr) == there);
  if (!executor) return;
  CHECK(executor == loaded_openmp_executor());
  CHECK(executor->name().starts_with("openmp (lib"));
  CHECK(executor->name().ends_with(")"));
  ContextOptions options;
  options.executor = executor;
  const Plan plan(AttentionProblem::parse(kLarge), Context(options));
  CHECK(plan.executor() == executor->name());
  CHECK(plan.explain().find("executor   " + std::string(executor->name()) + "\n") != std::string::npos);
}

TEST_CASE("an OpenMP team keeps its threads when a call has fewer workers", "[api][threads]") {
  for (const auto& executor : openmp_executors()) {
    INFO(executor->name());
    const bool run = with_team(4, [&] {
      CHECK(executor->concurrency() == 4);
      const std::set<pid_t> all = threads_of(*executor, 4);
      CHECK(all.size() == 4);
      CHECK(threads_of(*executor, 2).size() == 2);
      CHECK(threads_of(*executor, 9) == all);
    });
    CHECK(run);
  }
}

TEST_CASE("within a parallel region of OpenMP a call is serial", "[api][threads]") {
  Case first(AttentionProblem::parse(kLarge));
  attention(first.args(), forced(usable_entries().front()));
  for (const auto& executor : openmp_executors()) {
    INFO(executor->name());
    const Context context = forced(usable_entries().front(), executor, 4);
    std::mutex mutex;
    int equal = 0, serial = 0;
    with_team(4, [&] {
      const Plan plan(first.args(), context);  // with more threads than it will run on
      CHECK(plan.threads() > 1);
      threads_of(*executor, 4, [&] {
        Case one(AttentionProblem::parse(kLarge)), two(AttentionProblem::parse(kLarge));
        attention(one.args(), context);
        plan.run(two.args());
        const std::set<pid_t> own = threads_of(*executor, 4);
        const std::lock_guard lock(mutex);
        equal += same_bits(one.out, first.out) && same_bits(two.out, first.out);
        serial += executor->concurrency() == 1 && own == std::set{gettid()};
      });
    });
    CHECK(equal == 4);
    CHECK(serial == 4);
  }
}

TEST_CASE("calls at the same time share the CPUs out on OpenMP", "[api][threads]") {
  for (const auto& executor : openmp_executors()) {
    INFO(executor->name());
    std::promise<void> begun, ended;
    const std::shared_future<void> end(ended.get_future());
    std::once_flag once;
    std::thread other([&] {
      with_team(4, [&] {
        threads_of(*executor, 4, [&] {
          std::call_once(once, [&] { begun.set_value(); });
          end.wait();
        });
      });
    });
    begun.get_future().wait();
    with_team(4, [&] { CHECK(threads_of(*executor, 4).size() == 2); });
    with_team(3, [&] { CHECK(threads_of(*executor, 4).size() == 1); });
    ended.set_value();
    other.join();
    with_team(4, [&] { CHECK(threads_of(*executor, 4).size() == 4); });
  }
}

TEST_CASE("a user's executor is used, with no more workers than allowed", "[api][threads]") {
  Case c(AttentionProblem::parse(kLarge));
  const Reference reference = oracle(c.args(), kRowStep);
  for (int threads : {0, 1, 2, 3, 9}) {
    const auto executor = std::make_shared<ThreadExecutor>(4);
    ContextOptions options;
    options.executor = executor;
    options.threads = threads;
    CHECK(run_and_compare(c, Context(options), reference).ok());
    const int expected = threads == 0 ? 4 : std::min(threads, 4);
    CHECK(executor->max_workers <= expected);
    if (expected > 1) CHECK(executor->max_workers == expected);
  }
}

TEST_CASE("a user's executor may run workers one after another", "[api]") {
  class Backwards : public Executor {
    std::string_view name() const noexcept override { return "backwards"; }
    int concurrency() const noexcept override { return 3; }
    void run(int workers, void (*work)(void*, int), void* argument) override {
      for (int i = workers - 1; i >= 0; --i) work(argument, i);
    }
  };
  Case c(AttentionProblem::parse(kLarge));
  ContextOptions options;
  options.executor = std::make_shared<Backwards>();
  CHECK(run_and_compare(c, Context(options), oracle(c.args(), kRowStep)).ok());
}

TEST_CASE("options that make no sense are refused", "[api]") {
  ContextOptions negative;
  negative.threads = -1;
  CHECK(refused_argument([&] { Context{negative}; }) == "threads");
  ContextOptions no_functions;
  no_functions.allocator = Allocator{nullptr, nullptr, nullptr};
  CHECK(refused_argument([&] { Context{no_functions}; }) == "allocator");
}

TEST_CASE("an allocator that fails gives bad_alloc and leaks nothing", "[api]") {
  CountingAllocator allocator;
  Case c(AttentionProblem::parse(kLarge));
  ContextOptions options;
  options.allocator = allocator.get();
  {
    const Context context(options);
    allocator.failing = true;
    CHECK_THROWS_AS(attention(c.args(), context), std::bad_alloc);
    CHECK_THROWS_AS(Plan(c.args(), context).run(c.args()), std::bad_alloc);
    CHECK(allocator.live_bytes == 0);
    allocator.failing = false;  // and the context still works
    CHECK(run_and_compare(c, context, oracle(c.args(), kRowStep)).ok());
    allocator.failing = true;  // memory kept from the call before is enough
    CHECK_NOTHROW(attention(c.args(), context));
  }
  CHECK(allocator.live_bytes == 0);
}

TEST_CASE("memory is asked for with the alignment and freed with the size of its allocation", "[api]") {
  struct Record {
    std::vector<std::pair<void*, std::size_t>> live;
    bool aligned = true, matched = true;
  } record;
  ContextOptions options;
  options.allocator = Allocator{[](void* user, std::size_t bytes, std::size_t alignment) {
                                  auto& r = *static_cast<Record*>(user);
                                  void* data = operator new(bytes, std::align_val_t(alignment));
                                  r.aligned = r.aligned && alignment >= 64;
                                  r.live.emplace_back(data, bytes);
                                  return data;
                                },
                                [](void* user, void* data, std::size_t bytes, std::size_t alignment) noexcept {
                                  auto& r = *static_cast<Record*>(user);
                                  const auto found = std::find(r.live.begin(), r.live.end(), std::pair(data, bytes));
                                  r.matched = r.matched && found != r.live.end();
                                  if (found != r.live.end()) r.live.erase(found);
                                  operator delete(data, std::align_val_t(alignment));
                                },
                                &record};
  {
    const Context context(options);
    for (const char* text : {"attention sq=9 d=16", "attention sq=300 d=128", "attention sq=2 d=8", kLarge}) {
      Case c(AttentionProblem::parse(text));
      attention(c.args(), context);
    }
    CHECK(record.live.size() <= 1);
  }
  CHECK(record.aligned);
  CHECK(record.matched);
  CHECK(record.live.empty());
}

TEST_CASE("the observer sees problem and entry of every call", "[api]") {
  std::vector<std::string> lines;
  ContextOptions options;
  options.observer = [&](std::string_view line) { lines.emplace_back(line); };
  const Context context(options);
  Case c(AttentionProblem::parse("attention hq=4 hk=2 sq=20 sk=40 d=24 causal align=bottom_right"));
  attention(c.args(), context);
  const Plan plan(c.args(), context);
  plan.run(c.args());
  REQUIRE(lines.size() == 2);
  for (const std::string& line : lines) {
    CHECK(line.find(c.problem.to_string()) != std::string::npos);
    CHECK(line.find(plan.entry()) != std::string::npos);
    CHECK(line.find('\n') == std::string::npos);
  }
  AttentionArgs wrong = c.args();
  wrong.q.data = nullptr;
  CHECK_THROWS_AS(attention(wrong, context), Error);
  CHECK(lines.size() == 2);  // refused before dispatch
}

TEST_CASE("copies of a context share its memory and outlive it", "[api]") {
  CountingAllocator allocator;
  ContextOptions options;
  options.allocator = allocator.get();
  Case c(AttentionProblem::parse(kLarge));
  {
    auto original = std::make_unique<Context>(options);
    const Context copy = *original;
    const Plan plan(c.args(), *original);
    attention(c.args(), *original);
    original.reset();
    attention(c.args(), copy);
    plan.run(c.args());
    CHECK(allocator.allocations == 1);
  }
  CHECK(allocator.live_bytes == 0);
}

TEST_CASE("the dense convenience call and the default context", "[api]") {
  Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=20 sk=30 d=16"));
  attention(c.q.view(), c.k.view(), c.v.view(), c.out.mutable_view());
  CHECK(compare(c.args(), oracle(c.args())).ok());
  ScoreSpec causal;
  causal.causal = true;
  causal.align = Align::bottom_right();
  AttentionArgs args = c.args();
  args.score = causal;
  attention(c.q.view(), c.k.view(), c.v.view(), c.out.mutable_view(), causal, default_context());
  CHECK(compare(args, oracle(args)).ok());
}

TEST_CASE("many threads share contexts, plans and inputs", "[api][threads]") {
  const AttentionProblem problem =
      AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=100 d=40 causal sinks bias=qk lse");
  Case first(problem);
  attention(first.args(), forced(usable_entries().front()));
  for (const auto& executor : all_executors()) {
    const Context context = forced(usable_entries().front(), executor, 2);
    const Plan plan(first.args(), context);
    std::vector<Case> cases;
    for (int i = 0; i < 6; ++i) cases.emplace_back(problem);
    std::vector<std::thread> threads;
    for (Case& own : cases) {
      threads.emplace_back([&] {
        AttentionArgs args = first.args();
        args.out = own.out.mutable_view();
        args.lse = own.lse.mutable_view();
        for (int repeat = 0; repeat < 5; ++repeat) {
          attention(args, context);
          plan.run(args);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    INFO(executor->name());
    for (const Case& own : cases) {
      CHECK(same_bits(own.out, first.out));
      CHECK(same_bits(own.lse, first.lse));
    }
  }
}

TEST_CASE("contexts may be made and used on many threads at once", "[api][threads]") {
  const AttentionProblem problem = AttentionProblem::parse("attention hq=2 sq=40 d=16");
  Case first(problem);
  attention(first.args());
  std::mutex mutex;
  int equal = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      Case own(problem);
      attention(own.args(), Context());
      attention(own.args());
      const std::lock_guard lock(mutex);
      equal += same_bits(own.out, first.out);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(equal == 6);
}
