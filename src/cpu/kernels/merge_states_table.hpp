// The kernels of merge_states that this ISA has.
#pragma once

#include "cpu/kernels/vector_table.hpp"
#include "operations/merge_states/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

extern const MergeStatesKernel kMergeStates;
inline constexpr auto merge_states_kernels = vector_table<MergeStatesKernels, kMergeStates>;

}  // namespace rapt::cpu::RAPT_ISA
