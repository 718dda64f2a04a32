// Gathered keys: how a token's dK and dV join the sums of the rows that its list names.
#pragma once

#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/query_block.hpp"

namespace rapt::cpu::RAPT_ISA {

// to += from, n floats, whole vectors of them; `first`: there is nothing yet at `to`.
inline void add_floats(const float* from, std::int64_t n, bool first, float* to) {
  for (std::int64_t c = 0; c < n; c += kLanes) store(to + c, first ? load(from + c) : load(to + c) + load(from + c));
}

// Prepares a row for one more sum. Returns whether it is the first that is added: where sums are added up in runs,
// whether a run begins, as the one before has then joined the total.
inline bool begin_pool_sum(const PoolSums& pool, std::int64_t row) {
  const std::int64_t count = pool.counts[row]++;
  if (pool.accum_at == 0 || count == 0 || count % kPoolInterval != 0) return count == 0;
  float* const sums = pool.row(row);
  add_floats(sums, pool.stride, count == kPoolInterval, sums + pool.accum_at);
  return true;
}

}  // namespace rapt::cpu::RAPT_ISA
