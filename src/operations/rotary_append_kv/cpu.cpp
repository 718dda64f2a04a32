// rotary_append_kv on the CPU: workers share the heads of the new rows.
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

StreamWork work_of(const Problem& problem, const RotaryAppendKvKernel& kernel) {
  const auto& p = std::get<RotaryAppendKvProblem>(problem);
  const std::int64_t rows = p.ragged >= 0 ? p.ragged : p.b * p.n;
  const double size = static_cast<double>(p.d), new_bytes = bytes_of(p.new_dtype);
  const double of_q = size * (bytes_of(p.q_dtype) + bytes_of(p.out_dtype));
  const double of_k = p.no_cache ? size * (new_bytes + bytes_of(p.out_dtype))
                                 : (size + static_cast<double>(p.dv)) * (new_bytes + bytes_of(p.kv_dtype));
  const double bytes =
      static_cast<double>(rows) * (static_cast<double>(p.hq) * of_q + static_cast<double>(p.hk) * of_k);
  return {rows * (p.hq + p.hk), bytes, kernel.scratch_bytes(std::max(p.d, p.dv))};
}

}  // namespace

void add_rotary_append_kv(const CpuMachine& machine, Entries& entries) {
  add_stream_entries<RotaryAppendKvParams>(machine, entries, &IsaKernels::rotary_append_kv, work_of);
}

}  // namespace rapt::cpu
