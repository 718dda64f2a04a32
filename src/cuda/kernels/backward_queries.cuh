// attention_backward where dS is kept in memory (BackwardConfig::kKeepsDs): dq = dS k, a product of matrices, in the
// launch that computes dS. Its thread blocks, bounded by how fast dS is read, run beside those for dk and dv, which are
// bounded by arithmetic, and fill the time in which a head's last ones would run alone.
//
// A thread block for dq has 256 rows. Its first warpgroup loads tiles of 64 keys, and of dS those that were written:
// the others are hidden. Each of the two math warpgroups has 128 rows. Sums go in the order of the kernel that computes
// dS anew.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/kernels/backward_tiles.cuh"

namespace rapt::cuda {

template <class T, int kSize_>
struct BackwardQueriesConfig {
  using Element = T;
  static constexpr int kSize = kSize_, kPanels = kSize / 64;
  static constexpr bool kOfKeys = false, kGrouped = false, kKeepsDs = false, kReadsDs = true;
  static constexpr int kGroups = 2, kTilesOfGroup = 2, kTiles = kGroups * kTilesOfGroup, kOwn = kBackwardTile * kTiles;
  static_assert(kOwn == kBackwardRowsOfDs);
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
  wait_for_count(&block.params.rows.progress[block.kv_head()].written, block.params.order.of_keys);
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
  // dS of a tile's 64 rows, of which the warp has 16: for each 16 keys, four matrices of keep_ds(), transposed.
  const int lane = threadIdx.x % 32, matrix = lane / 8;  // the lane addresses row lane % 8 of this matrix
  const int of_lane = threadIdx.x / 32 % 4 * 512 + (matrix % 2 * 2 + matrix / 2) * 128 + lane % 8 * 16;
  const auto load = [&](std::uint32_t(&ds)[4][4], int n, int i) {
    const std::uint32_t from = ring.slot(n) + C::kOtherBytes + i * kDsTileBytes + of_lane;
#pragma unroll
    for (int keys = 0; keys < 4; ++keys) load_columns(from + keys * 2048, ds[keys]);
  };
  const auto add = [&](float(&sums)[C::kSize / 2], std::uint32_t(&ds)[4][4], int n) {
    pin(ds[0]), pin(ds[1]), pin(ds[2]), pin(ds[3]), pin(sums);
    wgmma_fence();
    const std::uint32_t k = matrix_at(ring.slot(n), C::kOtherPanel);
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_ab<typename C::Element>(sums, ds[step], k + step * 128, 1);
    wgmma_commit();
  };
  struct Operands {
    std::uint32_t low[4][4], high[4][4];
  };
  const auto adds_low = [&](int n) { return n >= low_range.first && n < low_range.last; };
  const auto adds_high = [&](int n) { return n >= high_range.first && n < high_range.last; };
  const auto load_both = [&](Operands& ds, int n) {
    if (n >= block.tiles) return;
    ring.wait_full(n);
    if (adds_low(n)) load(ds.low, n, tile);
    if (adds_high(n)) load(ds.high, n, tile + 1);
  };
  // Adds tile n, and loads the next one in the meantime.
  const auto step = [&](int n, Operands& ds, Operands& next) {
    if (adds_low(n)) add(low, ds.low, n);
    if (adds_high(n)) add(high, ds.high, n);
    load_both(next, n + 1);
    wgmma_wait<0>();
    pin(low), pin(high);
    ring.release(n);
  };
  Operands even, odd;
  load_both(even, 0);
#pragma unroll 1
  for (int n = 0; n < block.tiles; n += 2) {
    step(n, even, odd);
    if (n + 1 < block.tiles) step(n + 1, odd, even);
  }
  const auto& p = block.p;
  // The other warpgroup may be at work still, but all tiles are here.
  if (group == 0 && threadIdx.x % 128 == 0) count_up(&block.params.rows.progress[block.kv_head()].read);
  const auto store = [&](const float(&sums)[C::kSize / 2], int i) {
    GradientRows<C> rows{block, block.own + i * kBackwardTile};
    rows.put(p.grad_q, sums, p.scale, static_cast<int>(p.d));
    rows.mark(block.params.rows);
  };
  store(low, tile), store(high, tile + 1);
}

// A launch that keeps dS: K is the BackwardConfig for dk and dv.
template <class K>
__global__ void __launch_bounds__(K::kThreads, 1)
    attention_backward_kept(const __grid_constant__ BackwardParams params) {
  using Q = BackwardQueriesConfig<typename K::Element, K::kSize>;
  static_assert(Q::kThreads == K::kThreads && Q::kStages <= kMaxBackwardStages);
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[2 * kMaxBackwardStages + 1];
  const BackwardOrder::Item item = params.order.at(static_cast<int>(blockIdx.x));
  const BackwardStart start(params, barriers, shared, K::kModified && item.is_of_keys ? 128 : 0);
  const int group = static_cast<int>(params.p.group);
  if (item.is_of_keys) {
    differentiate_tiles(BackwardBlock<K>(params, item.head, item.number / (K::kGrouped ? params.sharers : 1)),
                        start.barriers, start.data);
    return;
  }
  if (item.number >= params.order.row_blocks) return;
  const int q_head = item.head * group + item.number / params.row_tiles;
  const BackwardBlock<Q> block(params, q_head, item.number % params.row_tiles);
  const Ring<Q::kStages> ring{start.barriers, start.data, Q::kPlaceBytes};
  if (threadIdx.x < 128) {
    registers_decrease<Q::kLoadRegisters>();
    if (threadIdx.x == 0) load_keys_and_ds<Q>(block, ring);
  } else {
    registers_increase<Q::kMathRegisters>();
    add_up_queries<Q>(block, ring, uniform(threadIdx.x / 128 - 1));
  }
}

}  // namespace rapt::cuda
