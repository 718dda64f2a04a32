// attention_prefill's loads and stores: the rings of Q tiles and of K and V blocks are filled by TMA where tensor maps
// can describe the rows, else by the threads of the first warpgroup.
#pragma once

#include "cuda/hopper/tma.cuh"
#include "cuda/kernels/prefill_config.cuh"

namespace rapt::cuda {

// 16 rows of Q in f8e4m3, by one warp, widened to bf16, which holds them exactly. Same layout as load_rows().
template <class C>
__device__ void load_f8_rows(std::uint32_t to, const AttentionParams& p, std::int64_t at) {
  constexpr int kChunks = C::kSize / 8, kPanelChunks = C::kPanel / 8;
  const auto* const q = static_cast<const std::uint8_t*>(p.q);
  const std::uint32_t sign = p.score.scale_log2 < 0 ? 0x8000 : 0;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < 16 * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const std::int64_t start = __shfl_sync(~0u, at, row);
    const auto element = [&](int n) -> std::uint32_t {
      const int column = 8 * chunk + n;
      if (start < 0 || column >= p.d) return 0;
      return __float_as_uint(code_of_byte(q[start + column * p.q_stride.d], DType::f8e4m3)) >> 16 ^ sign;
    };
    const auto pair = [&](int n) { return element(n) | element(n + 1) << 16; };
    store16(to + chunk / kPanelChunks * (C::kRows * C::kRowBytes) + row * C::kRowBytes +
                chunk_place<C::kRowBytes>(row, chunk % kPanelChunks) * 16,
            make_uint4(pair(0), pair(2), pair(4), pair(6)));
  }
}

// Tile i's rows of Q, by the producer threads.
template <class C>
__device__ void load_q(const PrefillParams& params, const TileQueue& queue, const Tile<C>* tiles, const QueryRing<C>& q,
                       unsigned i) {
  const AttentionParams& p = params.p;
  const Tile<C>& tile = tiles[i % kQueueTiles];
  queue.wait_full(i);
  q.wait_empty(i);
#pragma unroll 1
  for (int row = (threadIdx.x - (128 - C::kProducers)) / 32 * 16; row < C::kRows; row += C::kProducers / 2)
    if (C::kQuantized && p.q_type == DType::f8e4m3)
      load_f8_rows<C>(q.slot(i) + row * C::kRowBytes, p, tile.row_info[row + threadIdx.x % 16].q);
    else
      load_rows<C::kSize, 2, C::kPanel>(16, q.slot(i) + row * C::kRowBytes, C::kRows * C::kRowBytes, p.q,
                                        tile.row_info[row + threadIdx.x % 16].q, p.q_stride.d, static_cast<int>(p.d),
                                        params.q_vector, p.score.scale_log2 < 0 ? 0x8000 : 0);
  copy_commit();
  copy_wait<0>();
  fence_async_proxy();
  barrier_arrive(q.full(i));
}

// Whether K and V are to stay in L2: other tiles of the head read them later. (Few tiles read them at the same time.)
template <class C>
__device__ bool keeps_keys(const PrefillParams& params) {
  return params.tiles * C::kGroups > 4;
}

// A tile's rows of Q by TMA, by one thread.
template <class C>
__device__ void load_q_by_tma(const PrefillParams& params, const TileExtent& tile, std::uint32_t to,
                              std::uint32_t barrier) {
  const int groups = min((tile.rows - tile.row + kGroupRows - 1) / kGroupRows, C::kGroups);
  const int tokens = kGroupRows / static_cast<int>(params.p.group);
  barrier_arrive_expecting(barrier, groups * (kGroupRows * C::kSize * 2));
#pragma unroll 1
  for (int group = 0; group < groups; ++group)
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel)
      tma_load(to + (panel * C::kRows + group * kGroupRows) * C::kRowBytes, &params.q, panel * C::kPanel, 0,
               tile.q_first + tile.token + group * tokens, tile.hk, params.p.total_q >= 0 ? 0 : tile.b, barrier);
}

// Stores a tile's results by TMA, by one thread, from where store_rows_to_shared() put them: as many rows from `row` on
// as the map's boxes have. Of dense queries only: the map ends at a sequence's last row.
template <class C>
__device__ __forceinline__ void store_by_tma(const PrefillParams& params, const TileExtent& tile, int row,
                                             std::uint32_t from) {
  if (tile.row + row >= tile.rows) return;
  const int token = static_cast<int>(params.group.quotient(tile.row + row));
#pragma unroll
  for (int panel = 0; panel < (C::kColumns + C::kPanel - 1) / C::kPanel; ++panel)
    if (const int column = panel * C::kPanel; column < params.p.dv)
      tma_store(&params.out, column, 0, token, tile.hk, tile.b, from + panel * (C::kRows * C::kRowBytes));
  tma_store_commit();
}

