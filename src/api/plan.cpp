#include "rapt/plan.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "core/float_environment.hpp"
#include "core/tasks.hpp"
#include "dispatch/dispatch.hpp"
#include "guards/guards.hpp"
#include "operations/cost.hpp"

namespace rapt {
namespace {

void check_workspace(std::span<const std::byte> workspace, std::size_t wanted) {
  if (workspace.empty()) return;
  if (workspace.data() == nullptr) throw Error("workspace", "a null pointer", "memory");
  if (workspace.size() < wanted)
    throw Error("workspace", std::to_string(workspace.size()) + " bytes", "at least " + std::to_string(wanted));
  if (reinterpret_cast<std::uintptr_t>(workspace.data()) % 64 != 0)
    throw Error("workspace", "an address that is no multiple of 64", "64-byte alignment");
}

// Runs on the context's own memory, or the device's, unless the caller brought some.
void run_entry(const Entry& entry, const EntryPlan& plan, const Call& call, const Context::Impl& context,
               const CallTasks* tasks, std::span<std::byte> workspace) {
  if (call.is_empty) return;
  if (!workspace.empty() || call.device.type != DeviceType::cpu)
    return entry.run(plan, call, context, tasks, workspace.empty() ? nullptr : workspace.data());
  Workspace borrowed = context.borrow(plan.workspace_bytes);
  entry.run(plan, call, context, tasks, borrowed.data());
  context.give_back(std::move(borrowed));
}

// `tasks` is null, or the call's.
template <class Args>
void run_call(const Entry& entry, const EntryPlan& plan, const Args& args, const Call& call,
              const Context::Impl& context, CallTasks* tasks, std::span<std::byte> workspace) {
  check_workspace(workspace, plan.workspace_bytes);
  if (context.options.observer) context.options.observer(to_string(call.problem) + " -> " + entry.name);
  if (tasks) tasks->planned(call.problem, entry.name, plan.threads);
  const auto run = [&] { run_entry(entry, plan, call, context, tasks, workspace); };
  const auto done = [&] {
    if (tasks) tasks->done([&] { return call.device.type == DeviceType::cpu ? cost_of(args, call) : Cost{}; });
  };
  if (context.guards) context.guards->watch(WatchedCall<Args>{entry, plan, args, call}, run, done);
  else run(), done();
}

// The entry for a problem, and its plan.
std::pair<Choice, std::unique_ptr<EntryPlan>> choose(const Problem& problem, const Context::Impl& context) {
  const FloatEnvironment environment;  // costs are estimated in floating point
  const Choice choice = dispatch(problem, context);
  return {choice, choice.entry->plan(problem, context)};
}

// Calls run(tasks), where `tasks` reports the call's tasks to observers and profilers; null if there are none.
template <class Run>
void with_tasks(const Context::Impl& context, const Run& run) {
  if (!CallTasks::wanted(context)) return run(nullptr);
  CallTasks tasks(context);
  run(&tasks);
}

template <class Args>
void run_once(const Args& args, const Context& context, std::span<std::byte> workspace) {
  with_tasks(context.impl(), [&](CallTasks* tasks) {
    const Call call = validate(args, workspace);
    if (tasks) tasks->validated();
    const auto [choice, plan] = choose(call.problem, context.impl());
    run_call(*choice.entry, *plan, args, call, context.impl(), tasks, workspace);
  });
}

}  // namespace

struct Plan::Impl {
  Context context;
  Problem problem;
  Choice choice;
  std::unique_ptr<EntryPlan> plan;
  std::vector<Candidate> candidates;

  Impl(const Problem& given, const Context& on) : context(on), problem(given) {
    std::tie(choice, plan) = choose(given, on.impl());
    candidates = rapt::candidates(given, on.impl());  // after the OS has been asked
  }

  template <class Args>
  void run(const Args& args, std::span<std::byte> workspace) const {
    with_tasks(context.impl(), [&](CallTasks* tasks) {
      const Call call = validate(args, workspace);
      if (!is_planned(call.problem, problem))
        throw Error("args", to_string(call.problem), "the plan's problem, " + to_string(problem));
      run_call(*choice.entry, *plan, args, call, context.impl(), tasks, workspace);
    });
  }
};

Plan::Plan(const Problem& problem, const Context& context) {
  std::visit([](const auto& p) { check(p); }, problem);
  impl_ = std::make_shared<const Impl>(problem, context);
}

std::string_view Plan::entry() const noexcept {
  return impl_->choice.entry->name;
}
std::string_view Plan::backend() const noexcept {
  return impl_->choice.backend->name;
}
const Problem& Plan::problem() const noexcept {
  return impl_->problem;
}
std::size_t Plan::workspace_bytes() const noexcept {
  return impl_->plan->workspace_bytes;
}
int Plan::threads() const noexcept {
  return impl_->plan->threads;
}
std::string_view Plan::executor() const noexcept {
  return impl_->context.impl().executor().name();
}
std::int64_t Plan::work_items() const noexcept {
  return impl_->plan->work_items;
}
const std::vector<Candidate>& Plan::candidates() const noexcept {
  return impl_->candidates;
}
std::string Plan::explain() const {
  return rapt::explain(impl_->choice, *impl_->plan, impl_->problem, impl_->candidates, impl_->context.impl());
}

#define RAPT_OPERATION(name, Name, NAME)                                                      \
  Plan::Plan(const Name##Args& args, const Context& context)                                  \
      : impl_(std::make_shared<const Impl>(validate(args).problem, context)) {}               \
  void Plan::run(const Name##Args& args, std::span<std::byte> workspace) const {              \
    impl_->run(args, workspace);                                                              \
  }                                                                                           \
  void name(const Name##Args& args, const Context& context, std::span<std::byte> workspace) { \
    run_once(args, context, workspace);                                                       \
  }
#include "rapt/operations.def"

std::size_t max_workspace_bytes(const Problem& largest, const Context& context) {
  std::visit([](const auto& p) { check(p); }, largest);
  std::size_t bytes = 0;
  for (const Problem& corner : corner_problems(largest))
    bytes = std::max(bytes, dispatch(corner, context.impl()).entry->max_workspace_bytes(largest, context.impl()));
  return bytes;
}

}  // namespace rapt
