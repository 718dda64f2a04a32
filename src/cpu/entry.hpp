// The base of the CPU's entries: an ISA, and workers that share work items.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "core/tasks.hpp"
#include "cpu/machine.hpp"
#include "dispatch/entry.hpp"

namespace rapt::cpu {

// Why the context's cap leaves the ISA out; empty if it does not.
std::string_view refuse_isa(const IsaSupport& support, const Context::Impl& context);

class CpuEntry : public Entry {
 public:
  CpuEntry(const KernelFacts& kernel_facts, const IsaSupport& support);

 protected:
  std::string_view refuse_isa(const Context::Impl& context) const { return cpu::refuse_isa(support_, context); }

  const IsaSupport& support_;
};

// The bytes that a worker moves, and the FLOPs it computes, in about a microsecond.
inline constexpr double kBytesPerUs = 12.8e3, kFlopsPerUs = 1e5;
// Microseconds of work below which waking a worker costs more than it brings; and the work that is worth one.
inline constexpr double kWorkerUs = 10;
inline constexpr double kBytesPerWorker = kBytesPerUs * kWorkerUs, kFlopsPerWorker = kFlopsPerUs * kWorkerUs;
// What a work item may use of L2 for data that it reads repeatedly.
inline constexpr std::size_t item_bytes(std::size_t l2_bytes) {
  return l2_bytes / 2;
}
// The number of workers for work that keeps `useful_workers` busy: at least 1, at most `concurrency` and one per work
// item.
int workers_for(double useful_workers, int concurrency, std::int64_t items);

inline std::size_t whole_lines(std::size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// Progress of a part of a call that other workers wait for, in steps from 0. (The exchange is a full fence, which
// notify_all() needs before it checks for waiters.)
inline void wait_for(std::int32_t& progress, std::int64_t steps) {
  const std::atomic_ref done(progress);
  for (std::int32_t now; (now = done.load(std::memory_order_acquire)) < steps;)
    done.wait(now, std::memory_order_acquire);
}
inline void advance(std::int32_t& progress, std::int64_t steps) {
  const std::atomic_ref done(progress);
  done.exchange(static_cast<std::int32_t>(steps), std::memory_order_acq_rel);
  done.notify_all();
}

// Counts one more of `all` parts as done. Returns true to the worker that finished the last one.
inline bool completes(std::int32_t& parts_done, std::int64_t all) {
  return std::atomic_ref(parts_done).fetch_add(1, std::memory_order_acq_rel) + 1 == all;
}

// Adds the entries of an operation, in the order of preference, to the backend's.
using Entries = std::vector<std::unique_ptr<const Entry>>;
#define RAPT_OPERATION(name, Name, NAME) void add_##name(const CpuMachine& machine, Entries& entries);
#include "rapt/operations.def"

// Calls workers.work(i) for i in [0, threads) on the context's executor; each is a task of the call.
template <class Workers>
void run_workers(Workers& workers, int threads, const Context::Impl& context, const CallTasks* tasks) {
  struct Shared {
    Workers& workers;
    const CallTasks* tasks;
  } shared{workers, tasks};
  const auto work = [](void* argument, int worker) {
    const Shared& s = *static_cast<Shared*>(argument);
    const TaskScope task(s.tasks, Task::Kind::worker, worker);
    s.workers.work(worker);
  };
  if (threads == 1) return work(&shared, 0);
  context.executor().run(threads, work, &shared);
}

// Into how many chunks a worker's share of work items that are all alike is cut, so that workers finish together.
inline constexpr std::int64_t kChunksPerWorker = 4;

// The work of a problem whose work items are all alike, so that any worker may do them in any order.
struct StreamWork {
  std::int64_t items;
  double bytes;               // bytes read and written, or that could be in the time that arithmetic takes
  std::size_t scratch_bytes;  // of one worker
};

// The plan of such a problem. Each worker moves kBytesPerWorker or more.
struct StreamPlan final : EntryPlan {
  std::int64_t items_per_chunk = 1;  // work items that a worker takes at a time
  std::size_t scratch_bytes = 0;     // of one worker

  StreamPlan(const StreamWork& work, int concurrency);
  std::string note() const override;
};

// Calls run(begin, end, scratch) for ranges of the plan's items, on its workers.
template <class Run>
void run_stream(const StreamPlan& plan, const Context::Impl& context, const CallTasks* tasks, std::byte* workspace,
                const Run& run) {
  struct StreamWorkers {
    const StreamPlan& plan;
    const Run& run;
    std::byte* workspace;
    const CallTasks* tasks;
    std::atomic<std::int64_t> next{0};

    void work(int worker) {
      std::byte* const scratch = workspace + static_cast<std::size_t>(worker) * plan.scratch_bytes;
      const std::int64_t step = plan.threads == 1 ? plan.work_items : plan.items_per_chunk;
      for (std::int64_t i; (i = next.fetch_add(step, std::memory_order_relaxed)) < plan.work_items;) {
        const std::int64_t end = std::min(i + step, plan.work_items);
        const TaskScope task(tasks, Task::Kind::item, worker, i, end - i);
        run(i, end, scratch);
      }
    }
  } workers{plan, run, workspace, tasks};
  run_workers(workers, plan.threads, context, tasks);
}

// How much work a problem is on a kernel.
template <class Kernel>
using WorkOf = StreamWork (*)(const Problem& problem, const Kernel& kernel);

// The entry of such an operation.
template <class Params, class Kernel>
class StreamEntry final : public CpuEntry {
 public:
  StreamEntry(const Kernel& kernel, const IsaSupport& support, WorkOf<Kernel> work_of)
      : CpuEntry(kernel.facts, support), kernel_(kernel), work_of_(work_of) {}

  std::string_view refuse(const Problem&, const Context::Impl& context) const override { return refuse_isa(context); }
  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    return std::make_unique<StreamPlan>(work_of_(problem, kernel_), context.concurrency());
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    return static_cast<std::size_t>(context.concurrency()) * work_of_(largest, kernel_).scratch_bytes;
  }
  void run(const EntryPlan& plan, const Call& call, const Context::Impl& context, const CallTasks* tasks,
           std::byte* workspace) const override {
    const auto& params = std::get<Params>(call.params);
    run_stream(
        static_cast<const StreamPlan&>(plan), context, tasks, workspace,
        [&](std::int64_t begin, std::int64_t end, std::byte* scratch) { kernel_.run(params, begin, end, scratch); });
  }

 private:
  const Kernel& kernel_;
  const WorkOf<Kernel> work_of_;
};

// Adds one for each ISA.
template <class Params, class Kernels, class Kernel>
void add_stream_entries(const CpuMachine& machine, Entries& entries, Kernels IsaKernels::*kernels,
                        StreamWork (*work_of)(const Problem&, const Kernel&)) {
  for (const IsaSupport& support : machine.isas)
    if (const Kernel* kernel = (support.kernels->*kernels).all)
      entries.push_back(std::make_unique<StreamEntry<Params, Kernel>>(*kernel, support, work_of));
}

}  // namespace rapt::cpu
