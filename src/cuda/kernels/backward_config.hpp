// How attention_backward gets dq: plain data, which operations/attention_backward/cuda_choice.cpp chooses.
#pragma once

#include <cstdint>

#include "core/pod.hpp"

namespace rapt::cuda {

inline constexpr int kBackwardTile = 64;                            // rows or keys of a tile, which one warpgroup has
inline constexpr int kBackwardKeys = 128, kBackwardRowsOfDs = 256;  // of a thread block: for dk and dv, for dq from dS
// A tile of dS in memory: 64 keys by 64 rows, rounded as operands are, in the order of keep_ds().
inline constexpr int kDsTileBytes = kBackwardTile * kBackwardTile * 2;

// dS of a kv head stays in memory, in a slot, until dq has been computed from it. Then another head takes the slot.
struct DsSlots {
  std::int64_t key_tiles = 0, row_tiles = 0;  // of a query head
  std::int64_t group = 0;                     // query heads of a kv head
  std::int64_t slots = 0;                     // 0: dS is not kept, and dq computes scores anew
  std::int64_t lag = 0;                       // BackwardOrder's

  std::int64_t slot_bytes() const { return group * key_tiles * row_tiles * kDsTileBytes; }
  std::int64_t bytes() const { return slots * slot_bytes(); }
};

// The order of the thread blocks of a launch that keeps dS: dk and dv of a kv head, then dq of the head `lag` heads
// before. With more slots than `lag`, a thread block waits only for such as come before it: dq for all dS of its head,
// and dk and dv for the dq of the head that had their slot. So the first that has not ended waits for none, if GPUs
// start thread blocks in the order of their numbers: as they do, though CUDA does not promise it.
struct BackwardOrder {
  int heads, lag;
  int of_keys, of_rows;  // thread blocks of a kv head; of_rows in whole clusters, of which
  int row_blocks;        // so many have rows

  struct Item {
    bool is_of_keys;
    int head, number;  // number: of of_keys or of_rows
  };
  RAPT_HOST_DEVICE std::int64_t size() const { return std::int64_t{heads} * (of_keys + of_rows); }
  RAPT_HOST_DEVICE Item at(int n) const {
    const int ahead = lag < heads ? lag : heads;
    if (n < ahead * of_keys) return {true, n / of_keys, n % of_keys};
    n -= ahead * of_keys;
    const int both = of_keys + of_rows, head = n / both, number = n % both;
    if (head < heads - ahead)
      return number < of_keys ? Item{true, head + ahead, number} : Item{false, head, number - of_keys};
    n -= (heads - ahead) * both;
    return {false, heads - ahead + n / of_rows, n % of_rows};
  }
};

}  // namespace rapt::cuda
