#include "cpu/schedule.hpp"

#include <algorithm>
#include <new>
#include <string>

namespace rapt::cpu {
namespace {

constexpr double kFlopsPerStrand = 1e6;  // about 10 us: below that a wake-up costs more than it brings

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

ForwardSchedule schedule_forward(const Problem& p, const ForwardKernel& kernel, int concurrency, std::size_t l2_bytes) {
  ForwardSchedule s;
  const std::int64_t group = p.hk > 0 ? p.hq / p.hk : 1, rows = p.sq * group, heads = p.b * p.hk;
  s.rows_per_item = std::max<std::int64_t>(rows, 1);
  if (kernel.rows > 0) {
    // Panels of an item share each block of K and V: the more the better, while their Q^T and O^T stay in half of L2
    // ...
    const auto panel_bytes = static_cast<std::int64_t>(sizeof(float)) * kernel.rows * (p.d + p.dv);
    std::int64_t panels =
        std::min<std::int64_t>(static_cast<std::int64_t>(l2_bytes) / 2 / panel_bytes, kernel.max_rows / kernel.rows);
    // ... and every strand gets its share of items.
    panels = std::min(panels, rows * heads / kernel.rows / (concurrency * kernel.items_per_strand));
    // The items of a head are about as large.
    const std::int64_t of_head = std::max<std::int64_t>(ceil_div(rows, kernel.rows), 1);
    const std::int64_t items = ceil_div(of_head, std::max<std::int64_t>(panels, 1));
    s.rows_per_item = ceil_div(of_head, items) * kernel.rows;
  }
  s.items_per_head = ceil_div(rows, s.rows_per_item);
  s.work_items = heads * s.items_per_head;
  const double pairs = static_cast<double>(rows) * static_cast<double>(heads) * static_cast<double>(p.sk);
  const double flops = 2.0 * pairs * static_cast<double>(p.d + p.dv) * (p.causal ? 0.5 : 1.0);
  const double worth = std::clamp(flops / kFlopsPerStrand, 1.0, static_cast<double>(concurrency));
  s.threads = static_cast<int>(
      std::clamp<std::int64_t>(static_cast<std::int64_t>(worth), 1, std::max<std::int64_t>(s.work_items, 1)));
  s.scratch_bytes = kernel.scratch_bytes({p.sk, p.d, p.dv, std::min(s.rows_per_item, std::max<std::int64_t>(rows, 1))});
  if (__builtin_mul_overflow(s.scratch_bytes, static_cast<std::size_t>(s.threads), &s.workspace_bytes))
    throw std::bad_alloc();
  s.note =
      std::to_string(s.work_items) + " items of up to " + std::to_string(s.rows_per_item) + " rows (tokens x group)";
  return s;
}

}  // namespace rapt::cpu
