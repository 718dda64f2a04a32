// bf16_mma.hpp on the matrix unit.
#pragma once

#include "cpu/tile/bf16_mma_operands.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr std::int64_t kBlockKeys = 64;
inline constexpr bool kLeavesPending = true;

// The address of a tile of C: tiles 0 to 3 are a chunk of 32 x 32. (Tiles 4 and 5 hold A, 6 and 7 hold B.)
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

// Calls `interleaved` after every kEvery-th of the four tile products of a step. kSteps > 0: the number of steps is
// known at compile time, and each step loads its operands. kSteps = 0: there are `steps` steps, and an operand that a
// step shares with the one before is not loaded again.
//
// A product has a latency of 52 cycles, and the next may follow after 16. So the four sums take turns and none waits
// for itself, and each sum is stored when its turn in the next chunk comes: a store that waits for its sum stalls
// every product behind it. kGoesOn: adds to the pending chunk, whose sums are still in the tiles; `start` is ignored,
// c is pending.c.
template <bool kStreamA = true, bool kGoesOn = false, class Layout = InRows, int kSteps = 0, int kEvery = 1,
          class Operand = TileOperand, class OtherOperand = TileOperand, class Interleaved>
[[gnu::always_inline]] inline void multiply_chunk(Tiles& tiles, const Operand& a, const OtherOperand& b,
                                                  std::int64_t steps, float* start, float* c, Pending& pending,
                                                  Interleaved&& interleaved) {
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
    if constexpr (kStreamA) tiles.load_once<kTile>(at, a.stride);
    else tiles.load<kTile>(at, a.stride);
  };
  const char *a_before = nullptr, *b_before = nullptr;
  const auto step = [&](std::int64_t i) __attribute__((always_inline)) {
    const char *const a_at = a.at(i), *const b_at = b.at(i);
    const bool new_a = kSteps > 0 || a_at != a_before, new_b = kSteps > 0 || b_at != b_before;
    a_before = a_at, b_before = b_at;
    if (i == 0) next_chunk(std::integral_constant<int, 0>());
    if (new_a) load_a(std::integral_constant<int, 4>(), a_at);
    if (new_b) tiles.load<6>(b_at, b.stride);
    tiles.dot<0, 4, 6>();
    if constexpr (kEvery == 1) interleaved();
    if (i == 0) next_chunk(std::integral_constant<int, 1>());
    if (new_b) tiles.load<7>(b_at + b.other, b.stride);
    tiles.dot<1, 4, 7>();
    interleaved();
    if (i == 0) next_chunk(std::integral_constant<int, 2>());
    if (new_a) load_a(std::integral_constant<int, 5>(), a_at + a.other);
    tiles.dot<2, 5, 7>();
    if constexpr (kEvery == 1) interleaved();
    if (i == 0) next_chunk(std::integral_constant<int, 3>());
    tiles.dot<3, 5, 6>();
    interleaved();
  };
  static_assert(kEvery == 1 || kEvery == 2);
  if constexpr (kSteps > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kSteps; ++i) step(i);
  } else {
    for (std::int64_t i = 0; i < steps; ++i) step(i);
  }
  pending.c = c;
}

}  // namespace rapt::cpu::RAPT_ISA
