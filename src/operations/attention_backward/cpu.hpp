// Shared by the two ways to divide attention_backward into work items: cpu.cpp divides heads along their keys,
// cpu_gathered.cpp (gathered keys) along their tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "cpu/entry.hpp"
#include "operations/attention/cpu_plan.hpp"

namespace rapt::cpu {

inline std::int64_t rows_of_chunk(const AttentionBackwardKernel& kernel) {
  return std::max(kernel.facts.block_q, 1);
}

// The most keys of a work item: K, V and their gradients stay in a share of L2, beside a chunk.
inline std::int64_t max_backward_keys(const AttentionBackwardProblem& p) {
  const auto bytes_of_key = static_cast<std::int64_t>(2 * sizeof(float)) * (p.d + p.dv);
  return std::max<std::int64_t>(
             static_cast<std::int64_t>(item_bytes(machine().l2_bytes)) / bytes_of_key / kBackwardKeys, 1) *
         kBackwardKeys;
}

// to[h] or to[b][h] = the sums of the rows' shares, in their order.
void add_up(const AttentionBackwardParams& p, const IsaKernels& isa, const float* rows, const Gradient& to);

// A call's workspace holds, one after another: each work item's progress; for each token's head what begin()
// determines about it; the rows' shares of dsinks; for each worker its scratch, its token's list and dQ; and the
// pool's sums.
struct GatheredBackwardPlan final : EntryPlan {
  std::int64_t keys_per_step = 0;  // of a token's list
  std::int64_t chunk_rows = 0;
  PoolSums pool{};  // its sizes
  std::size_t progress_bytes = 0, row_bytes = 0, kernel_bytes = 0, list_bytes = 0, dq_bytes = 0, count_bytes = 0;

  std::size_t worker_bytes() const { return kernel_bytes + list_bytes + dq_bytes; }
  std::string note() const override;
};

GatheredBackwardPlan plan_gathered_backward(const AttentionBackwardProblem& p, const AttentionBackwardKernel& kernel,
                                            int concurrency);
// For `threads` workers, if not all of them may be worthwhile.
void size_gathered_workspace(GatheredBackwardPlan& plan, const AttentionBackwardProblem& p,
                             const AttentionBackwardKernel& kernel, int threads);
void run_gathered_backward(const GatheredBackwardPlan& plan, const AttentionBackwardKernel& kernel,
                           const IsaKernels& isa, const AttentionBackwardParams& p, const Context::Impl& context,
                           const CallTasks* tasks, std::byte* workspace);

}  // namespace rapt::cpu
