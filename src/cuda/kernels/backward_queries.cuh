// attention_backward's dq = dS k, where dS lies in memory (BackwardConfig::kKeepsDs): a product of matrices, bounded by
// how fast dS is read.
//
// A thread block has 256 rows. Its first warpgroup loads tiles of 64 keys, and of dS those that were written: the
// others are hidden. Each of the two math warpgroups has 128 rows. Sums go in the order of the kernel that computes dS
// anew.
#pragma once

#include "cuda/kernels/backward_store.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

template <class T, int kSize_>
struct BackwardQueriesConfig {
  using Element = T;
  static constexpr int kSize = kSize_, kPanels = kSize / 64;
  static constexpr bool kOfKeys = false;
  static constexpr int kGroups = 2, kTilesOfGroup = 2, kTiles = kGroups * kTilesOfGroup, kOwn = kBackwardTile * kTiles;
  static constexpr int kThreads = 128 * (kGroups + 1), kStages = 4;
  static constexpr int kOtherPanel = kBackwardTile * 128, kOtherBytes = kPanels * kOtherPanel;
  static constexpr int kPlaceBytes = kOtherBytes + kTiles * kDsTileBytes, kSharedBytes = 1024 + kStages * kPlaceBytes;
  static constexpr int kLoadRegisters = 40, kMathRegisters = 232;  // as BackwardConfig
  static_assert(kSharedBytes <= 227 << 10);
};

template <class C>
__device__ void load_keys_and_ds(const BackwardBlock<C>& block, const Ring<C::kStages>& ring) {
  KeyRange32 ranges[C::kTiles];
#pragma unroll
  for (int i = 0; i < C::kTiles; ++i) ranges[i] = block.tiles_of(block.own + i * kBackwardTile);
  const int hk = static_cast<int>(block.head.hk), b = static_cast<int>(block.head.b);
#pragma unroll 1
  for (int n = 0; n < block.tiles; ++n) {
    ring.wait_empty(n);
    int bytes = C::kOtherBytes;
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) bytes += n >= ranges[i].first && n < ranges[i].last ? kDsTileBytes : 0;
    barrier_arrive_expecting(ring.full(n), bytes);
    const int key = block.other + n * kBackwardTile;
    for (int panel = 0; panel < C::kPanels; ++panel)
      tma_load(ring.slot(n) + panel * C::kOtherPanel, &block.params.k, panel * 64, key, hk, b, ring.full(n), true);
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i)
      if (n >= ranges[i].first && n < ranges[i].last)
        bulk_load(ring.slot(n) + C::kOtherBytes + i * kDsTileBytes,
                  block.ds_tile(key / kBackwardTile, block.own / kBackwardTile + i), kDsTileBytes, ring.full(n), false);
  }
}

template <class C>
__device__ void add_up_queries(const BackwardBlock<C>& block, const Ring<C::kStages>& ring, int group) {
  const int tile = group * C::kTilesOfGroup;
  const KeyRange32 low_range = block.tiles_of(block.own + tile * kBackwardTile),
                   high_range = block.tiles_of(block.own + (tile + 1) * kBackwardTile);
  float low[C::kSize / 2] = {}, high[C::kSize / 2] = {};  // of the first 64 rows and the others
  const auto add = [&](float(&sums)[C::kSize / 2], const KeyRange32& range, int n, int i) {
    if (n < range.first || n >= range.last) return;
    pin(sums);
    wgmma_fence();
    const std::uint32_t ds = matrix_at(ring.slot(n) + C::kOtherBytes + i * kDsTileBytes),
                        k = matrix_at(ring.slot(n), C::kOtherPanel);
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_atb<typename C::Element>(sums, ds + step * 128, k + step * 128, 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin(sums);
  };
#pragma unroll 1
  for (int n = 0; n < block.tiles; ++n) {
    ring.wait_full(n);
    add(low, low_range, n, tile), add(high, high_range, n, tile + 1);
    ring.release(n);
  }
  const auto& p = block.p;
  const auto store = [&](const float(&sums)[C::kSize / 2], int i) {
    GradientRows<C> rows{block, block.own + i * kBackwardTile};
    rows.put(p.grad_q, sums, p.scale, static_cast<int>(p.d));
    rows.mark(block.params.rows);
  };
  store(low, tile), store(high, tile + 1);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_backward_queries(const __grid_constant__ BackwardParams params) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[2 * C::kStages];
  std::uint32_t data = (shared_address(shared) + 1023) / 1024 * 1024;  // the swizzle's unit
  pin(data);
  const Ring<C::kStages> ring{shared_address(barriers), data, C::kPlaceBytes};
  if (threadIdx.x == 0) {
    ring.init(1, 4 * C::kGroups);
    fence_barrier_init();
    prefetch_map(&params.k);
  }
  __syncthreads();
  launch_dependent_grids();
  wait_on_dependent_grids();
  const BackwardBlock<C> block(params);
  if (threadIdx.x < 128) {
    registers_decrease<C::kLoadRegisters>();
    if (threadIdx.x == 0) load_keys_and_ds<C>(block, ring);
  } else {
    registers_increase<C::kMathRegisters>();
    add_up_queries<C>(block, ring, uniform(threadIdx.x / 128 - 1));
  }
}

}  // namespace rapt::cuda
