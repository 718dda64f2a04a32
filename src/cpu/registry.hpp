// The kernels that the objects of one ISA export, as rows of data that the rest of rapt reads. Nothing else of these
// objects is visible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operations/all_kernels.hpp"

namespace rapt::cpu {

// Operands of int8_chains(): unsigned bytes 1, 2, 3, 255 and signed bytes 1, -2, 3, -4, and the sum of their products.
inline constexpr std::uint32_t kInt8Left = 0xff030201, kInt8Right = 0xfc03fe01;
inline constexpr std::int32_t kInt8Products = 1 - 4 + 9 - 4 * 255;

struct IsaKernels {
#define RAPT_OPERATION(name, Name, NAME) Name##Kernels name;
#include "rapt/operations.def"
  // For the roofline and for tests.
  double (*peak_chains)(std::int64_t iterations) noexcept;  // of the widest products; returns the FLOPs done
  // Null: the ISA has none. Returns the integer operations done. `sum` is the sum of all products, modulo 2^32, of
  // which every four sum to kInt8Products.
  double (*int8_chains)(std::int64_t iterations, std::uint32_t& sum) noexcept = nullptr;
  float (*read_stream)(const float* data, std::int64_t n) noexcept;  // returns a value that depends on all
  void (*exp2)(const float* x, float* y, std::int64_t n) noexcept;   // y = 2^x for x <= 127
  // y = x, loaded, held as fp32 and stored as the kernels do, with denormal results of arithmetic flushed.
  void (*convert)(DType x_type, const void* x, DType y_type, void* y, std::int64_t n) noexcept;
};

#define RAPT_INSTRUCTION_SET(name, NAME, value) \
  namespace name {                              \
  extern const IsaKernels kKernels;             \
  }
#include "rapt/isas.def"

}  // namespace rapt::cpu
