// Calls in a workspace of the caller's take nothing from the heap. A program of its own, as it replaces operator new.
#include <random>

#include "operations/attention/sampler.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/executors.hpp"
#include "support/operator_new.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

thread_local long allocations = 0;

void before_new() {
  ++allocations;
}
void before_delete(void*) noexcept {}

/// Three workers, one after another, that allocate nothing for it.
class InTurn final : public Executor {
 public:
  std::string_view name() const noexcept override { return "in turn"; }
  int concurrency() const override { return 3; }
  void run(int workers, void (*work)(void*, int), void* argument) override {
    for (int i = workers; i-- > 0;) work(argument, i);
  }
};

/// On the caller's thread alone: what oneTBB needs for others is its own.
Context serial() {
  ContextOptions options;
  options.executor = serial_executor();
  return Context(options);
}

template <class Work>
long allocations_of(const Work& work) {
  const long before = allocations;
  work();
  return allocations - before;
}

}  // namespace

TEST_CASE("allocations: a plan that runs in a workspace makes none, attention() its schedule alone", "[api]") {
  std::mt19937_64 random(403);
  for (const auto& executor : {serial_executor(), std::shared_ptr<Executor>(std::make_shared<InTurn>())}) {
    ContextOptions options;
    options.executor = executor;
    const Context context(options);
    for (int i = 0; i < 60; ++i) {
      const AttentionProblem p = sample(random, kEverythingCached);
      Case c(p, 5);
      const AttentionArgs args = c.args();
      const Plan plan(args, context);
      const Buffer memory(plan.workspace_bytes());
      const std::span<std::byte> workspace(memory.data(), plan.workspace_bytes());
      INFO(p.to_string() << " on " << executor->name());
      // Lists of gathered keys that are not full have their lengths kept, and are copied if some have gaps.
      const long lists = !p.gathered ? 0 : allocations_of([&] { AttentionProblem::of(args); });
      CHECK(lists <= 3);
      CHECK(allocations_of([&] { plan.run(args, workspace); }) == lists);
      CHECK(allocations_of([&] { attention(args, context, workspace); }) == lists + 1);
      attention(args, context);  // the context has its workspace now
      CHECK(allocations_of([&] { attention(args, context); }) == lists + 1);
    }
  }
}

TEST_CASE("allocations: full lists of gathered keys need none", "[api]") {
  Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=3 sk=7 d=8 gathered"), 1);
  for (std::int64_t i = 0; i < c.indices.size(); ++i) c.indices.flat<std::int64_t>(i) = i % 7;
  const AttentionArgs args = c.args();
  const Plan plan(args, serial());
  const Buffer memory(plan.workspace_bytes());
  CHECK(allocations_of([&] { plan.run(args, std::span(memory.data(), plan.workspace_bytes())); }) == 0);
}

TEST_CASE("allocations: q, k, v and out of one buffer are told apart without any", "[api]") {
  constexpr std::int64_t b = 2, s = 40, h = 3, d = 16;
  std::vector<float> buffer(static_cast<std::size_t>(4 * b * s * h * d), 0.25f);
  const auto view = [&](std::int64_t which) {
    return MutableTensorView(buffer.data() + which * h * d, {b, h, s, d}, {s * 4 * h * d, d, 4 * h * d, 1});
  };
  const AttentionArgs args{view(0), KvSource::strided(view(1), view(2)), view(3)};
  const Plan plan(args, serial());
  const Buffer memory(plan.workspace_bytes());
  CHECK(allocations_of([&] { plan.run(args, std::span(memory.data(), plan.workspace_bytes())); }) == 0);
}
