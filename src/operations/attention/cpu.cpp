// Attention on the CPU: the workers of a call, and the entries.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "cpu/entry.hpp"
#include "operations/attention/cpu_work_list.hpp"

namespace rapt::cpu {
namespace {

constexpr std::int64_t kAllKeys = std::numeric_limits<std::int64_t>::max();
// Workers combine partial results together if these have at least this many bytes per range of rows, and there are
// fewer ranges than workers. Otherwise the worker that finishes a range last would combine it while the others wait.
constexpr std::size_t kMinBytesToCombineTogether = std::size_t{256} << 10;
constexpr std::int64_t kRowsOfSlice = 8;
// Work items with fewer multiply-adds do not repay prefetching for the next one: of some 10 us, where rows are many too
// (that limit was not measured), and of attention_decode, which only finds the next item's first keys, some 0.5 us.
constexpr double kMinProductsToLookAhead = 5e5, kMinProductsToLookAheadInDecode = 2.5e4;

// The workers of one call, which take work items until none is left.
struct AttentionWorkers {
  const IsaKernels& isa;
  const AttentionPlan& plan;
  const AttentionParams& params;
  std::span<const SequenceWork> list;
  std::span<WorkQueue> queues;
  std::byte* scratch;     // of all workers; then partial results, then counters
  bool combine_together;  // workers combine together after all work items; else the worker that finishes the last split
                          // of a range of rows combines it
  const CallTasks* tasks;

  struct Worker {
    int index;
    std::byte* scratch;
    std::int64_t b = -1, hk = -1;  // of its last work item
  };

  std::byte* partials() const { return scratch + static_cast<std::size_t>(plan.threads) * plan.scratch_bytes; }
  std::byte* counters() const { return partials() + plan.partial_bytes; }

  void work(int index) {
    Worker worker{index, scratch + static_cast<std::size_t>(index) * plan.scratch_bytes};
    // If all workers share a queue, the next work item is probably another worker's.
    const bool owns_queue = queues.size() == static_cast<std::size_t>(plan.threads);
    for (std::size_t n = 0; n < queues.size(); ++n) {
      WorkQueue& queue = queues[(static_cast<std::size_t>(index) + n) % queues.size()];
      // Reads first: a write would take the cache line from the queue's own worker.
      if (queue.next.load(std::memory_order_relaxed) >= queue.end) continue;
      for (std::int64_t i; (i = queue.next.fetch_add(1, std::memory_order_relaxed)) < queue.end;) {
        const TaskScope task(tasks, Task::Kind::item, index, i, 1);
        run(i, worker, plan.looks_ahead && owns_queue && n == 0 && i + 1 < queue.end);
      }
    }
    if (combine_together) combine_share(index);
  }

  // Combines every plan.threads-th slice of rows. All work items have been taken, so the unfinished ones are being run
  // and waiting for them ends.
  void combine_share(int index) {
    std::int64_t slice = 0;
    for (const SequenceWork& s : list) {
      if (s.splits == 1) continue;
      for (std::int64_t head = 0; head < s.count * params.hk; ++head)
        for (std::int64_t begin = 0; begin < s.rows; begin += s.rows_per_item) {
          const std::int64_t end = std::min(begin + s.rows_per_item, s.rows);
          for (std::int64_t row = begin; row < end; row += kRowsOfSlice)
            if (slice++ % plan.threads == index) {
              wait_for(counter(s, head, begin), s.splits);
              combine(s, head, begin, end, row, std::min(row + kRowsOfSlice, end), index);
            }
        }
    }
  }

  // `goes_on`: work item i + 1 will probably be the worker's next.
  void run(std::int64_t i, Worker& worker, bool goes_on) {
    const auto after = [](std::int64_t item, const SequenceWork& s) { return item < s.first_item; };
    const SequenceWork& s = *(std::upper_bound(list.begin(), list.end(), i, after) - 1);
    WorkItem item = work_item(s, i);
    item.same_keys = item.b == worker.b && item.hk == worker.hk;
    worker.b = item.b, worker.hk = item.hk;
    WorkItem next{};
    if (goes_on && looks_ahead(s)) {
      const bool same_sequence = i + 1 - s.first_item < s.count * params.hk * s.items_of_head();
      next = work_item(same_sequence ? s : *(&s + 1), i + 1);
      item.next = &next;
    }
    s.kernel->run(params, item, worker.scratch);
    if (s.splits == 1) return;

    const std::int64_t head = head_of(s, item);
    std::int32_t& done = counter(s, head, item.row_begin);
    if (!completes(done, s.splits)) return;
    if (combine_together) std::atomic_ref(done).notify_all();
    else combine(s, head, item.row_begin, item.row_end, item.row_begin, item.row_end, worker.index);
  }

