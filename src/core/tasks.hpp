// Tasks of a call, told to profilers and to the context's observer. A call that nobody watches has no CallTasks: it
// pays for one comparison, and so does each of its workers and items.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/context.hpp"
#include "rapt/task.hpp"

namespace rapt {

class IttCall;

class CallTasks {
 public:
  static bool wanted(const Context::Impl& context) { return context.options.task_observer || has_profiler(); }

  // The call begins, with Kind::validate. `context` outlives this.
  explicit CallTasks(const Context::Impl& context);
  // Profilers get the end of what has begun, also where the call failed.
  ~CallTasks();
  CallTasks(const CallTasks&) = delete;
  CallTasks& operator=(const CallTasks&) = delete;

  void validated();  // Kind::plan begins
  // The entry's work begins. `problem` and `entry` outlive this.
  void planned(const Problem& problem, const std::string& entry, int threads);
  // All is done: Kind::call. cost() is asked for where somebody is told.
  template <class CostOf>
  void done(const CostOf& cost) {
    Task call = task(Task::Kind::call, begin_, now());
    if (!observer_) return;
    call.cost = cost();
    observer_(call);
  }

 private:
  friend class TaskScope;
  static bool has_profiler() noexcept;
  static Task::Time now() { return std::chrono::steady_clock::now(); }
  Task task(Task::Kind kind, Task::Time begin, Task::Time end) const {
    return {kind, number_, *problem_, *entry_, threads_, -1, 0, 0, begin, end, {}};
  }

  const std::function<void(const Task&)>& observer_;  // empty: none
  std::unique_ptr<IttCall> itt_;                      // null: no profiler
  std::uint64_t number_;
  const Problem* problem_ = nullptr;
  const std::string* entry_ = nullptr;
  int threads_ = 0;
  Task::Time begin_ = now(), plan_{};
};

// A task from here to the end of the block, of the worker's thread; none where `call` is null.
class TaskScope {
 public:
  TaskScope(const CallTasks* call, Task::Kind kind, int worker, std::int64_t item = 0, std::int64_t items = 0)
      : call_(call) {
    if (call_) begin(kind, worker, item, items);
  }
  ~TaskScope() {
    if (call_) end();
  }
  TaskScope(const TaskScope&) = delete;
  TaskScope& operator=(const TaskScope&) = delete;

 private:
  void begin(Task::Kind kind, int worker, std::int64_t item, std::int64_t items) noexcept;
  void end() const noexcept;

  const CallTasks* call_;
  Task::Kind kind_;
  int worker_;
  std::int64_t item_, items_;
  Task::Time begin_;
};

}  // namespace rapt
