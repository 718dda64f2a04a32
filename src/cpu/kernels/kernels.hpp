// The kernels of one ISA, which table.cpp collects.
#pragma once

#include "cpu/isa/isa.hpp"
#include "cpu/registry.hpp"

namespace rapt::cpu::RAPT_ISA {

#if defined(RAPT_HAVE_TILES)
extern const AttentionKernel kTilesBf16, kTilesF16x3;
extern const AttentionBackwardKernel kAttentionBackwardF16x3;
extern const DeltaRuleKernel kDeltaRule;
extern const IndexScoresKernel kIndexScores;
#elif defined(RAPT_HAVE_DOTS)
extern const AttentionKernel kTilesBf16;
#else
extern const AttentionKernel kAttentionPrefill, kAttentionDecode, kAttentionNaive;
extern const AppendKvKernel kAppendKv;
extern const MergeStatesKernel kMergeStates;
extern const DeltaRuleKernel kDeltaRule, kDeltaRuleDecode;
extern const DeltaRuleBackwardKernel kDeltaRuleBackward;
extern const IndexScoresKernel kIndexScores;
extern const SelectTopkKernel kSelectTopk;
#endif
// Of the plainest ISA of the build alone, which defines RAPT_HAVE_REFERENCES.
extern const AttentionBackwardKernel kAttentionBackwardNaive;
extern const DeltaRuleKernel kDeltaRuleNaive;
extern const AttentionBackwardKernel kAttentionBackward;
std::size_t bias_scratch_bytes(const BackwardShape&) noexcept;
void add_bias(const AttentionBackwardParams&, const BiasItem&, std::byte* scratch) noexcept;
void store_pool(const AttentionBackwardParams&, const PoolItem&, const PoolSums&) noexcept;
#if defined(RAPT_HAVE_TILES) || defined(RAPT_HAVE_DOTS)
// The table of the vector ISA that takes over where these kernels cannot.
inline const IsaKernels& vector_kernels() {
  return RAPT_VECTORS::kKernels;
}
#endif
void attention_combine(const AttentionParams&, const WorkItem&, std::int64_t splits, std::int64_t split_rows) noexcept;

}  // namespace rapt::cpu::RAPT_ISA
