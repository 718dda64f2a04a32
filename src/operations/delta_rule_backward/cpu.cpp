// delta_rule_backward on the CPU: a work item is a head of a sequence. State heads that share a head of q, k or v
// process each block of tokens one after another, so that sums have one order.
#include <algorithm>
#include <atomic>
#include <memory>

#include "core/float_environment.hpp"
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

using std::int64_t;
using P = DeltaRuleBackwardProblem;

int64_t blocks_of(int64_t tokens) {
  return (tokens + kDeltaBackwardTokens - 1) / kDeltaBackwardTokens;
}

// A call's workspace holds, one after another: for each work item its finished blocks; its shares of the gradients of
// a_log, g and dt_bias; gradients of q, k and v that several work items add to; the workers' scratch.
struct DeltaBackwardPlan final : EntryPlan {
  std::size_t progress_bytes = 0, head_bytes = 0, q_bytes = 0, k_bytes = 0, v_bytes = 0, scratch_bytes = 0;

  std::string note() const override { return std::to_string(work_items) + " heads of sequences"; }
};

// With as many threads as the work is worth; if flops_of_worker is 0, with all, for an upper bound on the workspace.
DeltaBackwardPlan plan_backward(const P& p, const DeltaRuleBackwardKernel& kernel, double flops_of_worker,
                                int concurrency) {
  DeltaBackwardPlan plan;
  const int64_t h = p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t;
  const double flops = 16.0 * static_cast<double>(p.d * p.dv) * static_cast<double>(tokens) * static_cast<double>(h);
  plan.work_items = p.b * h;
  plan.threads =
      flops_of_worker == 0 ? concurrency : workers_for(flops / flops_of_worker, concurrency, plan.work_items);
  const auto sums_bytes = [&](int64_t heads, int64_t n) {
    return heads < h ? static_cast<std::size_t>(tokens * heads * padded_sums(n)) * sizeof(float) : 0;
  };
  plan.progress_bytes = whole_lines(static_cast<std::size_t>(plan.work_items) * sizeof(std::int32_t));
  plan.head_bytes = whole_lines(static_cast<std::size_t>(plan.work_items * (2 + p.d)) * sizeof(double));
  plan.q_bytes = sums_bytes(p.hq, p.d), plan.k_bytes = sums_bytes(p.hk, p.d), plan.v_bytes = sums_bytes(p.hv, p.dv);
  const int64_t reads = h > 0 ? std::max<int64_t>(p.hq / h, 1) : 1;
  plan.scratch_bytes = kernel.scratch_bytes({p.d, p.dv, reads, p.t});
  std::size_t& total = plan.workspace_bytes;
  bool fits = !__builtin_mul_overflow(plan.scratch_bytes, static_cast<std::size_t>(plan.threads), &total);
  for (const std::size_t bytes : {plan.progress_bytes, plan.head_bytes, plan.q_bytes, plan.k_bytes, plan.v_bytes})
    fits = fits && !__builtin_add_overflow(total, bytes, &total);
  if (!fits) throw Error("problem", p.to_string(), "one whose workspace has less than 2^64 bytes");
  return plan;
}

struct DeltaRuleBackwardWorkers {
  const DeltaRuleBackwardKernel& kernel;
  const DeltaBackwardPlan& plan;
  const DeltaRuleBackwardParams& p;
  std::int32_t* progress;
  double* head_sums;
  float *q_sums, *k_sums, *v_sums;
  std::byte* scratch;
  const CallTasks* tasks;
  std::atomic<int64_t> next{0};

