// select_topk on the CPU: workers share the rows.
#include "cpu/entry.hpp"

namespace rapt::cpu {
namespace {

class SelectTopkEntry final : public StreamEntry<SelectTopkKernel, SelectTopkParams> {
 public:
  SelectTopkEntry(const SelectTopkKernel& kernel, const BuiltIsa& built) : StreamEntry(kernel, built) {
    tuning.first = 0;  // entries of other ISAs give the same bits
  }

 private:
  StreamWork work_of(const Problem& problem) const override {
    const auto& p = std::get<SelectTopkProblem>(problem);
    // Selected scores are moved several times.
    constexpr double kMoves = 8;
    const double numbers = static_cast<double>(p.sk) + kMoves * static_cast<double>(std::min(p.n, p.sk));
    return {p.rows, static_cast<double>(p.rows) * numbers * sizeof(float), kernel_.scratch_bytes(p.n, p.sk)};
  }
};

}  // namespace

void add_select_topk(const CpuMachine& machine, Entries& entries) {
  for (const BuiltIsa& built : machine.isas)
    if (const SelectTopkKernel* kernel = built.kernels->select_topk.all)
      entries.push_back(std::make_unique<SelectTopkEntry>(*kernel, built));
}

}  // namespace rapt::cpu
