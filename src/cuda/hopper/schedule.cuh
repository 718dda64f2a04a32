// The tile scheduler: which thread block does which tiles of query rows, in what order.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/splits.cuh"
#include "cuda/hopper/tiles.cuh"
#include "cuda/tile/divisor.hpp"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

constexpr int kQueueTiles = 3;  // in shared memory: the tile being stored, the one at work, and the next
using TileQueue = Ring<kQueueTiles>;

// A table of a call's sequences in shared memory, where lengths lie in device memory: a binary search there would wait
// for each step. With kSplit, offsets[i] is how many splits the sequences before i have, so that empty splits are
// skipped; else the first row of ragged sequence i.
struct SequenceList {
  static constexpr int kMax = 1024;
  int offsets[kMax + 1];

  // Bytes of shared memory: none without a list, or attention_combine would find no room beside this kernel.
  static std::size_t bytes(const TileGrid& grid) { return grid.has_list ? sizeof(SequenceList) : 0; }

  // Called by all threads of the block, at least a warp. Synchronises them.
  template <class C>
  __device__ void fill(const TileGrid& grid) {
    const AttentionParams& p = grid.p;
    const int sequences = static_cast<int>(C::kSplit ? grid.partials.sequences : p.b);
    for (int i = threadIdx.x; i <= sequences; i += blockDim.x) {
      if constexpr (C::kSplit) {
        if (i == sequences) break;
        const Head head(p, grid.partials.first + i, 0);
        offsets[i + 1] = decode_rows(head) > kFewRows ? SplitKeys(head, grid.partials.rule).count : 0;
      } else {
        offsets[i] = i == 0 ? 0 : static_cast<int>(clamp_to(p.q_begin[i], 0, p.total_q));
      }
    }
    __syncthreads();
    if constexpr (C::kSplit) {
      if (threadIdx.x < 32) add_up(sequences);
      __syncthreads();
    }
  }

 private:
  // Prefix sum of the offsets, by one warp.
  __device__ void add_up(int count) {
    const int lane = threadIdx.x, each = (count + 31) / 32, begin = min(lane * each, count);
    const int end = min(begin + each, count);
    int sum = 0;
    for (int i = begin; i < end; ++i) sum += offsets[i + 1];
    int all = sum;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int other = __shfl_up_sync(~0u, all, lanes);
      if (lane >= lanes) all += other;
    }
    sum = all - sum;
    if (lane == 0) offsets[0] = 0;
    for (int i = begin; i < end; ++i) offsets[i + 1] = sum += offsets[i + 1];
  }
};

// The tiles of a thread block, in order.
template <class C>
struct TileScheduler {
  const TileGrid& grid;
  const SequenceList& list;  // where grid.listed
  unsigned round = 0;

  // The next tile; false: there is none, and `tile` has no blocks. `keys` are counted from the tile's first.
  __device__ bool next(TileExtent& tile, KeyBounds32& keys) {
    const AttentionParams& p = grid.p;
    const auto all = static_cast<unsigned>(
        C::kSplit && grid.has_list ? list.offsets[grid.partials.sequences] * static_cast<int>(p.hk) : grid.total_tiles);
    for (;; ++round) {
      const unsigned i = grid.tile_of(round);
      tile.blocks = 0;
      if (round * gridDim.x >= all) return false;
      if (i >= all) continue;
      if (C::kSplit && grid.has_list) [[unlikely]]
        find_split(tile, static_cast<int>(i));
      else find(tile, i);
      if (locate(tile, keys)) return true;
    }
  }

 private:
  // Finds the i-th of the splits that have keys.
  __device__ void find_split(TileExtent& tile, int i) const {
    const int count = static_cast<int>(grid.partials.sequences), splits = list.offsets[count];
    tile.hk = i / splits, tile.row = 0;
    const int number = i - tile.hk * splits, b = sequence_at(number, count, [&](int n) { return list.offsets[n]; });
    tile.b = static_cast<int>(grid.partials.first) + b, tile.split = number - list.offsets[b];
  }
  // Finds tile i.
  __device__ void find(TileExtent& tile, unsigned i) const {
    const AttentionParams& p = grid.p;
    auto [head_number, in_head] = grid.place(i);
    tile.split = 0;
    if constexpr (C::kSplit) {
      const int head = static_cast<int>(grid.splits.quotient(head_number));
      tile.split = head_number - head * grid.partials.splits, head_number = head;
    }
    if (C::kSplit || p.total_q < 0) {
      tile.b = static_cast<int>(grid.hk.quotient(head_number));
      tile.hk = head_number - tile.b * static_cast<int>(p.hk), tile.row = in_head * C::kRows;
      if (C::kSplit) tile.b += static_cast<int>(grid.partials.first);
    } else if (grid.has_list) {
      const int group = static_cast<int>(p.group);
      const auto first = [&](int n) { return list.offsets[n] * group / C::kRows + n; };
      tile.b = sequence_at(in_head, static_cast<int>(p.b), first), tile.hk = head_number;
      tile.row = (in_head - first(tile.b)) * C::kRows;
    } else {
      const auto found = C::Tiles::find(p, head_number, in_head);
      tile.b = static_cast<int>(found.b), tile.hk = static_cast<int>(found.head),
      tile.row = static_cast<int>(found.row);
    }
  }
  // Fills in the rest of a tile. False: it has no rows, or its split no keys.
  __device__ bool locate(TileExtent& tile, KeyBounds32& keys) {
    const AttentionParams& p = grid.p;
    const Sequence sequence = sequence_of(p, p, tile.b);
    tile.q_first = static_cast<int>(sequence.q_first);
    tile.rows = static_cast<int>(sequence.len_q) * static_cast<int>(p.group);
    if (tile.row >= tile.rows) return false;
    if (p.total_q >= 0 && is_decode_sequence(p, tile.rows) != C::kSplit) return false;  // the other launch does it
    if (C::kSplit && tile.rows <= kFewRows) return false;                               // attention_decode does it
    const std::int64_t base = sequence.oldest / C::kKeys * C::kKeys;
    keys = KeyBounds32(p.score, sequence, base);
    if constexpr (C::kSplit) {
      const SplitKeys splits(Head(p, tile.b, tile.hk), grid.partials.rule);
      if (tile.split >= splits.count) return false;
      const int low = static_cast<int>(splits.first - base) + splits.keys * tile.split;
      tile.find_keys<C::kRows, C::kKeys>(
          grid.group, keys, base, [&](int& from, int& to) { from = max(from, low), to = min(to, low + splits.keys); });
    } else {
      tile.find_keys<C::kRows, C::kKeys>(grid.group, keys, base, [](int&, int&) {});
    }
    ++round;
    return true;
  }
};

