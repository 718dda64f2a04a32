// What the kernel files of one ISA hand to its table.
#pragma once

#include "cpu/isa/isa.hpp"
#include "cpu/registry.hpp"

namespace rapt::cpu::RAPT_ISA {

extern const ForwardKernel kAttentionForward;
extern const ForwardKernel kAttentionDecode;
void attention_combine(const ForwardParams&, const WorkItem&, std::int64_t parts) noexcept;
extern const ForwardKernel kAttentionNaive;
extern const ForwardKernel kTilesBf16;                             // ISAs that multiply bf16
extern const ForwardKernel kTilesF16x3, kTilesF32x6, kTilesF32x3;  // ISAs with tiles

}  // namespace rapt::cpu::RAPT_ISA
