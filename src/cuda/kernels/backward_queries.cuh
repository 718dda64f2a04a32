// attention_backward's dq = dS k, where dS lies in memory (BackwardConfig::kKeepsDs): a product of matrices, bounded by
// how fast dS is read.
//
// A thread block has 256 rows. Its first warpgroup loads tiles of 64 keys, and of dS those that were written: the
// others are hidden. Each of the two math warpgroups has 128 rows. Sums go in the order of the kernel that computes dS
// anew.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/kernels/backward_store.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

template <class T, int kSize_>
struct BackwardQueriesConfig {
  using Element = T;
  static constexpr int kSize = kSize_, kPanels = kSize / 64;
  static constexpr bool kOfKeys = false, kGrouped = false;
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
                  block.ds_tile(block.q_head, key / kBackwardTile, block.own / kBackwardTile + i), kDsTileBytes,
                  ring.full(n), false);
  }
}

template <class C>
__device__ void add_up_queries(const BackwardBlock<C>& block, const Ring<C::kStages>& ring, int group) {
  const int tile = group * C::kTilesOfGroup;
  const KeyRange32 low_range = block.tiles_of(block.own + tile * kBackwardTile),
                   high_range = block.tiles_of(block.own + (tile + 1) * kBackwardTile);
  float low[C::kSize / 2] = {}, high[C::kSize / 2] = {};  // of the first 64 rows and the others
  std::uint32_t of_low[16], of_high[16];
  // dS of a tile's 64 rows: the words that warps of attention_backward left, each of 16 keys, transposed to operands.
  const auto load = [&](std::uint32_t(&ds)[16], int n, int i) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const std::uint32_t from = ring.slot(n) + C::kOtherBytes + i * kDsTileBytes + (warp * 32 + lane) * 16;
#pragma unroll
    for (int keys = 0; keys < 4; ++keys) {
      const float4 x = load16(from + keys * 2048);
      ds[4 * keys] = transpose(__float_as_uint(x.x)), ds[4 * keys + 1] = transpose(__float_as_uint(x.z));
      ds[4 * keys + 2] = transpose(__float_as_uint(x.y)), ds[4 * keys + 3] = transpose(__float_as_uint(x.w));
    }
  };
  const auto add = [&](float(&sums)[C::kSize / 2], std::uint32_t(&ds)[16], int n) {
    pin(ds), pin(sums);
    wgmma_fence();
    const std::uint32_t k = matrix_at(ring.slot(n), C::kOtherPanel);
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_ab<typename C::Element>(sums, ds + 4 * step, k + step * 128, 1);
    wgmma_commit();
  };
#pragma unroll 1
  for (int n = 0; n < block.tiles; ++n) {
    ring.wait_full(n);
    const bool adds_low = n >= low_range.first && n < low_range.last,
               adds_high = n >= high_range.first && n < high_range.last;
    if (adds_low) load(of_low, n, tile);
    if (adds_high) load(of_high, n, tile + 1);
    if (adds_low) add(low, of_low, n);
    if (adds_high) add(high, of_high, n);
    wgmma_wait<0>();
    pin(low), pin(high);
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
