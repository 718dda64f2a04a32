// Tiles of query rows: how a call's tiles are numbered, and what a kernel needs to know of a tile's rows.
#pragma once

#include "cuda/hopper/splits.cuh"
#include "cuda/tile/divisor.hpp"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {

constexpr int kGroupRows = 64;  // a warpgroup's rows

// A call's tiles, numbered as by Tiling, and the order in which thread blocks take them. With kSplit, each split of a
// head's keys counts as a head.
struct TileGrid {
  AttentionParams p;
  PartialResults partials;  // if C::kSplit
  int heads, tiles;
  int section;                          // heads whose tiles are interleaved, so that their K and V stay in L2
  int total_tiles;                      // heads * tiles
  Divisor section_tiles;                // section * tiles
  Divisor of_section, of_last_section;  // heads of a section; of the last section, if it has fewer
  Divisor splits, hk, group;
  bool out_vector;  // rows of the output are contiguous and aligned to 16 bytes
  bool q_by_tma;    // TMA loads Q
  bool has_list;    // thread blocks have a SequenceList in shared memory
  // If all sequences have the same lengths: what their rows see of keys, counted from key 0.
  KeyBounds32 window;

  // The thread block's tile in a round; none if it is `total_tiles` or more. Within a section the longest tiles come
  // first, for causal calls: from the last tile of each head on. Every other round goes backwards, so that each thread
  // block gets as much.
  __device__ unsigned tile_of(unsigned round) const {
    return round % 2 ? (round + 1) * gridDim.x - 1 - blockIdx.x : round * gridDim.x + blockIdx.x;
  }
  __device__ bool has_tile(unsigned round) const { return tile_of(round) < static_cast<unsigned>(total_tiles); }
  // Tile i's head, and its number within that head.
  struct HeadTile {
    int head, tile;
  };
  __device__ HeadTile place(unsigned i) const {
    const unsigned all_heads = heads, tiles_of_head = tiles, heads_of_section = section;
    const unsigned first = section_tiles.quotient(i) * heads_of_section, in_section = i - first * tiles_of_head;
    const bool whole = first + heads_of_section <= all_heads;
    const unsigned from_last = (whole ? of_section : of_last_section).quotient(in_section);
    return {static_cast<int>(first + (in_section - from_last * (whole ? heads_of_section : all_heads - first))),
            static_cast<int>(tiles_of_head - 1 - from_last)};
  }
};

// Keys [first, last), counted from a key that the context says.
struct KeyRange32 {
  int first, last;
};

// The extent of a tile: rows of one kv head, and the key blocks that any of them sees; one block if they see none.
struct TileExtent {
  int b, hk, row, rows;  // rows [row, rows) are left of the sequence; the tile has C::kRows of them
  int q_first, token;    // the sequence's first row in q; the tile's first token
  int split, blocks;
  std::int64_t key, begin, end;  // the first key of the first block; the keys [begin, end) that any row sees

