// delta_rule on the CPU: workers share heads of sequences and, where these are few, ranges of a state's columns.
#include <algorithm>
#include <memory>

#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

using std::int64_t;

constexpr double kFlopsPerByte = 8;  // roughly: FLOPs a worker computes while it moves a byte
constexpr int64_t kItemsPerWorker = 2;

class DeltaRuleEntry final : public CpuEntry {
 public:
  DeltaRuleEntry(const DeltaRuleKernel& kernel, const IsaSupport& support)
      : CpuEntry(kernel.facts, support), kernel_(kernel) {}

  std::string_view refuse(const Problem& problem, const Context::Impl& context) const override {
    const auto& p = std::get<DeltaRuleProblem>(problem);
    if (p.t > kernel_.max_tokens) return "for one token a sequence";
    if (p.steps > 0 && !kernel_.keeps_steps) return "keeps no state for each token";
    return refuse_isa(context);
  }
  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    return std::make_unique<StreamPlan>(plan_for(std::get<DeltaRuleProblem>(problem), context.concurrency()));
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    // With one thread an item is a whole state, the largest.
    return static_cast<std::size_t>(context.concurrency()) *
           plan_for(std::get<DeltaRuleProblem>(largest), 1).scratch_bytes;
  }
  void run(const EntryPlan& entry_plan, const Call& call, const Context::Impl& context, const CallTasks* tasks,
           std::byte* workspace) const override {
    const auto& plan = static_cast<const StreamPlan&>(entry_plan);
    const auto& p = std::get<DeltaRuleParams>(call.params);
    const int64_t ranges = std::max<int64_t>(plan.work_items / std::max<int64_t>(p.b * p.h, 1), 1),
                  columns = columns_of(p.dv, ranges);
    run_stream(plan, context, tasks, workspace, [&](int64_t begin, int64_t end, std::byte* scratch) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / ranges, first = i % ranges * columns;
        kernel_.run(p, {head / p.h, head % p.h, first, std::min(first + columns, p.dv)}, scratch);
      }
    });
  }

 private:
  // The columns of a range if a state is divided into so many.
  int64_t columns_of(int64_t dv, int64_t ranges) const {
    const int64_t pieces = (dv + kernel_.columns - 1) / kernel_.columns;
    return (pieces + ranges - 1) / ranges * kernel_.columns;
  }
  StreamPlan plan_for(const DeltaRuleProblem& p, int concurrency) const {
    const int64_t heads = p.b * p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t;
    const double state = static_cast<double>(p.d) * static_cast<double>(p.dv),
                 flops = 6 * state * static_cast<double>(tokens) * static_cast<double>(p.state_heads()),
                 bytes = flops / kFlopsPerByte + (p.state ? 8 * state * static_cast<double>(heads) : 0);
    const auto useful_workers =
        static_cast<int64_t>(std::clamp(bytes / kBytesPerWorker, 1.0, static_cast<double>(concurrency)));
    int64_t columns = columns_of(p.dv, 1);
    if (useful_workers > 1 && heads > 0)
      columns = columns_of(p.dv, std::max<int64_t>(useful_workers * kItemsPerWorker / heads, 1));
    const int64_t ranges = (p.dv + columns - 1) / columns, reads = heads > 0 ? p.hq / p.state_heads() : 1;
    const StreamWork work{heads * ranges, bytes,
                          kernel_.scratch_bytes({p.d, std::min(columns, p.dv), std::max<int64_t>(reads, 1)})};
    return {work, concurrency};
  }

  const DeltaRuleKernel& kernel_;
};

}  // namespace

void add_delta_rule(const CpuMachine& machine, Entries& entries) {
  for (const auto kernel : {&DeltaRuleKernels::decode, &DeltaRuleKernels::prefill, &DeltaRuleKernels::naive})
    for (const IsaSupport& support : machine.isas)
      if (const DeltaRuleKernel* const k = support.kernels->delta_rule.*kernel)
        entries.push_back(std::make_unique<DeltaRuleEntry>(*k, support));
}

}  // namespace rapt::cpu
