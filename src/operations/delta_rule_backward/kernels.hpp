// What the CPU kernels of delta_rule_backward are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/delta_rule_backward/params.hpp"

namespace rapt::cpu {

inline constexpr std::int64_t kDeltaBackwardTokens = 24;  // tokens of a block
// The floats of a row of n sums, in whole cache lines.
[[gnu::always_inline]] constexpr std::int64_t padded_sums(std::int64_t n) {
  return (n + 15) / 16 * 16;
}

// A work item: a state head of a sequence.
struct DeltaRuleBackwardItem {
  std::int64_t b, h;
  // [tokens of all sequences][heads][padded_sums(d or dv)]: gradients of heads of q, k and v that several state heads
  // share, summed over the state heads before this one. Null: no head is shared.
  float *q_sums, *k_sums, *v_sums;
  double* head_sums;  // [2 + d]: the work item's share of the gradients of a_log, of g as [h], and of dt_bias
};
struct DeltaRuleBackwardShape {
  std::int64_t d, dv, reads, tokens;  // of the longest sequence
};
// A worker calls begin(), then add_block() for every block of tokens, the last block first, then end(), all with one
// scratch. Work items may run at the same time; those that share a head of q, k or v process a block in the order of
// their heads.
struct DeltaRuleBackwardKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(const DeltaRuleBackwardShape&) noexcept;  // a multiple of 64
  void (*begin)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::byte* scratch) noexcept;
  void (*add_block)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::int64_t block,
                    std::byte* scratch) noexcept;
  void (*end)(const DeltaRuleBackwardParams&, const DeltaRuleBackwardItem&, std::byte* scratch) noexcept;
};

// Those of one ISA; null: it has none.
struct DeltaRuleBackwardKernels {
  const DeltaRuleBackwardKernel* all = nullptr;
};

}  // namespace rapt::cpu
