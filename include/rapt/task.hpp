// Tasks: what the threads of a call do, and when.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

#include "rapt/cost.hpp"
#include "rapt/problem.hpp"

namespace rapt {

/// A stretch of time that one thread spends on a call. ContextOptions::task_observer receives them.
struct Task {
  /// The work of a task.
  enum class Kind : std::uint8_t {
    validate,  ///< turns arguments into a problem
    plan,      ///< dispatch and planning; Plan::run() has none
    worker,    ///< everything that one worker does
    item,      ///< one or several consecutive work items; within a worker's task
    combine,   ///< merges splits of some rows: in the worker that finishes the last split, within that item's task; or
               ///< if few rows have many splits, in all workers after their items, some rows each
    call,      ///< the whole call, its last task. On a GPU it ends when the call's work is queued
  };
  using Time = std::chrono::steady_clock::time_point;

  Kind kind;
  std::uint64_t call;  ///< the call's number in this process
  const Problem& problem;
  std::string_view entry;
  int threads;        ///< number of workers of the call
  int worker;         ///< from 0; -1 if none has begun
  std::int64_t item;  ///< the first of `items` work items; both are 0 if there is none
  std::int64_t items;
  Time begin, end;
  Cost cost;  ///< work of the whole call, by cost_of(); 0 on a GPU, and for any other kind of task
};

/// "validate", "plan", "worker", "item", "combine" or "call".
RAPT_API std::string_view to_string(Task::Kind kind) noexcept;

}  // namespace rapt
