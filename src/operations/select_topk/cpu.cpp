// select_topk on the CPU: workers share the rows.
#include <bit>

#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

StreamWork work_of(const Problem& problem, const SelectTopkKernel& kernel) {
  const auto& p = std::get<SelectTopkProblem>(problem);
  // Each score is read once. Of random scores, the n largest so far are found anew (Topk::prune) about once for each
  // doubling of the scores behind the first n. That takes as long as reading kPrune + kPruneSelected n scores, but
  // what is found among few scores takes at most kFew reads of each. Fitted to the instructions of AVX-512's and
  // AVX2's kernels for 1024 to 65536 scores and n of 64 to 2048, at 7.5 AVX-512 instructions a nanosecond.
  constexpr std::int64_t kPrune = 1600, kPruneSelected = 20, kFew = 16;
  const std::int64_t n = std::clamp<std::int64_t>(p.sk, 1, p.n);
  const auto prunes = static_cast<double>(std::bit_width(static_cast<std::uint64_t>(p.sk / n)));
  const double scores = static_cast<double>(p.sk),
               reads = std::min(scores + prunes * static_cast<double>(kPrune + kPruneSelected * n),
                                kFew * scores + static_cast<double>(kPrune));
  return {p.rows, static_cast<double>(p.rows) * reads * sizeof(float), kernel.scratch_bytes(p.n, p.sk)};
}

}  // namespace

void add_select_topk(const CpuMachine& machine, Entries& entries) {
  add_stream_entries<SelectTopkParams>(machine, entries, &IsaKernels::select_topk, work_of);
}

}  // namespace rapt::cpu
