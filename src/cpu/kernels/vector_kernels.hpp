// The kernels of the vector ISA that take over where those of tiles cannot.
#pragma once

#include "cpu/isa/isa.hpp"
#include "cpu/registry.hpp"

namespace rapt::cpu::RAPT_ISA {

inline const IsaKernels& vector_kernels() {
  return RAPT_VECTORS::kKernels;
}

}  // namespace rapt::cpu::RAPT_ISA
