// A call's tiles of query rows: which thread block does which in what order, and what their rows need to know.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/splits.cuh"
#include "cuda/tile/divisor.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {

constexpr int kGroupRows = 64;  // of a warpgroup
constexpr int kQueueTiles = 3;  // in shared memory: the one whose output is complete, the one at work and the next
using TileQueue = Ring<kQueueTiles>;

// What the kernels get: a call, its tiles as Tiling numbers them, and which thread blocks do them. Where C::kSplit,
// each split of a head's keys counts as a head.
struct Grid {
  AttentionParams p;
  Partials partials;  // where C::kSplit
  int heads, tiles;
  int section;                    // heads that are done together, for K and V to stay in L2
  int all;                        // heads * tiles
  Divisor section_tiles;          // section * tiles
  Divisor of_section, last_ones;  // heads of a section, and of the last one if it has fewer
  Divisor splits, hk, group;
  bool out_vector;  // rows of the output are contiguous and aligned to 16 bytes
  bool q_by_tma;    // the tiles' Q is loaded with K and V
  bool listed;      // thread blocks have a SequenceList
  // Where all sequences have the same lengths, what their rows see of keys counted from key 0.
  KeyWindow window;

  // The tile that the thread block does in a round; past `all`: none. Of the heads that are done together the longest
  // come first, for causal: tiles from the last of their heads on; every other round goes backwards, which gives each
  // thread block as much.
  __device__ unsigned tile_of(unsigned round) const {
    return round % 2 ? (round + 1) * gridDim.x - 1 - blockIdx.x : round * gridDim.x + blockIdx.x;
  }
  __device__ bool has_tile(unsigned round) const { return tile_of(round) < static_cast<unsigned>(all); }
  // The number of tile i's head, and the tile's in it.
  struct Place {
    int head, tile;
  };
  __device__ Place place(unsigned i) const {
    const unsigned all_heads = heads, in_one = tiles, together = section;
    const unsigned first = section_tiles.quotient(i) * together, in_section = i - first * in_one;
    const bool whole = first + together <= all_heads;
    const unsigned down = (whole ? of_section : last_ones).quotient(in_section);
    return {static_cast<int>(first + (in_section - down * (whole ? together : all_heads - first))),
            static_cast<int>(in_one - 1 - down)};
  }
};

// Keys [first, last), counted from some key.
struct KeyRange32 {
  int first, last;
};

// Where a tile begins and ends: rows of one kv head, and the blocks of keys that any of them sees: at least one, even
// if they see none.
struct TileExtent {
  int b, hk, row, rows;  // rows [row, rows), of which the tile has C::kRows
  int q_first, token;    // the sequence's first row of queries, and the tile's first token
  int split, blocks;
  std::int64_t key, begin, end;  // the first block's first key; the keys that any row sees

  // From where the tile begins and what its sequence's rows see of keys from `base` on, a multiple of kKeys: the rest.
  // `part_of(begin, end)` may leave out keys at either end. `keys` are then counted from the tile's first.
  template <int kRows, int kKeys, class PartOf>
  __device__ void cut(const Divisor& group, KeyWindow& keys, std::int64_t base, PartOf part_of) {
    // Neither end of what a row sees moves down from row to row, but rows past the mask's see nothing.
    const int last_row = min(row + kRows, rows) - 1;
    token = static_cast<int>(group.quotient(row));
    const int bottom = min(static_cast<int>(group.quotient(last_row)), keys.rows - 1);
    int from = keys.first_of(token), to = bottom < token ? from : keys.last_of(bottom);
    part_of(from, to);
    const int first = from / kKeys * kKeys;
    key = base + first, begin = base + from, end = base + to;
    blocks = to > from ? (to - first + kKeys - 1) / kKeys : 1;
    keys.start_at(first);
  }
};

// What a thread block looks up of a call's sequences, in shared memory, where lengths lie in the GPU's: a search there
// waits for each of its steps. Where keys are split, the numbers of splits of the sequences before, so that those that
// do not exist are not gone through; else the first rows of ragged sequences.
struct SequenceList {
  static constexpr int kMost = 1024;
  int before[kMost + 1];

