// merge_states on the CPU: workers share the rows.
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

class MergeStatesEntry final : public CpuEntry {
 public:
  MergeStatesEntry(const MergeStatesKernel& kernel, const BuiltIsa& built)
      : CpuEntry(kernel.facts, built), kernel_(kernel) {}

  std::string_view refuse(const Problem&, const Context::Impl& context) const override { return refuse_isa(context); }

  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    return std::make_unique<StreamPlan>(plan_for(problem, context.concurrency()));
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    return static_cast<std::size_t>(context.concurrency()) * plan_for(largest, 1).scratch_bytes;
  }

  void run(const EntryPlan& plan, const Call& call, const Context::Impl& context, std::byte* workspace) const override {
    const auto& params = std::get<MergeStatesParams>(call.params);
    run_stream(
        static_cast<const StreamPlan&>(plan), context, workspace,
        [&](std::int64_t begin, std::int64_t end, std::byte* scratch) { kernel_.run(params, begin, end, scratch); });
  }

 private:
  StreamPlan plan_for(const Problem& problem, int concurrency) const {
    const auto& p = std::get<MergeStatesProblem>(problem);
    const double numbers = static_cast<double>(p.rows) * static_cast<double>(p.dv);
    const double bytes = numbers * (static_cast<double>(p.count) * static_cast<double>(size_of(p.dtype)) +
                                    static_cast<double>(size_of(p.out_dtype)));
    return {p.rows, bytes, kernel_.scratch_bytes(p.count, p.dv), concurrency};
  }

  const MergeStatesKernel& kernel_;
};

}  // namespace

void add_merge_states(const Machine& machine, Entries& entries) {
  for (const BuiltIsa& built : machine.isas)
    if (const MergeStatesKernel* kernel = built.kernels->merge_states)
      entries.push_back(std::make_unique<MergeStatesEntry>(*kernel, built));
}

}  // namespace rapt::cpu
