// merge_states on the CPU: workers share the rows.
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

class MergeStatesEntry final : public StreamEntry<MergeStatesKernel, MergeStatesParams> {
 public:
  using StreamEntry::StreamEntry;

 private:
  StreamWork work_of(const Problem& problem) const override {
    const auto& p = std::get<MergeStatesProblem>(problem);
    const double numbers = static_cast<double>(p.rows) * static_cast<double>(p.dv);
    const double bytes = numbers * (static_cast<double>(p.count) * static_cast<double>(size_of(p.dtype)) +
                                    static_cast<double>(size_of(p.out_dtype)));
    return {p.rows, bytes, kernel_.scratch_bytes(p.count, p.dv)};
  }
};

}  // namespace

void add_merge_states(const CpuMachine& machine, Entries& entries) {
  for (const BuiltIsa& built : machine.isas)
    if (const MergeStatesKernel* kernel = built.kernels->merge_states.all)
      entries.push_back(std::make_unique<MergeStatesEntry>(*kernel, built));
}

}  // namespace rapt::cpu