  // In shared memory: none where there is no list, or the kernel that combines would not find room beside this one.
  static std::size_t bytes(const Grid& grid) { return grid.listed ? sizeof(SequenceList) : 0; }

  // By all threads; those of a warp at least, in whole warps. Synchronises them.
  template <class C>
  __device__ void fill(const Grid& grid) {
    const AttentionParams& p = grid.p;
    const int sequences = static_cast<int>(C::kSplit ? grid.partials.sequences : p.b);
    for (int i = threadIdx.x; i <= sequences; i += blockDim.x) {
      if constexpr (C::kSplit) {
        if (i == sequences) break;
        const Head head(p, grid.partials.first + i, 0);
        before[i + 1] = split_rows(head) > kFewRows ? SplitKeys(head, grid.partials.rule).count : 0;
      } else {
        before[i] = i == 0 ? 0 : static_cast<int>(clamp_to(p.q_begin[i], 0, p.total_q));
      }
    }
    __syncthreads();
    if constexpr (C::kSplit) {
      if (threadIdx.x < 32) add_up(sequences);
      __syncthreads();
    }
  }

 private:
  // From numbers to sums of those before, by one warp.
  __device__ void add_up(int count) {
    const int lane = threadIdx.x, each = (count + 31) / 32, begin = min(lane * each, count);
    const int end = min(begin + each, count);
    int sum = 0;
    for (int i = begin; i < end; ++i) sum += before[i + 1];
    int all = sum;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int other = __shfl_up_sync(~0u, all, lanes);
      if (lane >= lanes) all += other;
    }
    sum = all - sum;
    if (lane == 0) before[0] = 0;
    for (int i = begin; i < end; ++i) before[i + 1] = sum += before[i + 1];
  }
};

// The tiles of a thread block in order.
template <class C>
struct TileScheduler {
  const Grid& grid;
  const SequenceList& list;  // where grid.listed
  unsigned round = 0;

  // False: no more, and the tile has no blocks. `keys` are counted from the tile's first.
  __device__ bool next(TileExtent& tile, KeyWindow& keys) {
    const AttentionParams& p = grid.p;
    const auto all = static_cast<unsigned>(
        C::kSplit && grid.listed ? list.before[grid.partials.sequences] * static_cast<int>(p.hk) : grid.all);
    for (;; ++round) {
      const unsigned i = grid.tile_of(round);
      tile.blocks = 0;
      if (round * gridDim.x >= all) return false;
      if (i >= all) continue;
      if (C::kSplit && grid.listed) [[unlikely]]
        find_split(tile, static_cast<int>(i));
      else find(tile, i);
      if (locate(tile, keys)) return true;
    }
  }