// Fills the tile queue: the last C::kProducers threads of the first warpgroup.
template <class C>
struct TileProducer {
  const TileGrid& grid;
  const TileQueue& queue;
  Tile<C>* tiles;
  TileScheduler<C> scheduler;

  // Queues tile i; false: there is none, and an empty tile tells the readers.
  __device__ bool push(unsigned i) {
    TileExtent tile;
    KeyBounds32 keys;
    const bool more = scheduler.next(tile, keys);
    queue.wait_empty(i);
    tiles[i % kQueueTiles].fill(grid, tile, keys, threadIdx.x - (128 - C::kProducers), C::kProducers);
    barrier_arrive(queue.full(i));
    return more;
  }
};

// Fills in the numbering and order of tiles, for keys of key_bytes bytes in K and V together. Returns how many thread
// blocks to launch.
template <class C>
int plan_grid(TileGrid& grid, std::int64_t key_bytes) {
  const AttentionParams& p = grid.p;
  grid.heads = static_cast<int>(C::kSplit ? grid.partials.sequences * p.hk * grid.partials.splits : C::Tiles::heads(p));
  grid.tiles = C::kSplit ? 1 : static_cast<int>(C::Tiles::tiles(p));
  // Causal and ragged calls: tiles of the same length of several heads follow each other, of as many heads as have
  // their K and V in L2.
  constexpr std::int64_t kCached = 24 << 20;
  const std::int64_t head_bytes = (p.total_k >= 0 ? p.total_k : p.sk) * key_bytes;
  const bool has_uneven_tiles = !C::kSplit && (p.score.right != kOpen || p.total_q >= 0);
  const int blocks = C::kBlocksPerMultiprocessor * multiprocessors();
  grid.section = 1;
  if (has_uneven_tiles) {
    // Whole rounds of thread blocks: otherwise the blocks with the last and shortest tiles of a section would also get
    // the longest of the next.
    const std::int64_t full = blocks / std::gcd(blocks, grid.tiles);
    const std::int64_t cached = kCached / std::max<std::int64_t>(head_bytes, 1);
    // Many short sequences are done head by head, so that some blocks read keys from memory while others find theirs in
    // L2. (Not heads of many tiles: those share keys anyway, and would be distributed unevenly.)
    const bool short_and_many =
        C::kDense && p.sk <= 4 * C::kKeys && 8 * grid.tiles <= blocks && grid.heads * grid.tiles >= 3 * blocks;
    if (!short_and_many)
      grid.section = static_cast<int>(std::min<std::int64_t>(std::max(cached / full * full, full), grid.heads));
  }
  grid.total_tiles = grid.heads * grid.tiles, grid.section_tiles = Divisor(grid.section * grid.tiles);
  grid.of_section = Divisor(grid.section), grid.of_last_section = Divisor(std::max(grid.heads % grid.section, 1));
  grid.splits = Divisor(C::kSplit ? grid.partials.splits : 1), grid.hk = Divisor(p.hk), grid.group = Divisor(p.group);
  if (are_alike(p)) grid.window = KeyBounds32(p.score, sequence_of(p, p, 0), 0);
  const bool found_by_search = p.total_q >= 0 && !C::kSplit, may_be_empty = C::kSplit && !are_alike(p);
  grid.has_list = (found_by_search || (may_be_empty && grid.total_tiles > 2 * blocks)) &&
                  (C::kSplit ? grid.partials.sequences : p.b) <= SequenceList::kMax;
  return std::min(blocks, grid.total_tiles);
}

}  // namespace rapt::cuda
