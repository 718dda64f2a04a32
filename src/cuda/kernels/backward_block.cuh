// A thread block of attention_backward: its rows or keys, and what of the other side they meet.
#pragma once

#include "cuda/kernels/backward_config.cuh"

namespace rapt::cuda {

// The thread block's own rows or keys, and the tiles of the other side that they meet. Rows are a query head's tokens;
// keys meet those of each query head of their group, in order. Sharers, the thread blocks of a cluster, have the same
// keys, and each meets some of the tiles of every head.
template <class C>
struct BackwardBlock {
  using Rows = QueryHeadTiling<C::kOwn>;
  using Keys = Blocking<C::kOwn>;

  const BackwardParams& params;
  const AttentionBackwardParams& p;
  Head head;
  KeyBounds32 bounds;
  std::byte* ds;        // the head's slot
  int q_head, q_heads;  // the first query head, and how many
  int own, own_end;     // the first own row or key, and the end of those that exist
  int other, tiles;  // the tiles of the other side that some own row or key meets, of each head: from a multiple of 64

  struct Start {
    std::int64_t b, head, own;  // head: a kv head, or of rows a query head
  };
  // Tile `tile` of head `head`: the longest of causal calls come first.
  __device__ static Start find(const BackwardParams& params, int head, int tile) {
    if constexpr (C::kOfKeys) {
      const auto found = Keys::find(params.p, std::int64_t{head} * params.tiles + tile);
      return {found.b, found.hk, found.key};
    } else {
      const auto found = Rows::find(params.p, head, (C::kReadsDs ? params.row_tiles : params.tiles) - 1 - tile);
      return {found.b, found.head, found.row};
    }
  }
  __device__ static Start find_in_section(const BackwardParams& params) {
    const int number = static_cast<int>(blockIdx.x) / (C::kGrouped ? params.sharers : 1),
              in_section = params.section * params.tiles, first = number / in_section, left = number % in_section;
    const int heads = min(params.section, params.heads - first * params.section);
    return find(params, first * params.section + left % heads, left / heads);
  }

  __device__ explicit BackwardBlock(const BackwardParams& params) : BackwardBlock(params, find_in_section(params)) {}
  __device__ BackwardBlock(const BackwardParams& params, int head, int tile)
      : BackwardBlock(params, find(params, head, tile)) {}

  // The thread block's number in its cluster.
  __device__ int rank() const { return static_cast<int>(blockIdx.x) % params.sharers; }
  __device__ int tokens() const { return static_cast<int>(head.len_q); }
  __device__ int keys() const { return static_cast<int>(head.len_k); }
  __device__ int kv_head() const { return static_cast<int>(head.b * p.hk + head.hk); }
  __device__ std::byte* ds_tile(int h, int key_tile, int row_tile) const {
    const int in_group = h - static_cast<int>(head.hk * p.group);
    return ds + std::int64_t{(in_group * params.ds_keys + key_tile) * params.ds_rows + row_tile} * kDsTileBytes;
  }
  // What the math warpgroups need of a tile of rows.
  __device__ const RowsOfTile* rows_of(int h, int token) const {
    return params.rows.tiles + BackwardTiling::number(p, head.b, h, token);
  }
  // The own rows or keys that have a gradient to store: also keys past a sequence's end, if they have memory.
  __device__ int store_end() const { return C::kOfKeys && p.total_k < 0 ? static_cast<int>(p.sk) : own_end; }

  // The rows or keys of the other side that own ones [from, to) meet.
  __device__ KeyRange32 others_of(int from, int to) const {
    to = min(to, min(own_end, C::kOfKeys ? bounds.limit : bounds.rows));
    if (from >= to) return {0, 0};
    if constexpr (C::kOfKeys) {
      // Both ends of what a row sees rise with its token t: keys [t + first, t + last).
      const int rows = min(tokens(), bounds.rows);
      return {min(max(from - bounds.last + 1, 0), rows), min(max(to - bounds.first, 0), rows)};
    } else {
      return {bounds.first_of(from), bounds.last_of(to - 1)};
    }
  }
  // The tiles of the other side, counted from the first, that the 64 own rows or keys from `first` on meet.
  __device__ KeyRange32 tiles_of(int first) const {
    const auto [from, to] = others_of(first, first + kBackwardTile);
    if (from >= to) return {0, 0};
    const int begin = max((from - other) / kBackwardTile, 0),
              end = min((to - other + kBackwardTile - 1) / kBackwardTile, tiles);
    return begin < end ? KeyRange32{begin, end} : KeyRange32{0, 0};
  }
  // Whether each of these tokens sees each of these keys.
  __device__ bool all_see(int first_token, int last_token, int first_key, int last_key) const {
    return last_token < min(tokens(), bounds.rows) && bounds.first_of(last_token) <= first_key &&
           bounds.last_of(first_token) > last_key;
  }

 private:
  __device__ BackwardBlock(const BackwardParams& params, const Start& start)
      : params(params),
        p(params.p),
        head(params.p, start.b, C::kOfKeys ? start.head : start.head / params.p.group),
        bounds(params.p.score, head, 0),
        q_head(static_cast<int>(C::kOfKeys ? start.head * params.p.group : start.head)),
        q_heads(C::kGrouped ? static_cast<int>(params.p.group) : 1),
        own(static_cast<int>(start.own)) {
    if constexpr (C::kKeepsDs || C::kReadsDs)
      ds = params.ds + kv_head() % params.ds_slots * (p.group * params.ds_keys * params.ds_rows * kDsTileBytes);
    own_end = min(own + C::kOwn, C::kOfKeys ? keys() : tokens());
    const auto [from, to] = others_of(own, own_end);
    other = from / kBackwardTile * kBackwardTile,
    tiles = from < to ? (to - other + kBackwardTile - 1) / kBackwardTile : 0;
    if constexpr (C::kGrouped) {
      const int first = tiles * rank() / params.sharers;
      tiles = tiles * (rank() + 1) / params.sharers - first, other += first * kBackwardTile;
    }
  }
};

}  // namespace rapt::cuda
