// What the CPU kernels of delta_rule are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/delta_rule/params.hpp"

namespace rapt::cpu {

// delta_rule: columns [begin, end) of the state of head h of sequence b.
struct DeltaRuleItem {
  std::int64_t b, h, begin, end;
};
struct DeltaRuleShape {
  std::int64_t d, columns, reads;  // reads: query heads of a state head
};
struct DeltaRuleKernel {
  KernelFacts facts;
  std::int64_t columns;                                          // columns of a work item are a multiple of this
  std::int64_t max_tokens = INT64_MAX;                           // the most tokens of a sequence
  bool keeps_steps = true;                                       // can store a state for each token
  std::size_t (*scratch_bytes)(const DeltaRuleShape&) noexcept;  // a multiple of 64
  void (*run)(const DeltaRuleParams&, const DeltaRuleItem&, std::byte* scratch) noexcept;
};

// Those of one ISA; null: it has none.
struct DeltaRuleKernels {
  const DeltaRuleKernel *decode = nullptr, *prefill = nullptr, *naive = nullptr;
};

}  // namespace rapt::cpu
