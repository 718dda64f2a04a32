// What one ISA's objects export: a table of kernels. The framework enumerates the tables; nothing else is visible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/params.hpp"

namespace rapt::cpu {

constexpr unsigned only(Element e) {
  return 1u << static_cast<unsigned>(e);
}
inline constexpr unsigned kAnyElement = only(Element::f32) | only(Element::bf16) | only(Element::f16);
inline constexpr unsigned kAnyCache =  // of k and v
    kAnyElement | only(Element::i8) | only(Element::e4m3) | only(Element::e5m2) | only(Element::i4);

struct ForwardKernel {
  const char* op;                // "attention_forward"
  const char* arithmetic;        // what it multiplies in: "f32"; "f32x6" is fp32 by six products of bf16 planes
  unsigned elements;             // only(...) of the q, k and v it takes; out may be anything
  const char* opt_in = nullptr;  // why it runs only where it is named; null: dispatch may choose it
  int rows = 0;                  // query rows of one register panel; 0: an item takes all rows of its kv head
  int keys = 0;                  // keys of one block; 0: no blocks
  int max_rows = 0;              // of kernels with panels: most rows an item may have
  int items_per_strand = 1;      // at least so many, that the last even out ...
  int least_rows = 0;  // ... but 2 rather than items of fewer rows, which do not repay what each prepares; 0 = none
  // What it prepares is not repaid by fewer rows of a head, or by keys of fewer elements (keys x (d + dv)): dispatch
  // gives such sequences to a kernel without these limits.
  int min_rows = 0;
  int min_key_elements = 0;
  // Up to so many keys stay prepared in the scratch for the next item, if it is of the same head; null = none.
  std::int64_t (*kept_keys)(std::int64_t d, std::int64_t dv) noexcept = nullptr;
  // Scratch of one work item, a multiple of 64.
  std::size_t (*scratch_bytes)(const ForwardShape&) noexcept;
  // No allocation, threads, logging or environment. `scratch` is 64-byte aligned.
  void (*run)(const ForwardParams&, const WorkItem&, std::byte* scratch) noexcept;
};

struct KernelTable {
  const ForwardKernel* decode;                             // for few rows; null = none
  const ForwardKernel* forward[4];                         // in the order dispatch tries them; null = none
  const ForwardKernel* naive;                              // null = none
  double (*fma_chains)(std::int64_t iterations) noexcept;  // returns the FLOPs done
  // Finishes rows from their states: [parts][rows of the item][state_floats] at item.state, with every key in its
  // range.
  void (*combine)(const ForwardParams&, const WorkItem&, std::int64_t parts) noexcept;
  float (*read_stream)(const float* data, std::int64_t n) noexcept;  // returns a value that depends on all
  void (*exp2)(const float* x, float* y, std::int64_t n) noexcept;   // y = 2^x for x <= 127
  // y = x as the kernels load, hold as fp32 and store it, while denormal results of arithmetic are flushed.
  void (*convert)(Element x_type, const void* x, Element y_type, void* y, std::int64_t n) noexcept;
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
namespace avx512bf16 {
extern const KernelTable kTable;
}
namespace amx {
extern const KernelTable kTable;
}
namespace neon {
extern const KernelTable kTable;
}

}  // namespace rapt::cpu
