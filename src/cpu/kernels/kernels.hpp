// What the kernel files of one ISA hand to its table.
#pragma once

#include "cpu/isa/isa.hpp"
#include "cpu/registry.hpp"

namespace rapt::cpu::RAPT_ISA {

extern const ForwardKernel kAttentionForward;
extern const ForwardKernel kAttentionNaive;

}  // namespace rapt::cpu::RAPT_ISA
