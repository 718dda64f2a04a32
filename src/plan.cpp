#include "rapt/plan.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "backend.hpp"
#include "dispatch.hpp"

namespace rapt {
namespace {

// Runs on the context's own memory, or the device's, unless the caller brought some.
void run_call(const Choice& choice, const Schedule& schedule, const Call& call, const Context::Impl& context,
              std::span<std::byte> workspace) {
  if (!workspace.empty()) {
    if (workspace.data() == nullptr) throw Error("workspace", "a null pointer", "memory");
    if (workspace.size() < schedule.workspace_bytes)
      throw Error("workspace", std::to_string(workspace.size()) + " bytes", std::to_string(schedule.workspace_bytes));
    if (reinterpret_cast<std::uintptr_t>(workspace.data()) % 64 != 0)
      throw Error("workspace", "an address that is no multiple of 64", "64-byte alignment");
  }
  if (context.options.observer) context.options.observer(call.problem.to_string() + " -> " + choice.entry->name);
  if (call.problem.b == 0 || call.problem.hq == 0 || call.problem.sq == 0) return;
  if (!workspace.empty() || call.problem.device != DeviceType::cpu)
    return choice.backend->run(*choice.entry, schedule, call, context, workspace.empty() ? nullptr : workspace.data());
  Workspace own = context.borrow(schedule.workspace_bytes);
  choice.backend->run(*choice.entry, schedule, call, context, own.data());
  context.give_back(std::move(own));
}

// Layout and broadcasting do not influence a plan, and a problem written by hand may spell them in several ways.
Problem planned(Problem p) {
  p.layout = Problem::Layout::bhsd;
  p.bias = p.bias == Problem::kNone ? p.bias : 0;
  p.mask = p.mask == Problem::kNone ? p.mask : 0;
  return p;
}

}  // namespace

struct Plan::Impl {
  Context context;
  Problem problem;
  Choice choice;
  std::unique_ptr<Schedule> schedule;
  std::vector<Candidate> candidates;

  Impl(const Problem& given, const Context& on)
      : context(on),
        problem(given),
        choice(dispatch(given, on.impl())),
        schedule(choice.backend->plan(*choice.entry, given, on.impl())),
        candidates(rapt::candidates(given, on.impl())) {}
};

Plan::Plan(const AttentionArgs& args, const Context& context)
    : impl_(std::make_shared<const Impl>(validate(args).problem, context)) {}

Plan::Plan(const Problem& problem, const Context& context)
    : impl_((check(problem), std::make_shared<const Impl>(problem, context))) {}

std::string_view Plan::entry() const noexcept {
  return impl_->choice.entry->name;
}
std::string_view Plan::backend() const noexcept {
  return impl_->choice.backend->name();
}
const Problem& Plan::problem() const noexcept {
  return impl_->problem;
}
std::size_t Plan::workspace_bytes() const noexcept {
  return impl_->schedule->workspace_bytes;
}
int Plan::threads() const noexcept {
  return impl_->schedule->threads;
}
std::string_view Plan::executor() const noexcept {
  return impl_->context.impl().executor().name();
}
std::int64_t Plan::work_items() const noexcept {
  return impl_->schedule->work_items;
}
const std::vector<Candidate>& Plan::candidates() const noexcept {
  return impl_->candidates;
}

std::string Plan::explain() const {
  std::string text = "problem    " + impl_->problem.to_string() + "\nentry      " + std::string(entry()) +
                     "\nbackend    " + std::string(backend()) + "\nschedule   " + impl_->schedule->note() +
                     "\nthreads    " + std::to_string(threads()) +
                     (impl_->problem.device == DeviceType::cpu ? "\nexecutor   " + std::string(executor()) : "") +
                     "\nworkspace  " + std::to_string(workspace_bytes()) + " bytes\n";
  for (const Candidate& c : impl_->candidates) {
    const bool chosen = c.entry == entry();
    text += (chosen ? "  * " : "    ") + c.entry + ": " +
            (chosen              ? "chosen"
             : c.refusal.empty() ? "would do, later in order"
                                 : c.refusal) +
            "\n";
  }
  return text;
}

void Plan::run(const AttentionArgs& args, std::span<std::byte> workspace) const {
  const Call call = validate(args, workspace);
  if (planned(call.problem) != planned(impl_->problem))
    throw Error("args", call.problem.to_string(), "the plan's problem, " + impl_->problem.to_string());
  run_call(impl_->choice, *impl_->schedule, call, impl_->context.impl(), workspace);
}

void attention(const AttentionArgs& args, const Context& context, std::span<std::byte> workspace) {
  const Call call = validate(args, workspace);
  const Choice choice = dispatch(call.problem, context.impl());
  const auto schedule = choice.backend->plan(*choice.entry, call.problem, context.impl());
  run_call(choice, *schedule, call, context.impl(), workspace);
}

std::size_t max_workspace_bytes(const Problem& largest, const Context& context) {
  check(largest);
  // Few rows, few keys and many of both may each have an entry of their own.
  std::size_t bytes = 0;
  Problem p = largest;
  for (const std::int64_t sk : {largest.sk, std::min<std::int64_t>(largest.sk, 1)})
    for (const std::int64_t sq : {largest.sq, std::min<std::int64_t>(largest.sq, 1)}) {
      p.sq = sq, p.sk = sk;
      const Choice choice = dispatch(p, context.impl());
      bytes = std::max(bytes, choice.backend->max_workspace_bytes(*choice.entry, largest, context.impl()));
    }
  return bytes;
}

}  // namespace rapt
