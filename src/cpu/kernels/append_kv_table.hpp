// The kernels of append_kv that this ISA has.
#pragma once

#include "cpu/kernels/vector_table.hpp"
#include "operations/append_kv/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

extern const AppendKvKernel kAppendKv;
inline constexpr auto append_kv_kernels = vector_table<AppendKvKernels, kAppendKv>;

}  // namespace rapt::cpu::RAPT_ISA
