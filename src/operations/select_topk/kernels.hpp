// What the CPU kernels of select_topk are, as data that its entries read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/select_topk/params.hpp"

namespace rapt::cpu {

// select_topk: rows [begin, end).
struct SelectTopkKernel {
  KernelFacts facts;
  std::size_t (*scratch_bytes)(std::int64_t n, std::int64_t sk) noexcept;  // a multiple of 64
  void (*run)(const SelectTopkParams&, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept;
};

// Those of one ISA; null: it has none.
struct SelectTopkKernels {
  const SelectTopkKernel* all = nullptr;
};

}  // namespace rapt::cpu
