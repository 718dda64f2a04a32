// A thread block of attention_backward: its rows or keys, and what of the other side they meet.
#pragma once

#include "cuda/kernels/backward_config.cuh"

namespace rapt::cuda {

// The thread block's own rows or keys, and the tiles of the other side that they meet.
template <class C>
struct BackwardBlock {
  using Rows = Tiling<C::kOwn>;
  using Keys = Blocking<C::kOwn>;

  const BackwardParams& params;
  const AttentionBackwardParams& p;
  Head head;
  KeyBounds32 bounds;
  int own, own_end;  // the first own row or key, and the end of those that exist
  int other, tiles;  // the tiles of the other side that some own row or key meets: from a multiple of 64 on

  struct Start {
    std::int64_t b, hk, own;
  };
  // Within a section, the longest tiles of causal calls come first.
  __device__ static Start find(const BackwardParams& params) {
    const int in_section = params.section * params.tiles, first = static_cast<int>(blockIdx.x) / in_section,
              left = static_cast<int>(blockIdx.x) % in_section;
    const int heads = min(params.section, params.heads - first * params.section);
    const int head = params.first_head + first * params.section + left % heads, tile = left / heads;
    if constexpr (C::kOfKeys) {
      const auto found = Keys::find(params.p, std::int64_t{head} * params.tiles + tile);
      return {found.b, found.hk, found.key};
    } else {
      const auto found = Rows::find(params.p, head, params.tiles - 1 - tile);
      return {found.b, found.hk, found.row};
    }
  }

  __device__ explicit BackwardBlock(const BackwardParams& params) : BackwardBlock(params, find(params)) {}

  __device__ int rows() const { return static_cast<int>(head.len_q * p.group); }
  __device__ int keys() const { return static_cast<int>(head.len_k); }
  __device__ std::byte* ds_tile(int key_tile, int row_tile) const {
    const std::int64_t in_launch = head.b * p.hk + head.hk - params.first_head;
    return params.ds + ((in_launch * params.ds_keys + key_tile) * params.ds_rows + row_tile) * kDsTileBytes;
  }
  // What the math warpgroups need of a tile of rows.
  __device__ const RowsOfTile* rows_of(int row) const {
    return params.rows.tiles + BackwardTiling::number(p, head.b, head.hk, row);
  }
  // The own rows or keys that have a gradient to store: also keys past a sequence's end, if they have memory.
  __device__ int store_end() const { return C::kOfKeys && p.total_k < 0 ? static_cast<int>(p.sk) : own_end; }

  // The rows or keys of the other side that own ones [from, to) meet.
  __device__ KeyRange32 others_of(int from, int to) const {
    const Divisor& group = params.group;
    to = min(to, own_end);
    if (from >= to) return {0, 0};
    if constexpr (C::kOfKeys) {
      // Both ends of what a row sees rise with its token t: keys [t + first, t + last).
      const int tokens = static_cast<int>(head.len_q), in_group = static_cast<int>(group.by);
      return {min(max(from - bounds.last + 1, 0), tokens) * in_group,
              min(max(to - bounds.first, 0), tokens) * in_group};
    } else {
      return {bounds.first_of(group.quotient(from)), bounds.last_of(group.quotient(to - 1))};
    }
  }
  // The tiles of the other side, counted from the first, that the 64 own rows or keys from `first` on meet.
  __device__ KeyRange32 tiles_of(int first) const {
    const auto [from, to] = others_of(first, first + kBackwardTile);
    if (from >= to) return {0, 0};
    return {(from - other) / kBackwardTile, (to - other + kBackwardTile - 1) / kBackwardTile};
  }
  // Whether each of these rows sees each of these keys. Rows are counted in rows, not tokens.
  __device__ bool all_see(int first_row, int last_row, int first_key, int last_key) const {
    if (last_row >= rows()) return false;
    return bounds.first_of(params.group.quotient(last_row)) <= first_key &&
           bounds.last_of(params.group.quotient(first_row)) > last_key;
  }

 private:
  __device__ BackwardBlock(const BackwardParams& params, const Start& start)
      : params(params),
        p(params.p),
        head(params.p, start.b, start.hk),
        bounds(params.p.score, head, 0),
        own(static_cast<int>(start.own)) {
    own_end = min(own + C::kOwn, C::kOfKeys ? keys() : rows());
    const auto [from, to] = others_of(own, own_end);
    other = from / kBackwardTile * kBackwardTile,
    tiles = from < to ? (to - other + kBackwardTile - 1) / kBackwardTile : 0;
  }
};

}  // namespace rapt::cuda
