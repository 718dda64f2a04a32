// C (+)= A B on the matrix unit, 32 x 32 at a time, with other work in between.
#pragma once

#include "cpu/tile/planes.hpp"

namespace rapt::cpu::RAPT_ISA {

// C tiles 0 to 3 are a chunk of 32 x 32; A passes through tiles 4 and 5, B through 6 and 7. C lies in rows of 32
// floats.
inline constexpr std::int64_t kChunk = 32, kRowBytes = 4 * kChunk;

// One operand of a sum of products over tiles: of each of `steps` products, where its tile lies.
struct TileOperand {
  const char* base;
  const std::int32_t* offset;  // [steps]
  std::int64_t stride;         // bytes between the rows of a tile
  std::int64_t other;          // bytes from a tile to the one below (A) or beside it (B)
};

// The tiles of the last chunk that are still to be stored.
struct Pending {
  float* c;
};

[[gnu::always_inline]] inline void store_pending(Tiles& tiles, Pending& pending, float* unused) {
  tiles.store<2>(pending.c + 16 * kChunk + 16, kRowBytes);
  tiles.store<3>(pending.c + 16 * kChunk, kRowBytes);
  pending.c = unused;
}

template <int kTile>
[[gnu::always_inline]] inline void start_tile(Tiles& tiles, const float* c) {
  if (c) tiles.load<kTile>(c, kRowBytes);
  else tiles.zero<kTile>();
}

// c = start + sum over `steps` of A B for one chunk (start null: 0), calling `beside` after each of its 4 * steps tile
// products. Operands that a step shares with the one before are not loaded again.
//
// A tile store that waits for its product stalls every product behind it. So the last two steps are done together, the
// tiles in turn with two products each, and each is stored two tiles after it is complete: the last two (`pending`)
// within the next chunk.
template <class Beside>
[[gnu::always_inline]] inline void multiply_chunk(Tiles& tiles, const TileOperand& a, const TileOperand& b,
                                                  std::int64_t steps, const float* start, float* c, Pending& pending,
                                                  Beside&& beside) {
  const char *a0 = a.base, *a1 = a.base + a.other, *b0 = b.base, *b1 = b.base + b.other;
  const std::int64_t as = a.stride, bs = b.stride;
  const float* const below = start ? start + 16 * kChunk : nullptr;
  float* const last = pending.c;
  const auto take_2 = [&]() __attribute__((always_inline)) {
    tiles.store<2>(last + 16 * kChunk + 16, kRowBytes);
    start_tile<2>(tiles, below ? below + 16 : below);
  };
  const auto take_3 = [&]() __attribute__((always_inline)) {
    tiles.store<3>(last + 16 * kChunk, kRowBytes);
    start_tile<3>(tiles, below);
  };
  start_tile<0>(tiles, start);
  start_tile<1>(tiles, start ? start + 16 : start);
  std::int64_t i = 0, ka = -1, kb = -1;
  for (; i + 2 < steps; ++i) {
    const bool new_a = a.offset[i] != ka, new_b = b.offset[i] != kb;
    ka = a.offset[i], kb = b.offset[i];
    if (new_a) tiles.load_once<4>(a0 + ka, as);
    if (new_b) tiles.load<6>(b0 + kb, bs);
    tiles.dot<0, 4, 6>();
    beside();
    if (new_b) tiles.load<7>(b1 + kb, bs);
    tiles.dot<1, 4, 7>();
    beside();
    if (i == 0) take_2();
    if (new_a) tiles.load_once<5>(a1 + ka, as);
    tiles.dot<2, 5, 7>();
    beside();
    if (i == 0) take_3();
    tiles.dot<3, 5, 6>();
    beside();
  }
  const bool first = i == 0, two = i + 1 < steps;
  const std::int64_t la = two ? a.offset[i + 1] : 0, lb = two ? b.offset[i + 1] : 0;
  ka = a.offset[i], kb = b.offset[i];
  tiles.load_once<4>(a0 + ka, as);
  tiles.load<6>(b0 + kb, bs);
  tiles.dot<0, 4, 6>();
  beside();
  if (two) {
    tiles.load_once<5>(a0 + la, as);
    tiles.load<7>(b0 + lb, bs);
    tiles.dot<0, 5, 7>();
    beside();
  }
  if (first) take_2();
  tiles.load<6>(b1 + kb, bs);
  tiles.dot<1, 4, 6>();
  beside();
  if (two) {
    tiles.load<7>(b1 + lb, bs);
    tiles.dot<1, 5, 7>();
    beside();
  }
  if (first) take_3();
  tiles.load_once<4>(a1 + ka, as);
  tiles.dot<2, 4, 6>();
  beside();
  if (two) {
    tiles.load_once<5>(a1 + la, as);
    tiles.dot<2, 5, 7>();
    beside();
  }
  tiles.store<0>(c, kRowBytes);
  tiles.load<6>(b0 + kb, bs);
  tiles.dot<3, 4, 6>();
  beside();
  if (two) {
    tiles.load<7>(b0 + lb, bs);
    tiles.dot<3, 5, 7>();
    beside();
  }
  tiles.store<1>(c + 16, kRowBytes);
  pending.c = c;
}

}  // namespace rapt::cpu::RAPT_ISA
