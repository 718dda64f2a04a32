// How attention_backward gets dq on a GPU: a pure function of the problem's sizes.
#pragma once

#include <cstdint>

#include "operations/attention/params.hpp"

namespace rapt::cuda {

inline constexpr int kBackwardTile = 64;  // rows or keys of a tile, which one warpgroup has
// A tile of dS in memory: 64 keys by 64 rows, rounded as operands are, as it lies in shared memory.
inline constexpr int kDsTileBytes = kBackwardTile * kBackwardTile * 2;

// dS of some heads is kept in memory until dq is computed from it; then that of the next ones.
struct DsPortions {
  std::int64_t key_tiles = 0, row_tiles = 0;  // of a head
  std::int64_t heads = 0;                     // at a time; 0: dS is not kept, and dq computes scores anew
  std::int64_t bytes() const { return heads * key_tiles * row_tiles * kDsTileBytes; }
};
DsPortions ds_portions(const AttentionParams& params);
// At least the bytes of all calls with fewer or shorter sequences.
std::int64_t max_ds_bytes(const AttentionParams& largest);

}  // namespace rapt::cuda