 private:
  // Which split has number i of those that exist.
  __device__ void find_split(TileExtent& tile, int i) const {
    const int count = static_cast<int>(grid.partials.sequences), splits = list.before[count];
    tile.hk = i / splits, tile.row = 0;
    const int number = i - tile.hk * splits, b = sequence_at(number, count, [&](int n) { return list.before[n]; });
    tile.b = static_cast<int>(grid.partials.first) + b, tile.split = number - list.before[b];
  }
  // Which tile has number i.
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
    } else if (grid.listed) {
      const int group = static_cast<int>(p.group);
      const auto first = [&](int n) { return list.before[n] * group / C::kRows + n; };
      tile.b = sequence_at(in_head, static_cast<int>(p.b), first), tile.hk = head_number;
      tile.row = (in_head - first(tile.b)) * C::kRows;
    } else {
      const auto found = C::Tiles::find(p, head_number, in_head);
      tile.b = static_cast<int>(found.b), tile.hk = static_cast<int>(found.hk), tile.row = static_cast<int>(found.row);
    }
  }
  // The rest of it. False: it has no rows, or no keys of the split.
  __device__ bool locate(TileExtent& tile, KeyWindow& keys) {
    const AttentionParams& p = grid.p;
    const Sequence sequence = sequence_of(p, p, tile.b);
    tile.q_first = static_cast<int>(sequence.q_first);
    tile.rows = static_cast<int>(sequence.len_q) * static_cast<int>(p.group);
    if (tile.row >= tile.rows) return false;
    if (p.total_q >= 0 && is_split_apart(p, tile.rows) != C::kSplit) return false;  // the other launch's
    if (C::kSplit && tile.rows <= kFewRows) return false;                           // and split_kv's
    const std::int64_t base = sequence.oldest / C::kKeys * C::kKeys;
    keys = KeyWindow(p.score, sequence, base);
    if constexpr (C::kSplit) {
      const SplitKeys splits(Head(p, tile.b, tile.hk), grid.partials.rule);
      if (tile.split >= splits.count) return false;
      const int low = static_cast<int>(splits.first - base) + splits.keys * tile.split;
      tile.cut<C::kRows, C::kKeys>(grid.group, keys, base,
                                   [&](int& from, int& to) { from = max(from, low), to = min(to, low + splits.keys); });
    } else {
      tile.cut<C::kRows, C::kKeys>(grid.group, keys, base, [](int&, int&) {});
    }
    ++round;
    return true;
  }
};

// What a row has where keys are quantised: the scale of its query.
template <bool kQuantised>
struct RowScale {
  float scale;
};
template <>
struct RowScale<false> {};

// A tile of the queue with what its rows need, worked out once and in shared memory: registers are for what is hot.
template <class C>
struct Tile : TileExtent {
  struct OfRow : RowScale<C::kQuantised> {
    std::int64_t q, out, lse;  // where it begins; negative: it does not exist
    int token, q_head;
    int first, last;  // the keys it sees, from `key` on
    float sink, alibi_shift;
    std::int64_t nearest;  // the key nearest to the row, for ALiBi
  } of_row[C::kRows];
  __device__ const OfRow& of(const Grid&, int row) const { return of_row[row]; }
  __device__ float sink(const Grid&, int row) const { return of_row[row].sink; }
  // Keys that all of a warp's rows see, by the warp.
  __device__ KeyRange32 seen_by_all(int warp_row) const {
    const OfRow& row = of_row[warp_row + threadIdx.x % 16];
    return {__reduce_max_sync(~0u, row.first), __reduce_min_sync(~0u, row.last)};
  }
  int last_keys;  // of its last block: past these there may be anything. All, if TMA leaves zeros there

  // What a row's largest product times it is its largest score: of 0 a number so small that scores are 0; of others
  // NaN, which makes the row a fallback row.
  __device__ static float factor_of(float scale) {
    constexpr float kSmall = 0x1p-90f;
    if (scale == 0) return kSmall;
    return scale > 0 && is_finite(scale) ? scale : not_a_number();
  }

