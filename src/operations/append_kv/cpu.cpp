// append_kv on the CPU: workers share the new rows.
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

class AppendKvEntry final : public StreamEntry<AppendKvKernel, AppendKvParams> {
 public:
  AppendKvEntry(const AppendKvKernel& kernel, const BuiltIsa& built) : StreamEntry(kernel, built) {
    tuning.first = 0;  // entries of other ISAs give the same bits
  }

 private:
  StreamWork work_of(const Problem& problem) const override {
    const auto& p = std::get<AppendKvProblem>(problem);
    const std::int64_t rows = p.ragged >= 0 ? p.ragged : p.b * p.n;
    const double bytes = static_cast<double>(rows) * static_cast<double>(p.hk) * static_cast<double>(p.d + p.dv) *
                         (bytes_of(p.new_dtype) + bytes_of(p.kv_dtype));
    return {rows, bytes, kernel_.scratch_bytes(std::max(p.d, p.dv))};
  }
};

}  // namespace

void add_append_kv(const CpuMachine& machine, Entries& entries) {
  for (const BuiltIsa& built : machine.isas)
    if (const AppendKvKernel* kernel = built.kernels->append_kv.all)
      entries.push_back(std::make_unique<AppendKvEntry>(*kernel, built));
}

}  // namespace rapt::cpu
