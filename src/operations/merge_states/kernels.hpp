// What the CPU kernels of merge_states are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/merge_states/params.hpp"

namespace rapt::cpu {

// merge_states: rows [begin, end).
struct MergeStatesKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(std::int64_t count, std::int64_t dv) noexcept;  // a multiple of 64
  void (*run)(const MergeStatesParams&, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept;
};

// Those of one ISA; null: it has none.
struct MergeStatesKernels {
  const MergeStatesKernel* all = nullptr;
};

}  // namespace rapt::cpu
