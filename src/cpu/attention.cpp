// Attention on the CPU: which kernels a call runs on, and the workers that share its items.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <span>

#include "cpu/entry.hpp"
#include "cpu/work_list.hpp"
#include "operations/attention_check.hpp"

namespace rapt::cpu {
namespace {

// One call on its way through the executor: workers take items until none is left.
struct Workers {
  const IsaKernels& isa;
  const AttentionPlan& plan;
  const AttentionParams& params;
  std::span<const SequenceWork> list;
  std::span<WorkQueue> queues;
  std::byte* scratch;  // of every worker, then partial results, then counters
  const CallTasks* tasks;

  struct Worker {
    int index;
    std::byte* scratch;
    std::int64_t b = -1, hk = -1;  // of its last item
  };

  std::byte* partials() const { return scratch + static_cast<std::size_t>(plan.threads) * plan.scratch_bytes; }
  std::byte* counters() const { return partials() + plan.partial_bytes; }

  void work(int index) {
    Worker worker{index, scratch + static_cast<std::size_t>(index) * plan.scratch_bytes};
    for (std::size_t n = 0; n < queues.size(); ++n) {
      WorkQueue& queue = queues[(static_cast<std::size_t>(index) + n) % queues.size()];
      // Only read, at first: a write would take the cache line from the queue's own worker.
      if (queue.next.load(std::memory_order_relaxed) >= queue.end) continue;
      for (std::int64_t i; (i = queue.next.fetch_add(1, std::memory_order_relaxed)) < queue.end;) {
        const TaskScope task(tasks, Task::Kind::item, index, i, 1);
        run(i, worker);
      }
    }
  }

  void run(std::int64_t i, Worker& worker) {
    constexpr std::int64_t kAllKeys = std::numeric_limits<std::int64_t>::max();
    const auto after = [](std::int64_t item, const SequenceWork& s) { return item < s.first_item; };
    const SequenceWork& s = *(std::upper_bound(list.begin(), list.end(), i, after) - 1);
    const auto [b, hk, begin, end, range, split] = place_of(s, params.hk, i - s.first_item);
    WorkItem item{b, hk, begin, end, 0, kAllKeys, nullptr, b == worker.b && hk == worker.hk};
    worker.b = b, worker.hk = hk;
    if (s.splits == 1) return s.kernel->run(params, item, worker.scratch);

    const std::int64_t floats = partial_floats(params.dv);
    float* const of_rows = reinterpret_cast<float*>(partials()) + s.first_partial +
                           (((b - s.b) * params.hk + hk) * s.rows + begin) * s.splits * floats;
    if (split > 0) item.key_begin = s.first_key + split * s.split_keys;
    if (split + 1 < s.splits) item.key_end = s.first_key + (split + 1) * s.split_keys;
    item.partial = of_rows + split * (end - begin) * floats;
    s.kernel->run(params, item, worker.scratch);
    // The worker that finishes the last split has the others' partial results in sight, and finishes the rows.
    const std::int64_t counter = s.first_counter + (b - s.b) * params.hk * s.row_items + range;
    const std::atomic_ref done(reinterpret_cast<std::int32_t*>(counters())[counter]);
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < s.splits) return;
    const TaskScope task(tasks, Task::Kind::combine, worker.index);
    isa.combine(params, {b, hk, begin, end, 0, kAllKeys, of_rows}, s.splits);
  }
};

class AttentionEntry final : public CpuEntry {
 public:
  // `all` are the entries of the operation, in order, this one included.
  AttentionEntry(const AttentionKernel& kernel, const BuiltIsa& built, const std::vector<const AttentionEntry*>& all)
      : CpuEntry(kernel.facts, built), kernel_(kernel), all_(all) {}

