// append_kv on the CPU: workers share the new rows.
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

double bytes_of(DType dtype) {
  return dtype == DType::i4x2 ? 0.5 : static_cast<double>(size_of(dtype));
}

class AppendKvEntry final : public CpuEntry {
 public:
  AppendKvEntry(const AppendKvKernel& kernel, const BuiltIsa& built) : CpuEntry(kernel.facts, built), kernel_(kernel) {}

  std::string_view refuse(const Problem&, const Context::Impl& context) const override { return refuse_isa(context); }

  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl& context) const override {
    return std::make_unique<StreamPlan>(plan_for(problem, context.concurrency()));
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl& context) const override {
    return static_cast<std::size_t>(context.concurrency()) * plan_for(largest, 1).scratch_bytes;
  }

  void run(const EntryPlan& plan, const Call& call, const Context::Impl& context, std::byte* workspace) const override {
    const auto& params = std::get<AppendKvParams>(call.params);
    run_stream(
        static_cast<const StreamPlan&>(plan), context, workspace,
        [&](std::int64_t begin, std::int64_t end, std::byte* scratch) { kernel_.run(params, begin, end, scratch); });
  }

 private:
  StreamPlan plan_for(const Problem& problem, int concurrency) const {
    const auto& p = std::get<AppendKvProblem>(problem);
    const std::int64_t rows = p.ragged >= 0 ? p.ragged : p.b * p.n;
    const double bytes = static_cast<double>(rows) * static_cast<double>(p.hk) * static_cast<double>(p.d + p.dv) *
                         (bytes_of(p.new_dtype) + bytes_of(p.kv_dtype));
    return {rows, bytes, kernel_.scratch_bytes(std::max(p.d, p.dv)), concurrency};
  }

  const AppendKvKernel& kernel_;
};

}  // namespace

void add_append_kv(const Machine& machine, Entries& entries) {
  for (const BuiltIsa& built : machine.isas)
    if (const AppendKvKernel* kernel = built.kernels->append_kv)
      entries.push_back(std::make_unique<AppendKvEntry>(*kernel, built));
}

}  // namespace rapt::cpu
