// Tasks: what the threads of a call do, and when.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

#include "rapt/cost.hpp"
#include "rapt/problem.hpp"

namespace rapt {

/// A stretch of time that one thread spends on a call, as ContextOptions::task_observer gets it.
struct Task {
  enum class Kind : std::uint8_t {
    validate,  ///< arguments become a problem
    plan,      ///< dispatch and planning; none of a call by Plan::run()
    worker,    ///< all that one worker does
    item,      ///< work items, one or several in a row; within a worker's task
    combine,   ///< merging splits of some rows: by the worker that finished the last of them, within that item's task;
               ///< or, where few rows have many splits, by all workers after their items, some rows each
    call,      ///< the whole call, and the last of its tasks. On a GPU until its work is queued
  };
  using Time = std::chrono::steady_clock::time_point;

  Kind kind;
  std::uint64_t call;  ///< number of the call in this process
  const Problem& problem;
  std::string_view entry;
  int threads;        ///< workers of the call
  int worker;         ///< from 0; -1 where none has begun
  std::int64_t item;  ///< the first of `items` work items; 0 and 0 where there is none
  std::int64_t items;
  Time begin, end;
  Cost cost;  ///< of the whole call, by cost_of(); 0 on a GPU, and for any other task
};

/// "validate", "plan", "worker", "item", "combine" or "call".
RAPT_API std::string_view to_string(Task::Kind kind) noexcept;

}  // namespace rapt