  // By `threads` threads.
  __device__ void fill(const Grid& grid, const TileExtent& extent, const KeyWindow& keys, int thread, int threads) {
    const AttentionParams& p = grid.p;
    const int all_keys = extent.blocks * C::kKeys;
    if (thread == 0) {
      static_cast<TileExtent&>(*this) = extent;
      const bool ends_all =
          p.total_k < 0 && p.page_size == 0 && extent.key + keys.high == p.sk;  // and so does what a tensor map knows
      last_keys = ends_all ? C::kKeys : min(keys.high - all_keys + C::kKeys, C::kKeys);
    }
    if (extent.blocks == 0) return;
    const int group = static_cast<int>(p.group);
    const std::int64_t first_head = extent.hk * p.group;
    const auto start = [&](const Strides& s) { return extent.b * s.b + first_head * s.h + extent.q_first * s.s; };
    const std::int64_t q = start(p.q_stride), out = start(p.out_stride), lse = start(p.lse_stride);
    // A split's tile without keys for its rows has a block all the same.
    const int end = C::kSplit ? static_cast<int>(max(extent.end - extent.key, std::int64_t{0})) : all_keys;
#pragma unroll 1
    for (int i = thread; i < C::kRows; i += threads) {
      // Rows that do not exist see what the last one sees: nothing is masked for them alone.
      const int r = min(extent.row + i, extent.rows - 1), token = static_cast<int>(grid.group.quotient(r));
      const int in_group = r - token * group;
      const bool exists = extent.row + i < extent.rows;
      auto& row = of_row[i];
      const auto at = [&](std::int64_t from, const Strides& s) {
        return exists ? from + in_group * s.h + token * s.s : -1;
      };
      if (!grid.q_by_tma) row.q = at(q, p.q_stride);
      row.out = at(out, p.out_stride);
      row.lse = p.lse ? at(lse, p.lse_stride) : -1;
      row.first = min(max(keys.first_of(token), 0), all_keys);
      row.last = min(max(keys.last_of(token), 0), end);
      row.sink = -kInfinity, row.alibi_shift = 0;
      if constexpr (C::kQuantised) {
        const Strides& s = p.q_scale_stride;
        const float scale = p.q_scale ? p.q_scale[start(s) + in_group * s.h + token * s.s] : 1.f;
        row.scale = C::kModified ? fmaf(scale, 0, scale) : factor_of(scale);
      }
      if (!C::kModified && (C::kSplit || !p.score.sinks)) continue;
      const Head head(p, extent.b, extent.hk);
      const Row found(head, token, first_head + in_group);
      row.token = token, row.q_head = static_cast<int>(first_head) + in_group;
      row.nearest = found.nearest(head);
      if (C::kModified) row.alibi_shift = alibi_shift_log2(head, found);
      if (!C::kSplit)
        row.sink = sink_of(head, found) + row.alibi_shift;  // of splits counted once, by attention_combine
    }
  }
};

// A tile of dense sequences that are all alike: what its rows need is worked out where they do.
template <class C>
struct DenseTile : TileExtent {
  KeyWindow keys;     // counted from the tile's first
  KeyRange32 of_all;  // those that all rows see, likewise

  struct OfRow {
    int first, last;
    std::int64_t out, lse;  // `out`: negative where the row does not exist
    float alibi_shift;
  };

  // The thread block's tile of round t. Without blocks: there is none.
  __device__ void find(const Grid& grid, unsigned t) {
    blocks = 0;
    if (!grid.has_tile(t)) return;
    const auto [head, tile] = grid.place(grid.tile_of(t));
    b = static_cast<int>(grid.hk.quotient(head)), hk = head - b * static_cast<int>(grid.p.hk), row = tile * C::kRows;
    rows = static_cast<int>(grid.p.sq) * static_cast<int>(grid.p.group), q_first = 0;
    keys = grid.window;
    cut<C::kRows, C::kKeys>(grid.group, keys, 0, [](int&, int&) {});
    const int bottom = token_of(grid, C::kRows - 1);
    of_all = {keys.first_of(bottom), min(keys.last_of(token), keys.last_of(bottom))};
  }
  __device__ OfRow of(const Grid& grid, int i) const {
    const AttentionParams& p = grid.p;
    const int token = token_of(grid, i);
    const auto within = [&](int key) { return min(max(key, 0), blocks * C::kKeys); };
    const bool exists = row + i < rows;
    return {within(keys.first_of(token)), within(keys.last_of(token)), exists ? 0 : -1,
            exists && p.lse ? b * p.lse_stride.b + q_head(grid, i) * p.lse_stride.h + token * p.lse_stride.s : -1, 0};
  }
  __device__ float sink(const Grid& grid, int i) const {
    const ScoreParams& s = grid.p.score;
    return s.sinks ? load(s.sinks, s.sinks_type, q_head(grid, i) * s.sinks_stride) * kLog2e : -kInfinity;
  }
  // Keys that all of a warp's rows see, or fewer: then some scores are compared for nothing.
  __device__ KeyRange32 seen_by_all(int) const { return of_all; }

