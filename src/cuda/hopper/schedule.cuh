// A call's tiles of query rows: which thread block does which in what order, and what their rows need to know.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/splits.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {

constexpr int kGroupRows = 64;  // of a warpgroup
constexpr int kQueueTiles = 3;  // in shared memory: the one whose output is complete, the one at work and the next
using TileQueue = Ring<kQueueTiles>;
constexpr int kProducerBarrier = 8;  // of those that warpgroups leave

// What both kernels get: a call, its tiles as Tiling numbers them, and which thread blocks do them. Where C::kSplit,
// each split of a head's keys counts as a head.
struct Grid {
  AttentionParams p;
  Partials partials;  // where C::kSplit
  int heads, tiles;
  int section;                   // heads that are done together, for K and V to stay in L2
  int all, section_tiles;        // heads * tiles, section * tiles
  bool out_vector;               // rows of the output are contiguous and aligned to 16 bytes
  std::uint16_t* fallback_rows;  // of 16 rows each: a bit for each that attention_simt is to compute
};

// Where a tile begins and ends: rows of one kv head, and the blocks of keys that any of them sees: at least one, even
// if they see none.
struct TileExtent {
  int b, hk, row, rows;  // rows [row, rows), of which the tile has C::kRows
  int split, blocks;
  std::int64_t key, begin, end;  // the first block's first key; the keys that any row sees
};

// The tiles of a thread block in order.
template <class C>
struct TileScheduler {
  const Grid& grid;
  unsigned round = 0;

  // False: no more, and the tile has no blocks.
  __device__ bool next(TileExtent& tile) {
    const AttentionParams& p = grid.p;
    for (;; ++round) {
      // The longest first, for causal: tiles from the last of their heads on; every other round backwards, which gives
      // each thread block as much.
      const unsigned i = round % 2 ? (round + 1) * gridDim.x - 1 - blockIdx.x : round * gridDim.x + blockIdx.x;
      const unsigned heads = grid.heads, tiles = grid.tiles, section = grid.section;
      tile.blocks = 0;
      if (round * gridDim.x >= static_cast<unsigned>(grid.all)) return false;
      if (i >= static_cast<unsigned>(grid.all)) continue;
      const unsigned first = i / static_cast<unsigned>(grid.section_tiles) * section, in_section = i - first * tiles;
      const unsigned here = min(section, heads - first), down = in_section / here;
      unsigned head_number = first + (in_section - down * here);
      tile.split = 0;
      if constexpr (C::kSplit) {
        const auto splits = static_cast<unsigned>(grid.partials.splits);
        tile.split = static_cast<int>(head_number % splits), head_number /= splits;
      }
      const auto found = C::Tiles::find(p, static_cast<int>(head_number), static_cast<int>(tiles - 1 - down));
      const Head head(p, found.b, found.hk);
      tile.b = static_cast<int>(found.b), tile.hk = static_cast<int>(found.hk);
      tile.row = static_cast<int>(found.row), tile.rows = static_cast<int>(head.len_q * p.group);
      if (tile.row >= tile.rows) continue;
      // Neither end of what a row sees moves down from row to row, but rows past the mask's see nothing.
      const Row top = row_of(head, tile.row), bottom = row_of(head, min(tile.row + C::kRows, tile.rows) - 1);
      const std::int64_t token = min(bottom.token + 1, p.score.modifier_rows) - 1;
      tile.begin = top.first, tile.end = token < top.token ? 0 : Row(head, token, 0).last;
      if constexpr (C::kSplit) {
        const SplitKeys splits(head, grid.partials.max_splits);
        if (tile.split >= splits.count) continue;
        const std::int64_t low = splits.first + std::int64_t{splits.keys} * tile.split;
        tile.begin = max(tile.begin, low), tile.end = min(tile.end, low + splits.keys);
      }
      tile.key = tile.begin / C::kKeys * C::kKeys;
      tile.blocks = tile.end > tile.begin ? (static_cast<int>(tile.end - tile.key) + C::kKeys - 1) / C::kKeys : 1;
      ++round;
      return true;
    }
  }
};