  std::string_view refuse(const Problem& problem, const Context::Impl& context) const override {
    const auto& p = std::get<AttentionProblem>(problem);
    if (const std::string_view reason = refuse_context(context); !reason.empty()) return reason;
    const std::int64_t rows = rows_of_head(p);
    if (facts.phase == Phase::decode && !context.forces_one(Operation::attention)) {
      if (rows > kDecodeRows) return "for few query rows (tokens x group) only";
      if (is_chosen(context) && !is_faster_than_prefill(p, rows, context))
        return "for fewer query rows (tokens x group): others are faster here";
    }
    if (is_chosen(context) && !is_worthwhile(kernel_, rows, p.sk, p.d, p.dv))
      return "for longer sequences: others are faster here";
    constexpr double kMaxScores = 0x1p40;
    if (facts.phase == Phase::naive &&
        static_cast<double>(p.sq) * static_cast<double>(p.hq) * static_cast<double>(p.sk) > kMaxScores)
      return "its S x S matrix would not fit any memory";
    return {};
  }

  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    const auto& p = std::get<AttentionProblem>(problem);
    return std::make_unique<AttentionPlan>(
        plan_attention(p, kernels_for(p, context), context.concurrency(), machine().l2_bytes));
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    const auto& p = std::get<AttentionProblem>(largest);
    return cpu::max_workspace_bytes(p, kernels_for(p, context), context.concurrency(), machine().l2_bytes);
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
    Workers workers{*built_.kernels,
                    plan,
                    params,
                    all,
                    cut_into_queues(all, params.hk, {queues, static_cast<std::size_t>(plan.threads)}),
                    workspace + plan.queue_bytes + plan.list_bytes,
                    tasks};
    std::memset(workers.counters(), 0, plan.counter_bytes);
    run_workers(workers, plan.threads, context, tasks);
  }

 private:
  // Whether the best kernel is asked for, rather than a certain one.
  static bool is_chosen(const Context::Impl& context) {
    return !context.forces_one(Operation::attention) && !context.isa_forced;
  }
  std::string_view refuse_context(const Context::Impl& context) const {
    if (context.isa_forced && built_.isa != *context.options.isa) return "RAPT_ISA asks for another ISA";
    return refuse_isa(context);
  }
  // Whether it takes the types, on this machine and in this context, whatever the sizes.
  bool is_usable(const AttentionProblem& p, const Context::Impl& context) const {
    return unusable.empty() && refuse_context(context).empty() &&
           ((only(p.q_dtype) | only(p.kv_dtype)) & ~facts.dtypes) == 0;
  }

  // The first kernel that dispatch would take for more rows, and these.
  bool is_faster_than_prefill(const AttentionProblem& p, std::int64_t rows, const Context::Impl& context) const {
    for (const AttentionEntry* other : all_)
      if (other->facts.phase == Phase::prefill && other->opt_in.empty() && other->is_usable(p, context))
        return decode_is_faster(other->kernel_, rows, p.sk, p.d, p.dv);
    return true;
  }

  AttentionKernels kernels_for(const AttentionProblem& p, const Context::Impl& context) const {
    AttentionKernels kernels{&kernel_, nullptr, nullptr};
    const bool alike = !has_lengths(p);
    if (alike || context.forces_one(Operation::attention) || facts.phase == Phase::decode) return kernels;
    const bool has_limits = is_chosen(context) && kernel_.min_key_elements > 0;
    for (const AttentionEntry* other : all_) {
      if (!other->is_usable(p, context)) continue;
      const AttentionKernel& kernel = other->kernel_;
      if (kernel.facts.phase == Phase::decode) {
        if (!kernels.decode && (p.ragged_q >= 0 || rows_of_head(p) <= kDecodeRows)) kernels.decode = &kernel;
      } else if (has_limits && !kernels.smaller && other->opt_in.empty() && kernel.min_key_elements == 0) {
        kernels.smaller = &kernel;
      }
    }
    return kernels;
  }

  const AttentionKernel& kernel_;
  const std::vector<const AttentionEntry*>& all_;
};

}  // namespace

void add_attention(const Machine& machine, Entries& entries) {
  static std::vector<const AttentionEntry*> all;
  for (const Phase phase : {Phase::decode, Phase::prefill, Phase::naive})
    for (const BuiltIsa& built : machine.isas)
      for (const AttentionKernel* const* kernel = built.kernels->attention; *kernel; ++kernel)
        if ((*kernel)->facts.phase == phase) {
          auto entry = std::make_unique<AttentionEntry>(**kernel, built, all);
          all.push_back(entry.get());
          entries.push_back(std::move(entry));
        }
}

}  // namespace rapt::cpu
