// The kernels of rotary_append_kv that this ISA has.
#pragma once

#include "cpu/kernels/vector_table.hpp"
#include "operations/rotary_append_kv/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

extern const RotaryAppendKvKernel kRotaryAppendKv;
inline constexpr auto rotary_append_kv_kernels = vector_table<RotaryAppendKvKernels, kRotaryAppendKv>;

}  // namespace rapt::cpu::RAPT_ISA
