// The kernels of attention that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/attention/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

#if defined(RAPT_HAVE_TILES)
extern const AttentionKernel kTilesBf16, kTilesF16x3;
inline const AttentionKernel* const kAttentionInOrder[] = {&kTilesBf16, &kTilesF16x3, nullptr};
#elif defined(RAPT_HAVE_DOTS)
extern const AttentionKernel kTilesBf16;
inline const AttentionKernel* const kAttentionInOrder[] = {&kTilesBf16, nullptr};
#else
extern const AttentionKernel kAttentionPrefill, kAttentionDecode, kAttentionNaive;
inline const AttentionKernel* const kAttentionInOrder[] = {&kAttentionDecode, &kAttentionPrefill, &kAttentionNaive,
                                                           nullptr};
#endif
void attention_combine(const AttentionParams&, const WorkItem&, std::int64_t splits, std::int64_t split_rows) noexcept;

[[gnu::always_inline]] constexpr AttentionKernels attention_kernels() {
  return {kAttentionInOrder, attention_combine};
}

}  // namespace rapt::cpu::RAPT_ISA
