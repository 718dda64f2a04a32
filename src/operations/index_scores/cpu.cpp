// index_scores on the CPU: divides queries and keys into work items, and runs them on workers.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "cpu/entry.hpp"
#include "operations/attention/cpu_plan.hpp"

namespace rapt::cpu {
namespace {

using std::int64_t;
using P = IndexScoresProblem;

constexpr int64_t kItemsPerWorker = 3;  // the fewest per worker, if there are several, so that they finish together
constexpr int64_t kSplitKeys = 1024;    // as many splits as have so many keys each, at most; bits do not depend on them

// A call's workspace holds the workers' scratch and, if keys are split, a list for every query and split and a counter
// of finished splits for each block of queries.
struct IndexPlan final : EntryPlan {
  int64_t tokens = 1;      // of an item
  int64_t splits = 1;      // of the keys
  int64_t split_keys = 0;  // of each
  std::size_t scratch_bytes = 0, list_bytes = 0, counter_bytes = 0;

  std::string note() const override {
    return std::to_string(work_items) + " work items of up to " + std::to_string(tokens) + " queries" +
           (splits > 1 ? ", keys in " + std::to_string(splits) + " splits" : "");
  }
};

void size_workspace(IndexPlan& plan, const P& p, const IndexScoresKernel& kernel, int64_t rows_in_splits) {
  plan.scratch_bytes = kernel.scratch_bytes({p.h, p.d, p.topk, p.sk});
  const auto rows = static_cast<std::size_t>(rows_in_splits);
  plan.list_bytes = p.topk > 0 ? rows * TopkList::bytes(std::min(p.topk, p.sk)) : 0;
  plan.counter_bytes = whole_lines(rows * sizeof(std::int32_t));
  plan.workspace_bytes =
      static_cast<std::size_t>(plan.threads) * plan.scratch_bytes + plan.list_bytes + plan.counter_bytes;
}

IndexPlan plan_index(const P& p, const IndexScoresKernel& kernel, int concurrency) {
  IndexPlan plan;
  const double flops = 2.0 * static_cast<double>(p.b) * static_cast<double>(p.sq) * static_cast<double>(p.sk) *
                       static_cast<double>(p.h) * static_cast<double>(p.d) * (p.causal && p.sq == p.sk ? 0.5 : 1.0);
  const double useful_workers = std::clamp(flops / kFlopsPerWorker, 1.0, static_cast<double>(concurrency));
  const int64_t wanted = useful_workers < 2 ? 1 : static_cast<int64_t>(useful_workers) * kItemsPerWorker;
  // The queries of a work item share packed keys, so a work item has as many as leave every worker its work items. If
  // that is not enough work, keys are split.
  plan.tokens = std::clamp<int64_t>(p.b * p.sq / wanted, 1, std::min(kernel.tokens, std::max<int64_t>(p.sq, 1)));
  const int64_t blocks = p.b * ceil_div(p.sq, plan.tokens);
  // Keys for two splits stay whole: AMX has scored them by the time that a second worker is awake.
  const int64_t max_splits = p.sk <= 2 * kSplitKeys ? 1 : ceil_div(p.sk, std::max(kSplitKeys, 2 * p.topk));
  const int64_t splits = std::clamp(ceil_div(wanted, std::max<int64_t>(blocks, 1)), int64_t{1}, max_splits);
  plan.split_keys = round_up(ceil_div(std::max<int64_t>(p.sk, 1), splits), kernel.keys);
  plan.splits = std::max<int64_t>(ceil_div(p.sk, plan.split_keys), 1);
  plan.work_items = blocks * plan.splits;
  plan.threads = workers_for(useful_workers, concurrency, plan.work_items);
  size_workspace(plan, p, kernel, plan.splits > 1 ? blocks * plan.tokens * plan.splits : 0);
  return plan;
}

struct IndexScoresWorkers {
  const IndexScoresKernel& kernel;
  const IndexPlan& plan;
  const IndexScoresParams& p;
  std::byte *scratch, *lists, *counters;
  const CallTasks* tasks;
  std::atomic<int64_t> next{0};

  void work(int worker) {
    std::byte* const worker_scratch = scratch + static_cast<std::size_t>(worker) * plan.scratch_bytes;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < plan.work_items;) {
      const TaskScope task(tasks, Task::Kind::item, worker, i, 1);
      run(i, worker, worker_scratch);
    }
  }

  // The last queries come first: they see the most keys if that differs.
  void run(int64_t i, int worker, std::byte* worker_scratch) const {
    const int64_t blocks = ceil_div(p.sq, plan.tokens), split = i % plan.splits, of_all = i / plan.splits;
    const int64_t block = blocks - 1 - of_all / p.b;
    IndexItem item{of_all % p.b, block * plan.tokens, std::min((block + 1) * plan.tokens, p.sq), 0, p.sk, nullptr, 0};
    if (plan.splits == 1) return kernel.run(p, item, worker_scratch);
    item.key_begin = split * plan.split_keys, item.key_end = std::min((split + 1) * plan.split_keys, p.sk);
    const std::size_t bytes = TopkList::bytes(std::min(p.topk, p.sk));
    std::byte* const of_block = lists + static_cast<std::size_t>(of_all * plan.tokens * plan.splits) * bytes;
    item.list_stride = static_cast<int64_t>(bytes) * plan.splits;
    if (p.indices) item.lists = of_block + static_cast<std::size_t>(split) * bytes;
    kernel.run(p, item, worker_scratch);
    if (!p.indices) return;
    if (!completes(reinterpret_cast<std::int32_t*>(counters)[of_all], plan.splits)) return;
    item.lists = of_block;
    const TaskScope task(tasks, Task::Kind::combine, worker);
    kernel.merge(p, item, plan.splits, worker_scratch);
  }
};

class IndexScoresEntry final : public CpuEntry {
 public:
  IndexScoresEntry(const IndexScoresKernel& kernel, const IsaSupport& support)
      : CpuEntry(kernel.facts, support), kernel_(kernel) {}

  std::string_view refuse(const Problem&, const Context::Impl& context) const override { return refuse_isa(context); }
  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    return std::make_unique<IndexPlan>(
        plan_index(std::get<IndexScoresProblem>(problem), kernel_, context.concurrency()));
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    // Splits make no more than about twice the items that are wanted.
    IndexPlan plan;
    plan.threads = context.concurrency();
    size_workspace(plan, std::get<IndexScoresProblem>(largest), kernel_,
                   2 * kItemsPerWorker * plan.threads * kernel_.tokens);
    return plan.workspace_bytes;
  }
  void run(const EntryPlan& entry_plan, const Call& call, const Context::Impl& context, const CallTasks* tasks,
           std::byte* workspace) const override {
    const auto& plan = static_cast<const IndexPlan&>(entry_plan);
    std::byte* const lists = workspace + static_cast<std::size_t>(plan.threads) * plan.scratch_bytes;
    std::byte* const counters = lists + plan.list_bytes;
    std::memset(counters, 0, plan.counter_bytes);
    IndexScoresWorkers workers{kernel_,  plan, std::get<IndexScoresParams>(call.params), workspace, lists,
                               counters, tasks};
    run_workers(workers, plan.threads, context, tasks);
  }

 private:
  const IndexScoresKernel& kernel_;
};

}  // namespace

void add_index_scores(const CpuMachine& machine, Entries& entries) {
  for (const IsaSupport& support : machine.isas)
    if (const IndexScoresKernel* kernel = support.kernels->index_scores.all)
      entries.push_back(std::make_unique<IndexScoresEntry>(*kernel, support));
}

}  // namespace rapt::cpu
