// Messages to another thread block of a cluster.
#pragma once

#include "cuda/hopper/ptx.cuh"

namespace rapt::cuda {

// An arrival at block `rank`'s barrier at the address `barrier`. It says what the warp has read, and nothing of what it
// wrote: a release to the cluster is a fence of all memory.
__device__ inline void arrive_at_block(std::uint32_t barrier, unsigned rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_cluster(barrier, rank)) : "memory");
}

// Copies `bytes` bytes, a multiple of 16, to the same address in block `rank`: one arrival at its barrier at the
// address `barrier`, and these bytes. After a fence_async_proxy() of all who wrote them, and a barrier.
__device__ inline void copy_to_block(std::uint32_t from, int bytes, std::uint32_t barrier, unsigned rank) {
  const std::uint32_t there = in_cluster(barrier, rank);
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(there), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   in_cluster(from, rank)),
               "r"(from), "r"(bytes), "r"(there)
               : "memory");
}

}  // namespace rapt::cuda
