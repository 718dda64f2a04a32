// What the CPU kernels of rotary_append_kv are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/rotary_append_kv/params.hpp"

namespace rapt::cpu {

// rotary_append_kv: items [begin, end). Each new row, counted over all sequences, is an item for every head of q, then
// for every head of k.
struct RotaryAppendKvKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(std::int64_t size) noexcept;  // for rows of up to `size` elements, a multiple of 64
  void (*run)(const RotaryAppendKvParams&, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept;
};

// Those of one ISA; null: it has none.
struct RotaryAppendKvKernels {
  const RotaryAppendKvKernel* all = nullptr;
};

}  // namespace rapt::cpu