  void work(int worker) {
    std::byte* const worker_scratch = scratch + static_cast<std::size_t>(worker) * plan.scratch_bytes;
    // Work items are taken in order, so that one that another waits for has been started.
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < plan.work_items;) {
      const TaskScope task(tasks, Task::Kind::item, worker, i, 1);
      run(i, worker_scratch);
    }
  }
  void run(int64_t i, std::byte* worker_scratch) const {
    const DeltaRuleBackwardItem item{i / p.h, i % p.h, q_sums, k_sums, v_sums, head_sums + i * (2 + p.d)};
    const bool shares = item.h % p.q_group != 0 || item.h % p.k_group != 0 || item.h % p.v_group != 0;
    kernel.begin(p, item, worker_scratch);
    const int64_t blocks = blocks_of(tokens_of(p, item.b).count);
    for (int64_t done = 0; done < blocks; ++done) {
      if (shares) wait_for(progress[i - 1], done + 1);
      kernel.add_block(p, item, blocks - 1 - done, worker_scratch);
      advance(progress[i], done + 1);
    }
    kernel.end(p, item, worker_scratch);
  }
};

class DeltaRuleBackwardEntry final : public CpuEntry {
 public:
  DeltaRuleBackwardEntry(const DeltaRuleBackwardKernel& kernel, const IsaSupport& support)
      : CpuEntry(kernel.facts, support), kernel_(kernel) {}

  std::string_view refuse(const Problem&, const Context::Impl& context) const override { return refuse_isa(context); }
  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    return std::make_unique<DeltaBackwardPlan>(
        plan_backward(std::get<P>(problem), kernel_, kFlopsPerWorker, context.concurrency()));
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    return plan_backward(std::get<P>(largest), kernel_, 0, context.concurrency()).workspace_bytes;
  }
  void run(const EntryPlan& entry_plan, const Call& call, const Context::Impl& context, const CallTasks* tasks,
           std::byte* workspace) const override {
    const auto& plan = static_cast<const DeltaBackwardPlan&>(entry_plan);
    const auto& p = std::get<DeltaRuleBackwardParams>(call.params);
    std::byte* at = workspace;
    const auto take = [&]<class T>(std::size_t bytes, T*& from) {
      from = reinterpret_cast<T*>(at);
      at += bytes;
    };
    DeltaRuleBackwardWorkers workers{kernel_, plan, p, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, tasks};
    take(plan.progress_bytes, workers.progress), take(plan.head_bytes, workers.head_sums);
    take(plan.q_bytes, workers.q_sums), take(plan.k_bytes, workers.k_sums), take(plan.v_bytes, workers.v_sums);
    workers.scratch = at;
    std::fill_n(workers.progress, plan.work_items, 0);
    run_workers(workers, plan.threads, context, tasks);
    add_up(p, workers.head_sums, 0, 1, p.grad_a_log);
    add_up(p, workers.head_sums, 1, 1, p.grad_constant_g);
    add_up(p, workers.head_sums, 2, p.decay == Decay::channel ? p.d : 1, p.grad_dt_bias);
  }

 private:
  // to [h] or [h][d] = the sums over sequences, in order, of n of each work item's numbers from `first` on.
  void add_up(const DeltaRuleBackwardParams& p, const double* sums, int64_t first, int64_t n,
              const HeadGradient& to) const {
    if (!to) return;
    const FloatEnvironment environment;
    for (int64_t h = 0; h < p.h; ++h)
      for (int64_t c = 0; c < n; ++c) {
        double total = 0;
        for (int64_t b = 0; b < p.b; ++b) total += sums[(b * p.h + h) * (2 + p.d) + first + c];
        const auto rounded = static_cast<float>(total);
        support_.kernels->convert(DType::f32, &rounded, to.type,
                                  static_cast<std::byte*>(to.data) +
                                      (h * to.stride_h + c * to.stride_d) * static_cast<int64_t>(size_of(to.type)),
                                  1);
      }
  }

  const DeltaRuleBackwardKernel& kernel_;
};

}  // namespace

void add_delta_rule_backward(const CpuMachine& machine, Entries& entries) {
  for (const IsaSupport& support : machine.isas)
    if (const DeltaRuleBackwardKernel* const kernel = support.kernels->delta_rule_backward.all)
      entries.push_back(std::make_unique<DeltaRuleBackwardEntry>(*kernel, support));
}

}  // namespace rapt::cpu
