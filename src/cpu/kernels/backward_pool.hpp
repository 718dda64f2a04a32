// Gathered keys: adds a token's dK and dV to the sums of the pool rows that its list names.
#pragma once

#include "cpu/kernels/attention_backward_table.hpp"
#include "cpu/tile/head.hpp"

namespace rapt::cpu::RAPT_ISA {

// to += from, n floats in whole vectors. `first`: `to` is uninitialised.
inline void add_floats(const float* from, std::int64_t n, bool first, float* to) {
  for (std::int64_t c = 0; c < n; c += kLanes) store(to + c, first ? load(from + c) : load(to + c) + load(from + c));
}

// Prepares a row for one more addition. Returns whether the next addition must overwrite the sums instead: it is the
// row's first, or it begins an accumulation interval, whose predecessor is then in the accumulated sums.
inline bool begin_pool_sum(const PoolSums& pool, std::int64_t row) {
  const std::int64_t count = pool.counts[row]++;
  if (pool.accum_at == 0 || count == 0 || count % kPoolInterval != 0) return count == 0;
  float* const sums = pool.row(row);
  add_floats(sums, pool.stride, count == kPoolInterval, sums + pool.accum_at);
  return true;
}

}  // namespace rapt::cpu::RAPT_ISA
