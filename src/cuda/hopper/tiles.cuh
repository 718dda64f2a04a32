// A call's tiles of query rows: how they are numbered, and what a tile's rows need to know.
#pragma once

#include "cuda/hopper/splits.cuh"
#include "cuda/tile/divisor.hpp"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {

constexpr int kGroupRows = 64;  // of a warpgroup

// What the kernels get: a call, its tiles as Tiling numbers them, and which thread blocks do them. Where C::kSplit,
// each split of a head's keys counts as a head.
struct TileGrid {
  AttentionParams p;
  PartialResults partials;  // where C::kSplit
  int heads, tiles;
  int section;                    // heads that are done together, for K and V to stay in L2
  int all;                        // heads * tiles
  Divisor section_tiles;          // section * tiles
  Divisor of_section, last_ones;  // heads of a section, and of the last one if it has fewer
  Divisor splits, hk, group;
  bool out_vector;  // rows of the output are contiguous and aligned to 16 bytes
  bool q_by_tma;    // the tiles' Q is loaded with K and V
  bool has_list;    // thread blocks have a SequenceList
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

// What a row has where keys are quantised: the scale of its query.
template <bool kQuantized>
struct RowScale {
  float scale;
};
template <>
struct RowScale<false> {};

// A tile of the queue with what its rows need, worked out once and in shared memory: registers are for what is hot.
template <class C>
struct Tile : TileExtent {
  struct RowInfo : RowScale<C::kQuantized> {
    std::int64_t q, out, lse;  // where it begins; negative: it does not exist
    int token, q_head;
    int first, last;  // the keys it sees, from `key` on
    float sink, alibi_shift;
    std::int64_t nearest;  // the key nearest to the row, for ALiBi
  } row_info[C::kRows];
  __device__ const RowInfo& of(const TileGrid&, int row) const { return row_info[row]; }
  __device__ float sink(const TileGrid&, int row) const { return row_info[row].sink; }
  // Keys that all of a warp's rows see, by the warp.
  __device__ KeyRange32 seen_by_all(int warp_row) const {
    const RowInfo& row = row_info[warp_row + threadIdx.x % 16];
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
  __device__ void fill(const TileGrid& grid, const TileExtent& extent, const KeyWindow& keys, int thread, int threads) {
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
      auto& row = row_info[i];
      const auto at = [&](std::int64_t from, const Strides& s) {
        return exists ? from + in_group * s.h + token * s.s : -1;
      };
      if (!grid.q_by_tma) row.q = at(q, p.q_stride);
      row.out = at(out, p.out_stride);
      row.lse = p.lse ? at(lse, p.lse_stride) : -1;
      row.first = min(max(keys.first_of(token), 0), all_keys);
      row.last = min(max(keys.last_of(token), 0), end);
      row.sink = -kInfinity, row.alibi_shift = 0;
      if constexpr (C::kQuantized) {
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

  struct RowInfo {
    int first, last;
    std::int64_t out, lse;  // `out`: negative where the row does not exist
    float alibi_shift;
  };

  // The thread block's tile of round t. Without blocks: there is none.
  __device__ void find(const TileGrid& grid, unsigned t) {
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
  __device__ RowInfo of(const TileGrid& grid, int i) const {
    const AttentionParams& p = grid.p;
    const int token = token_of(grid, i);
    const auto within = [&](int key) { return min(max(key, 0), blocks * C::kKeys); };
    const bool exists = row + i < rows;
    return {within(keys.first_of(token)), within(keys.last_of(token)), exists ? 0 : -1,
            exists && p.lse ? b * p.lse_stride.b + q_head(grid, i) * p.lse_stride.h + token * p.lse_stride.s : -1, 0};
  }
  __device__ float sink(const TileGrid& grid, int i) const {
    const ScoreParams& s = grid.p.score;
    return s.sinks ? load(s.sinks, s.sinks_type, q_head(grid, i) * s.sinks_stride) * kLog2e : -kInfinity;
  }
  // Keys that all of a warp's rows see, or fewer: then some scores are compared for nothing.
  __device__ KeyRange32 seen_by_all(int) const { return of_all; }

 private:
  // Rows that do not exist see what the last one sees.
  __device__ int row_of(int i) const { return min(row + i, rows - 1); }
  __device__ int token_of(const TileGrid& grid, int i) const {
    return static_cast<int>(grid.group.quotient(row_of(i)));
  }
  __device__ std::int64_t q_head(const TileGrid& grid, int i) const {
    return hk * grid.p.group + static_cast<int>(grid.group.remainder(row_of(i)));
  }
};
template <class C>
using TileOf = std::conditional_t<C::kDense, DenseTile<C>, Tile<C>>;

}  // namespace rapt::cuda
