// append_kv on the CPU: workers share the new rows.
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

StreamWork work_of(const Problem& problem, const AppendKvKernel& kernel) {
  const auto& p = std::get<AppendKvProblem>(problem);
  const std::int64_t rows = p.ragged >= 0 ? p.ragged : p.b * p.n;
  const double bytes = static_cast<double>(rows) * static_cast<double>(p.hk) * static_cast<double>(p.d + p.dv) *
                       (bytes_of(p.new_dtype) + bytes_of(p.kv_dtype));
  return {rows, bytes, kernel.scratch_bytes(std::max(p.d, p.dv))};
}

}  // namespace

void add_append_kv(const CpuMachine& machine, Entries& entries) {
  add_stream_entries<AppendKvParams>(machine, entries, &IsaKernels::append_kv, work_of);
}

}  // namespace rapt::cpu
