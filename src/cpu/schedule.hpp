// How a problem is cut into work items and spread over strands: pure functions.
#pragma once

#include "backend.hpp"
#include "cpu/registry.hpp"

namespace rapt::cpu {

struct ForwardSchedule final : Schedule {
  std::int64_t rows_per_item = 0;   // of (token, head of the group) pairs
  std::int64_t items_per_head = 0;  // of the longest sequence
  std::size_t scratch_bytes = 0;    // of one strand
};

// `concurrency`: the most strands the executor offers.
ForwardSchedule schedule_forward(const Problem& problem, const ForwardKernel& kernel, int concurrency,
                                 std::size_t l2_bytes);

}  // namespace rapt::cpu
