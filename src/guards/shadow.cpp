// Rows of attention and its gradients that are computed again, in float64.
#include <algorithm>

#include "guards/attention_backward_row.hpp"
#include "guards/guards.hpp"

namespace rapt {
namespace {

using Guard = GuardReport::Guard;

// The n-th of numbers below `count` that lie evenly among them, however many there are.
std::int64_t spread(std::uint64_t n, std::int64_t count) {
  constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;  // of 2^64
  const double share = static_cast<double>(n * kGoldenRatio >> 11) * 0x1p-53;
  return std::min(static_cast<std::int64_t>(share * static_cast<double>(count)), count - 1);
}

template <class Row>
void compare(Row row, int rows, double tolerance, std::uint64_t number, Reports& reports) {
  const std::int64_t all = row.tokens() * row.heads(), n = std::min<std::int64_t>(rows, all);
  for (std::int64_t i = 0; i < n; ++i) {
    const auto sample = number * static_cast<std::uint64_t>(rows) + static_cast<std::uint64_t>(i);
    const std::int64_t at = n == all ? i : spread(sample, all);
    row.compute(at / row.heads(), at % row.heads());
    if (!row.is_bounded) {
      reports.pass(Guard::shadow, "rows with numbers past the ranges for which the contract has bounds");
    } else if (const auto off = row.first_off(tolerance)) {
      return reports.find(Guard::shadow, {off->tensor, off->index}, off->value, off->wanted, off->bound);
    }
  }
}

}  // namespace

void compare_with_shadow(const Watched<AttentionArgs>& w, int rows, double tolerance, std::uint64_t number,
                         Reports& reports) {
  const AttentionRow row(w.args.kv, w.args.score, std::get<AttentionProblem>(w.call.problem),
                         std::get<AttentionParams>(w.call.params), w.entry.facts);
  compare(row, rows, tolerance, number, reports);
}

void compare_with_shadow(const Watched<AttentionBackwardArgs>& w, int rows, double tolerance, std::uint64_t number,
                         Reports& reports) {
  if (!w.args.dq) return reports.pass(Guard::shadow, "of gradients, the shadow is of dq alone");
  compare(AttentionBackwardRow(w.args, w.call, w.entry.facts), rows, tolerance, number, reports);
}

}  // namespace rapt
