// merge_states on the CPU: workers share the rows.
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

StreamWork work_of(const Problem& problem, const MergeStatesKernel& kernel) {
  const auto& p = std::get<MergeStatesProblem>(problem);
  const auto dv = static_cast<double>(p.dv), count = static_cast<double>(p.count);
  const double moved = dv * (count * static_cast<double>(size_of(p.dtype)) + static_cast<double>(size_of(p.out_dtype)));
  // A number of a state, or of the output, takes as long as moving a byte; the exponentials of a state take as long
  // as kWeights numbers. Fitted to the instructions of AVX-512's kernel for 2 and 4 states of 16 to 512 columns,
  // at 7.5 a nanosecond.
  constexpr double kWeights = 360;
  const double computed = (count + 1) * (dv + kWeights);
  return {p.rows, static_cast<double>(p.rows) * std::max(moved, computed), kernel.scratch_bytes(p.count, p.dv)};
}

}  // namespace

void add_merge_states(const CpuMachine& machine, Entries& entries) {
  add_stream_entries<MergeStatesParams>(machine, entries, &IsaKernels::merge_states, work_of);
}

}  // namespace rapt::cpu
