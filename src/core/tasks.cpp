#include "core/tasks.hpp"

#include <atomic>

#include "core/itt.hpp"

namespace rapt {

std::string_view to_string(Task::Kind kind) noexcept {
  switch (kind) {
    case Task::Kind::validate:
      return "validate";
    case Task::Kind::plan:
      return "plan";
    case Task::Kind::worker:
      return "worker";
    case Task::Kind::item:
      return "item";
    case Task::Kind::combine:
      return "combine";
    case Task::Kind::call:
      return "call";
  }
  return "";
}

bool CallTasks::has_profiler() noexcept {
  return IttCall::is_heard();
}

CallTasks::CallTasks(const Context::Impl& context) : observer_(context.options.task_observer) {
  static std::atomic<std::uint64_t> calls{0};
  number_ = calls.fetch_add(1, std::memory_order_relaxed) + 1;
  if (has_profiler()) itt_ = std::make_unique<IttCall>(number_);
}

CallTasks::~CallTasks() = default;

void CallTasks::validated() {
  plan_ = now();
  if (itt_) itt_->begin_plan();
}

void CallTasks::planned(const Problem& problem, const std::string& entry, int threads) {
  problem_ = &problem, entry_ = &entry, threads_ = threads;
  if (itt_) itt_->begin_work(entry);
  if (!observer_) return;
  const bool has_plan = plan_ != Task::Time{};
  const Task::Time end = now();
  observer_(task(Task::Kind::validate, begin_, has_plan ? plan_ : end));
  if (has_plan) observer_(task(Task::Kind::plan, plan_, end));
}

void TaskScope::begin(Task::Kind kind, int worker, std::int64_t item, std::int64_t items) noexcept {
  kind_ = kind, worker_ = worker, item_ = item, items_ = items;
  if (call_->observer_) begin_ = CallTasks::now();
  if (call_->itt_) call_->itt_->begin_task(kind);
}

void TaskScope::end() const noexcept {
  if (call_->itt_) IttCall::end_task();
  if (!call_->observer_) return;
  Task task = call_->task(kind_, begin_, CallTasks::now());
  task.worker = worker_, task.item = item_, task.items = items_;
  call_->observer_(task);
}

}  // namespace rapt
