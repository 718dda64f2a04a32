// The kernels of attention_backward that this ISA has.
#pragma once

#include "cpu/isa/isa.hpp"
#include "operations/attention_backward/kernels.hpp"

namespace rapt::cpu::RAPT_ISA {

extern const AttentionBackwardKernel kAttentionBackward;
#if defined(RAPT_HAVE_TILES)
extern const AttentionBackwardKernel kAttentionBackwardF16x3;
#elif defined(RAPT_HAVE_REFERENCES)
extern const AttentionBackwardKernel kAttentionBackwardNaive;
#endif
std::size_t bias_scratch_bytes(const BackwardShape&) noexcept;
void add_bias(const AttentionBackwardParams&, const BiasItem&, std::byte* scratch) noexcept;
void store_pool(const AttentionBackwardParams&, const PoolItem&, const PoolSums&) noexcept;

[[gnu::always_inline]] constexpr AttentionBackwardKernels attention_backward_kernels() {
  return {
    .best = &kAttentionBackward,
#if defined(RAPT_HAVE_TILES)
    .f16 = &kAttentionBackwardF16x3,
#elif defined(RAPT_HAVE_REFERENCES)
    .naive = &kAttentionBackwardNaive,
#endif
    .store_pool = store_pool
  };
}

}  // namespace rapt::cpu::RAPT_ISA