// Loads K and V by TMA, and Q if a map describes it. By one thread; or, for paged keys, by one warp, each lane with one
// box of a block's keys.
template <class C, bool kPaged>
__device__ void load_by_tma(const PrefillParams& params, TileScheduler<C> scheduler, const QueryRing<C>& q,
                            const Blocks<C>& k, const Blocks<C>& v) {
  const AttentionParams& p = params.p;
  const int lane = kPaged ? threadIdx.x % 32 : 0;
  TileExtent tile;
  KeyBounds32 keys;
  const bool keep_in_l2 = keeps_keys<C>(params);
  bool has_tile = scheduler.next(tile, keys);
  for (unsigned t = 0, n = 0; has_tile; ++t) {
    if (params.q_by_tma && lane == 0) {
      q.wait_empty(t);
      load_q_by_tma<C>(params, tile, q.slot(t), q.full(t));
    }
    std::int64_t first = tile.key;
    if (p.total_k >= 0) first += Head(p, tile.b, tile.hk).k_first;
    if (kPaged && p.ring) first %= p.page_size;
    const KeyBoxes boxes{params.box, p.total_k >= 0 ? 0 : tile.b, static_cast<int>(tile.begin - tile.key),
                         static_cast<int>(tile.end - tile.key), static_cast<unsigned>(first)};
    const auto place = [&](int block) {
      if constexpr (kPaged) return boxes.box_at(p, params.page_size, block * C::kKeys);
      else return KeyBoxes::Box{static_cast<int>(boxes.first) + block * C::kKeys, boxes.b};
    };
    const int hk = tile.hk, blocks = tile.blocks;
    KeyBoxes::Box next = place(blocks - 1);
    for (int block = blocks - 1; block >= 0; --block, ++n) {
      const KeyBoxes::Box current = next;
      if (block > 0) next = place(block - 1);  // a block ahead: the page table is in device memory
      const auto load = [&](const Blocks<C>& ring, const CUtensorMap& map) {
        ring.wait_empty(n);
        if (lane == 0) barrier_arrive_expecting(ring.full(n), C::kBlockBytes);
        if (kPaged) __syncwarp();
        if (lane * params.box < C::kKeys)
#pragma unroll
          for (int panel = 0; panel < C::kPanels; ++panel)
            tma_load(ring.slot(n) + (panel * C::kKeys + lane * params.box) * C::kRowBytes, &map, panel * C::kPanel,
                     current.row, hk, current.entry, ring.full(n), keep_in_l2);
        if (kPaged) __syncwarp();
      };
      load(k, params.k);
      load(v, params.v);
      if (block == min(1, blocks - 1)) has_tile = scheduler.next(tile, keys);  // before its loads are due
    }
  }
}

// Loads Q, K and V by all threads of a warpgroup, in any layout. Reads only keys that some row of the tile sees.
template <class C>
__device__ void load_by_threads(const PrefillParams& params, TileProducer<C> producer, const TileQueue& queue,
                                Tile<C>* tiles, const QueryRing<C>& q, const Blocks<C>& k, const Blocks<C>& v) {
  constexpr int kWarpRows = C::kKeys / 4;
  static_assert(kWarpRows % 8 == 0);
  const AttentionParams& p = params.p;
  const int first = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
  bool has_tile = producer.push(0);
  if (has_tile) load_q<C>(params, queue, tiles, q, 0);
  for (unsigned i = 0, n = 0; has_tile; ++i) {
    const TileExtent& tile = tiles[i % kQueueTiles];
    has_tile = producer.push(i + 1);  // a tile ahead, so that its readers do not wait for it

    const Head head(p, tile.b, tile.hk);
    std::uint32_t filling = 0;  // full barrier of the block whose copies are in flight
    for (int block = tile.blocks - 1; block >= 0; --block, ++n) {
      const std::int64_t key = tile.key + block * C::kKeys + first + lane;
      const bool exists = key >= tile.begin && key < tile.end;
#pragma unroll 1
      for (int values = 0; values < 2; ++values) {
        const Strides stride = values ? p.v_stride : p.k_stride;
        const Blocks<C> ring = values ? v : k;
        ring.wait_empty(n);
        load_rows<C::kSize, 2>(kWarpRows, ring.slot(n) + first * 128, C::kKeys * 128, values ? p.v : p.k,
                               exists ? head.key_at(stride, key) : -1, stride.d, static_cast<int>(values ? p.dv : p.d),
                               params.kv_vector, 0);
        copy_commit();
        if (filling) {
          copy_wait<1>();
          fence_async_proxy();
          barrier_arrive(filling);
        }
        filling = ring.full(n);
      }
    }
    copy_wait<0>();
    fence_async_proxy();
    barrier_arrive(filling);
    if (has_tile) load_q<C>(params, queue, tiles, q, i + 1);
  }
}

}  // namespace rapt::cuda