  bool looks_ahead(const SequenceWork& s) const {
    const bool decodes = s.kernel->facts.phase == Phase::decode;
    return s.cost * static_cast<double>(params.d + params.dv) >=
           (decodes ? kMinProductsToLookAheadInDecode : kMinProductsToLookAhead);
  }
  WorkItem work_item(const SequenceWork& s, std::int64_t i) const {
    const auto [b, hk, begin, end, split] = place_of(s, params.hk, i - s.first_item);
    WorkItem item{b, hk, begin, end, 0, kAllKeys, nullptr};
    if (s.splits == 1) return item;
    if (split > 0) item.key_begin = s.split_begin(split);
    if (split + 1 < s.splits) item.key_end = s.split_begin(split + 1);
    item.partial = partials_of(s, head_of(s, item), begin) + split * (end - begin) * partial_floats(params.dv);
    return item;
  }
  // The item's head, counted over the heads of all sequences that `s` stands for.
  std::int64_t head_of(const SequenceWork& s, const WorkItem& item) const {
    return (item.b - s.b) * params.hk + item.hk;
  }

  // The counter of a range of rows, which starts at row `begin`.
  std::int32_t& counter(const SequenceWork& s, std::int64_t head, std::int64_t begin) const {
    return reinterpret_cast<std::int32_t*>(counters())[s.first_counter + head * s.row_items + begin / s.rows_per_item];
  }
  float* partials_of(const SequenceWork& s, std::int64_t head, std::int64_t row) const {
    return reinterpret_cast<float*>(partials()) + s.first_partial +
           (head * s.rows + row) * s.splits * partial_floats(params.dv);
  }
  // Combines rows [first, last) of the range [begin, end).
  void combine(const SequenceWork& s, std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t first,
               std::int64_t last, int worker) const {
    const TaskScope task(tasks, Task::Kind::combine, worker);
    float* const partials = partials_of(s, head, begin) + (first - begin) * partial_floats(params.dv);
    isa.attention.combine(params, {s.b + head / params.hk, head % params.hk, first, last, 0, kAllKeys, partials},
                          s.splits, end - begin);
  }
};

class AttentionEntry final : public CpuEntry {
 public:
  // `all` are those of the operation in the order that dispatch tries them; `candidate` is one of them.
  AttentionEntry(const AttentionCandidate& candidate, AttentionCandidates all)
      : CpuEntry(candidate.kernel->facts, *candidate.support), candidate_(candidate), all_(all) {}

  std::string_view refuse(const Problem& problem, const Context::Impl& context) const override {
    return cpu::refuse(candidate_, std::get<AttentionProblem>(problem), all_, context);
  }
  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    const auto& p = std::get<AttentionProblem>(problem);
    return std::make_unique<AttentionPlan>(
        plan_attention(p, choose(candidate_, p, all_, context), context.concurrency(), machine().l2_bytes));
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    const auto& p = std::get<AttentionProblem>(largest);
    return cpu::max_workspace_bytes(p, choose(candidate_, p, all_, context), context.concurrency(), machine().l2_bytes);
  }

  void run(const EntryPlan& entry_plan, const Call& call, const Context::Impl& context, const CallTasks* tasks,
           std::byte* workspace) const override {
    const auto& plan = static_cast<const AttentionPlan&>(entry_plan);
    const auto& params = std::get<AttentionParams>(call.params);
    auto* const queues = reinterpret_cast<WorkQueue*>(workspace);
    auto* const list = reinterpret_cast<SequenceWork*>(workspace + plan.queue_bytes);
    const std::span<const SequenceWork> all = work_list(plan, params, list);
    if (all.empty()) return;
    std::uninitialized_value_construct_n(queues, plan.threads);
    AttentionWorkers workers{*support_.kernels,
                             plan,
                             params,
                             all,
                             partition_into_queues(all, params.hk, {queues, static_cast<std::size_t>(plan.threads)}),
                             workspace + plan.queue_bytes + plan.list_bytes,
                             combines_together(plan, params, all),
                             tasks};
    std::memset(workers.counters(), 0, plan.counter_bytes);
    run_workers(workers, plan.threads, context, tasks);
  }

 private:
  static bool combines_together(const AttentionPlan& plan, const AttentionParams& p,
                                std::span<const SequenceWork> list) {
    std::int64_t ranges = 0;
    for (const SequenceWork& s : list)
      if (s.splits > 1) ranges += s.count * p.hk * s.row_items;
    return ranges > 0 && ranges < plan.threads &&
           plan.partial_bytes >= static_cast<std::size_t>(ranges) * kMinBytesToCombineTogether;
  }

  const AttentionCandidate& candidate_;
  const AttentionCandidates all_;
};

}  // namespace

void add_attention(const CpuMachine& machine, Entries& entries) {
  static const std::vector<AttentionCandidate> all = [&] {
    std::vector<AttentionCandidate> candidates;
    for (const Phase phase : {Phase::decode, Phase::prefill, Phase::naive})
      for (const IsaSupport& support : machine.isas)
        for (const AttentionKernel* const* kernel = support.kernels->attention.in_order; *kernel; ++kernel)
          if ((*kernel)->facts.phase == phase) candidates.push_back({*kernel, &support});
    return candidates;
  }();
  for (const AttentionCandidate& candidate : all) entries.push_back(std::make_unique<AttentionEntry>(candidate, all));
}

}  // namespace rapt::cpu
