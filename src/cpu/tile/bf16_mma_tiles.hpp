// bf16_mma.hpp on the matrix unit.
#pragma once

#include "cpu/tile/bf16_mma_operands.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr std::int64_t kBlockKeys = 64;
inline constexpr bool kLeavesPending = true;

// Where a tile of C lies: tiles 0 to 3 are a chunk of 32 x 32. (A passes through tiles 4 and 5, B through 6 and 7.)
template <int kTile, class Layout>
[[gnu::always_inline]] inline float* tile_of(float* c) {
  return c + (kTile & 2 ? 16 * Layout::kRow : 0) + (kTile == 1 || kTile == 2 ? Layout::kRight : 0);
}

template <class Layout = InRows>
[[gnu::always_inline]] inline void store_pending(Tiles& tiles, Pending& pending, float* unused) {
  tiles.store<0>(tile_of<0, Layout>(pending.c), 4 * Layout::kRow);
  tiles.store<1>(tile_of<1, Layout>(pending.c), 4 * Layout::kRow);
  tiles.store<2>(tile_of<2, Layout>(pending.c), 4 * Layout::kRow);
  tiles.store<3>(tile_of<3, Layout>(pending.c), 4 * Layout::kRow);
  pending.c = unused;
}

// Calls `interleaved` after each tile product. Operands that a step shares with the one before are not loaded again.
//
// A product takes 52 cycles, and the next may follow after 16: the four sums take turns, so that none waits for itself,
// and a sum is stored when its turn in the next chunk comes (a store that waits stalls every product behind it).
// kGoesOn: adds to the pending chunk, whose sums are still in the tiles: `start` is ignored, c is pending.c.
template <bool kStreamA = true, bool kGoesOn = false, class Layout = InRows, class Interleaved>
[[gnu::always_inline]] inline void multiply_chunk(Tiles& tiles, const TileOperand& a, const TileOperand& b,
                                                  std::int64_t steps, float* start, float* c, Pending& pending,
                                                  Interleaved&& interleaved) {
  const char *a0 = a.base, *a1 = a.base + a.other, *b0 = b.base, *b1 = b.base + b.other;
  const std::int64_t as = a.stride, bs = b.stride;
  float* const last = pending.c;
  const auto next_chunk = [&](auto tile) __attribute__((always_inline)) {
    constexpr int kTile = decltype(tile)::value;
    if (kGoesOn) return;
    tiles.store<kTile>(tile_of<kTile, Layout>(last), 4 * Layout::kRow);
    if (start) tiles.load<kTile>(tile_of<kTile, Layout>(start), 4 * Layout::kRow);
    else tiles.zero<kTile>();
  };
  const auto load_a = [&](auto tile, const char* at) __attribute__((always_inline)) {
    constexpr int kTile = decltype(tile)::value;
    if constexpr (kStreamA) tiles.load_once<kTile>(at, as);
    else tiles.load<kTile>(at, as);
  };
  std::int64_t ka = -1, kb = -1;
  for (std::int64_t i = 0; i < steps; ++i) {
    const bool new_a = a.offset[i] != ka, new_b = b.offset[i] != kb;
    ka = a.offset[i], kb = b.offset[i];
    if (i == 0) next_chunk(std::integral_constant<int, 0>());
    if (new_a) load_a(std::integral_constant<int, 4>(), a0 + ka);
    if (new_b) tiles.load<6>(b0 + kb, bs);
    tiles.dot<0, 4, 6>();
    interleaved();
    if (i == 0) next_chunk(std::integral_constant<int, 1>());
    if (new_b) tiles.load<7>(b1 + kb, bs);
    tiles.dot<1, 4, 7>();
    interleaved();
    if (i == 0) next_chunk(std::integral_constant<int, 2>());
    if (new_a) load_a(std::integral_constant<int, 5>(), a1 + ka);
    tiles.dot<2, 5, 7>();
    interleaved();
    if (i == 0) next_chunk(std::integral_constant<int, 3>());
    tiles.dot<3, 5, 6>();
    interleaved();
  }
  pending.c = c;
}

}  // namespace rapt::cpu::RAPT_ISA
