// What the CPU kernels of append_kv are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/append_kv/params.hpp"

namespace rapt::cpu {

// append_kv: new rows [begin, end), counted over all sequences, of every head.
struct AppendKvKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(std::int64_t size) noexcept;  // for rows of up to `size` elements, a multiple of 64
  void (*run)(const AppendKvParams&, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept;
};

// Those of one ISA; null: it has none.
struct AppendKvKernels {
  const AppendKvKernel* all = nullptr;
};

}  // namespace rapt::cpu