// A tile of the queue with what its rows need, worked out once and in shared memory: registers are for what is hot.
template <class C>
struct Tile : TileExtent {
  struct {
    std::int64_t q, out, lse;  // where it begins; negative: it does not exist
    int token, q_head;
    int first, last;  // the keys it sees, from `key` on
    float sink, alibi_shift;
    std::int64_t nearest;  // the key nearest to the row, for ALiBi
  } of_row[C::kRows];
  int last_keys;  // that its last block has

  // By `threads` threads, which read the extent from shared memory: registers are few.
  __device__ void fill(const AttentionParams& p, const TileExtent& found, int thread, int threads) {
    TileExtent& extent = *this;
    if (thread == 0) extent = found;
    named_sync(kProducerBarrier, threads);
    if (extent.blocks == 0) return;
    const Head head(p, extent.b, extent.hk);
    if (thread == 0) {
      const std::int64_t left = head.len_k - extent.key - (extent.blocks - 1) * C::kKeys;
      last_keys = static_cast<int>(clamp_to(left, 0, C::kKeys));
    }
#pragma unroll 1
    for (int i = thread; i < C::kRows; i += threads) {
      const int r = extent.row + i, end = extent.blocks * C::kKeys;
      const bool exists = r < extent.rows;
      const Row at = row_of(head, min(r, extent.rows - 1));
      auto& row = of_row[i];
      row.q = exists ? row_at(p.q_stride, head, at) : -1;
      row.out = exists ? row_at(p.out_stride, head, at) : -1;
      row.lse = exists && p.lse ? row_at(p.lse_stride, head, at) : -1;
      row.token = static_cast<int>(at.token), row.q_head = static_cast<int>(at.q_head);
      // Rows that do not exist see what the last one sees: nothing is masked for them alone.
      // A split's tile without keys for its rows has a block all the same.
      const std::int64_t last = C::kSplit ? min(at.last, extent.end) : at.last;
      row.first = static_cast<int>(clamp_to(at.first - extent.key, 0, end));
      row.last = static_cast<int>(clamp_to(last - extent.key, 0, end));
      row.alibi_shift = alibi_shift_log2(head, at);
      row.sink = C::kSplit ? -kInfinity : sink_of(head, at) + row.alibi_shift;  // counted once, by attention_combine
      row.nearest = at.nearest(head);
    }
  }
};

// Puts the scheduler's tiles into the queue: the last C::kProducers threads of the first warpgroup.
template <class C>
struct TileProducer {
  const Grid& grid;
  const TileQueue& queue;
  Tile<C>* tiles;
  TileScheduler<C> scheduler{grid};

  // Tile i. False: there is none, and an empty one says so.
  __device__ bool push(unsigned i) {
    TileExtent tile;
    const bool more = scheduler.next(tile);
    queue.wait_empty(i);
    tiles[i % kQueueTiles].fill(grid.p, tile, threadIdx.x - (128 - C::kProducers), C::kProducers);
    barrier_arrive(queue.full(i));
    return more;
  }
};

// Fills in how tiles are numbered and ordered, for keys of so many bytes in K and V. How many thread blocks there are
// work and room for.
template <class C>
int plan_grid(Grid& grid, std::int64_t key_bytes) {
  const AttentionParams& p = grid.p;
  grid.heads = static_cast<int>(C::Tiles::heads(p)) * (C::kSplit ? grid.partials.splits : 1);
  grid.tiles = static_cast<int>(C::Tiles::tiles(p));
  // Causal: tiles of one length of many heads one after another, of as many as have their K and V in L2.
  constexpr std::int64_t kCached = 64 << 20;
  const std::int64_t head_bytes = (p.total_k >= 0 ? p.total_k : p.sk) * key_bytes;
  const bool uneven = !C::kSplit && (p.score.right != kOpen || p.total_q >= 0);
  const int processors = multiprocessors();
  grid.section = 1;
  if (uneven) {
    // Full rounds, or processors that got the last and shortest of one section get the longest of the next, too.
    const std::int64_t full = processors / std::gcd(processors, grid.tiles);
    const std::int64_t cached = kCached / std::max<std::int64_t>(head_bytes, 1);
    grid.section = static_cast<int>(std::min<std::int64_t>(std::max(cached / full * full, full), grid.heads));
  }
  grid.all = grid.heads * grid.tiles, grid.section_tiles = grid.section * grid.tiles;
  return std::min(C::kBlocks * processors, grid.all);
}

}  // namespace rapt::cuda