  // Fills in token, blocks, key, begin and end from `row` and `keys`, the sequence's keys counted from `base`, a
  // multiple of kKeys. `part_of(begin, end)` may cut keys off at either end. `keys` are then counted from the tile's
  // first.
  template <int kRows, int kKeys, class PartOf>
  __device__ void find_keys(const Divisor& group, KeyBounds32& keys, std::int64_t base, PartOf part_of) {
    // Neither end of what a row sees moves down from row to row, but rows past the mask's last see nothing.
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

// The scale of a row's query, which quantized calls may have.
template <bool kQuantized>
struct RowScale {
  float scale;
};
template <>
struct RowScale<false> {};

// A queued tile with the data of its rows, computed once and kept in shared memory, since registers are needed for the
// inner loop.
template <class C>
struct Tile : TileExtent {
  struct RowInfo : RowScale<C::kQuantized> {
    std::int64_t q, out, lse;  // offsets of the row; negative: it does not exist
    int token, q_head;
    int first, last;  // the keys that it sees, counted from `key`
    float sink, alibi_shift;
    std::int64_t nearest;  // the key nearest to the row, for ALiBi
  } row_info[C::kRows];
  __device__ const RowInfo& of(const TileGrid&, int row) const { return row_info[row]; }
  __device__ float sink(const TileGrid&, int row) const { return row_info[row].sink; }
  // The keys that all of a warp's rows see. By the whole warp.
  __device__ KeyRange32 seen_by_all(int warp_row) const {
    const RowInfo& row = row_info[warp_row + threadIdx.x % 16];
    return {__reduce_max_sync(~0u, row.first), __reduce_min_sync(~0u, row.last)};
  }
  int last_keys;  // keys of the last block that hold data, or zeros that TMA wrote; past them V may hold anything

  // The factor on the largest product of a row that gives its largest score. A scale of 0 becomes so small a number
  // that scores are 0; one that is negative or not finite becomes NaN, which makes the row a fallback row.
  __device__ static float factor_of(float scale) {
    constexpr float kSmall = 0x1p-90f;
    if (scale == 0) return kSmall;
    return scale > 0 && is_finite(scale) ? scale : not_a_number();
  }

  // Called by `threads` threads.
  __device__ void fill(const TileGrid& grid, const TileExtent& extent, const KeyBounds32& keys, int thread,
                       int threads) {
    const AttentionParams& p = grid.p;
    const int all_keys = extent.blocks * C::kKeys;
    if (thread == 0) {
      static_cast<TileExtent&>(*this) = extent;
      const bool ends_all =
          p.total_k < 0 && p.page_size == 0 && extent.key + keys.high == p.sk;  // the tensor map ends there, too
      last_keys = ends_all ? C::kKeys : min(keys.high - all_keys + C::kKeys, C::kKeys);
    }
    if (extent.blocks == 0) return;
    const int group = static_cast<int>(p.group);
    const std::int64_t first_head = extent.hk * p.group;
    const auto start = [&](const Strides& s) { return extent.b * s.b + first_head * s.h + extent.q_first * s.s; };
    const std::int64_t q = start(p.q_stride), out = start(p.out_stride), lse = start(p.lse_stride);
    // A split without keys for its rows has a block all the same.
    const int end = C::kSplit ? static_cast<int>(max(extent.end - extent.key, std::int64_t{0})) : all_keys;
#pragma unroll 1
    for (int i = thread; i < C::kRows; i += threads) {
      // Rows past the last one see what it sees, so that they cause no masking.
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
        row.sink = sink_of(head, found) + row.alibi_shift;  // with splits, attention_combine counts it once
    }
  }
};

// A tile of sequences of equal lengths: the data of its rows are computed where they are needed.
template <class C>
struct DenseTile : TileExtent {
  KeyBounds32 keys;             // counted from the tile's first
  KeyRange32 seen_by_all_rows;  // those that all rows see, counted likewise

  struct RowInfo {
    int first, last;
    std::int64_t out, lse;  // out: negative if the row does not exist
    float alibi_shift;
  };

  // Finds the thread block's tile of round t; none: it has no blocks.
  __device__ void find(const TileGrid& grid, unsigned t) {
    blocks = 0;
    if (!grid.has_tile(t)) return;
    const auto [head, tile] = grid.place(grid.tile_of(t));
    b = static_cast<int>(grid.hk.quotient(head)), hk = head - b * static_cast<int>(grid.p.hk), row = tile * C::kRows;
    rows = static_cast<int>(grid.p.sq) * static_cast<int>(grid.p.group), q_first = 0;
    keys = grid.window;
    find_keys<C::kRows, C::kKeys>(grid.group, keys, 0, [](int&, int&) {});
    const int bottom = token_of(grid, C::kRows - 1);
    seen_by_all_rows = {keys.first_of(bottom), min(keys.last_of(token), keys.last_of(bottom))};
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
  // Keys that all rows of the tile see. A warp's rows may see more: then some scores are compared in vain.
  __device__ KeyRange32 seen_by_all(int) const { return seen_by_all_rows; }

 private:
  // Rows past the last one see what it sees.
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