 private:
  // Rows that do not exist see what the last one sees.
  __device__ int row_of(int i) const { return min(row + i, rows - 1); }
  __device__ int token_of(const Grid& grid, int i) const { return static_cast<int>(grid.group.quotient(row_of(i))); }
  __device__ std::int64_t q_head(const Grid& grid, int i) const {
    return hk * grid.p.group + static_cast<int>(grid.group.remainder(row_of(i)));
  }
};
template <class C>
using TileOf = std::conditional_t<C::kDense, DenseTile<C>, Tile<C>>;

// Puts the scheduler's tiles into the queue: the last C::kProducers threads of the first warpgroup.
template <class C>
struct TileProducer {
  const Grid& grid;
  const TileQueue& queue;
  Tile<C>* tiles;
  TileScheduler<C> scheduler;

  // Tile i. False: there is none, and an empty one says so.
  __device__ bool push(unsigned i) {
    TileExtent tile;
    KeyWindow keys;
    const bool more = scheduler.next(tile, keys);
    queue.wait_empty(i);
    tiles[i % kQueueTiles].fill(grid, tile, keys, threadIdx.x - (128 - C::kProducers), C::kProducers);
    barrier_arrive(queue.full(i));
    return more;
  }
};

// Fills in how tiles are numbered and ordered, for keys of so many bytes in K and V. How many thread blocks there are
// work and room for.
template <class C>
int plan_grid(Grid& grid, std::int64_t key_bytes) {
  const AttentionParams& p = grid.p;
  grid.heads = static_cast<int>(C::kSplit ? grid.partials.sequences * p.hk * grid.partials.splits : C::Tiles::heads(p));
  grid.tiles = C::kSplit ? 1 : static_cast<int>(C::Tiles::tiles(p));
  // Causal: tiles of one length of many heads one after another, of as many as have their K and V in L2.
  constexpr std::int64_t kCached = 24 << 20;
  const std::int64_t head_bytes = (p.total_k >= 0 ? p.total_k : p.sk) * key_bytes;
  const bool uneven = !C::kSplit && (p.score.right != kOpen || p.total_q >= 0);
  const int blocks = C::kBlocks * multiprocessors();
  grid.section = 1;
  if (uneven) {
    // Full rounds, or blocks that got the last and shortest of one section get the longest of the next, too.
    const std::int64_t full = blocks / std::gcd(blocks, grid.tiles);
    const std::int64_t cached = kCached / std::max<std::int64_t>(head_bytes, 1);
    // Many short sequences are done head after head, so that some blocks ask memory for keys while others find theirs
    // in L2. (Not heads of many tiles, which share keys as it is, and would not be shared out evenly.)
    const bool short_and_many =
        C::kDense && p.sk <= 4 * C::kKeys && 8 * grid.tiles <= blocks && grid.heads * grid.tiles >= 3 * blocks;
    if (!short_and_many)
      grid.section = static_cast<int>(std::min<std::int64_t>(std::max(cached / full * full, full), grid.heads));
  }
  grid.all = grid.heads * grid.tiles, grid.section_tiles = Divisor(grid.section * grid.tiles);
  grid.of_section = Divisor(grid.section), grid.last_ones = Divisor(std::max(grid.heads % grid.section, 1));
  grid.splits = Divisor(C::kSplit ? grid.partials.splits : 1), grid.hk = Divisor(p.hk), grid.group = Divisor(p.group);
  if (are_alike(p)) grid.window = KeyWindow(p.score, sequence_of(p, p, 0), 0);
  const bool found_by_search = p.total_q >= 0 && !C::kSplit, may_be_empty = C::kSplit && !are_alike(p);
  grid.listed = (found_by_search || (may_be_empty && grid.all > 2 * blocks)) &&
                (C::kSplit ? grid.partials.sequences : p.b) <= SequenceList::kMost;
  return std::min(blocks, grid.all);
}

}  // namespace rapt::cuda
