// What one ISA's objects export: a table of kernels. The framework enumerates the tables; nothing else is visible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/params.hpp"

namespace rapt::cpu {

struct ForwardKernel {
  const char* op;  // "attention_forward"
  int rows;        // query rows of one register panel; 0: an item takes all rows of its kv head
  int keys;        // keys of one block; 0: no blocks
  int max_rows;    // most rows an item may have; 0: any number
  // Scratch of one work item, a multiple of 64.
  std::size_t (*scratch_bytes)(const ForwardShape&) noexcept;
  // No allocation, threads, logging or environment. `scratch` is 64-byte aligned.
  void (*run)(const ForwardParams&, const WorkItem&, std::byte* scratch) noexcept;
};

struct KernelTable {
  ForwardKernel forward, naive;
  double (*fma_chains)(std::int64_t iterations) noexcept;            // returns the FLOPs done
  float (*read_stream)(const float* data, std::int64_t n) noexcept;  // returns a value that depends on all
  void (*exp2)(const float* x, float* y, std::int64_t n) noexcept;   // y = 2^x for x <= 127
};

namespace generic {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace neon {
extern const KernelTable kTable;
}

}  // namespace rapt::cpu
