// How attention_backward gets dq: plain data, which operations/attention_backward/cuda_choice.cpp chooses.
#pragma once

#include <cstdint>

namespace rapt::cuda {

inline constexpr int kBackwardTile = 64;  // rows or keys of a tile, which one warpgroup has
// A tile of dS in memory: 64 keys by 64 rows, rounded as operands are, in the order of keep_ds().
inline constexpr int kDsTileBytes = kBackwardTile * kBackwardTile * 2;

// dS of some heads is kept in memory until dq is computed from it; then that of the next ones.
struct DsPortions {
  std::int64_t key_tiles = 0, row_tiles = 0;  // of a kv head
  std::int64_t heads = 0;                     // at a time; 0: dS is not kept, and dq computes scores anew

  std::int64_t bytes() const { return heads * key_tiles * row_tiles * kDsTileBytes; }
};

}  // namespace rapt::cuda
