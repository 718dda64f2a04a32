// The kernels of select_topk that this ISA has.
#pragma once

#include "cpu/kernels/vector_table.hpp"
#include "operations/select_topk/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

extern const SelectTopkKernel kSelectTopk;
inline constexpr auto select_topk_kernels = vector_table<SelectTopkKernels, kSelectTopk>;

}  // namespace rapt::cpu::RAPT_ISA
