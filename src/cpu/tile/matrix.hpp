// C (+)= A B of bf16 planes, 32 x 32 at a time, with other work in between: on the matrix unit (matrix_tiles.hpp), or
// by products of pairs in vectors (matrix_dots.hpp). Both define
//  - Tiles: what a thread holds while it multiplies.
//  - kBlockKeys: how many keys a block of scores has.
//  - multiply_chunk: c = start + sum over `steps` of A B for one chunk (start null: 0), which may call `beside`, work
//    that shares no data with it, up to 4 * steps times.
//  - store_pending: stores the last chunk.
#pragma once

#include "cpu/tile/planes.hpp"

namespace rapt::cpu::RAPT_ISA {

// C lies in rows of 32 floats.
inline constexpr std::int64_t kChunk = 32, kRowBytes = 4 * kChunk;

// One operand of a sum of products over tiles: of each of `steps` products, where its tile lies.
struct TileOperand {
  const char* base;
  const std::int32_t* offset;  // [steps]
  std::int64_t stride;         // bytes between the rows of a tile
  std::int64_t other;          // bytes from a tile to the one below (A) or beside it (B)
};

// The last chunk, which the next may store: where to.
struct Pending {
  float* c;
};

}  // namespace rapt::cpu::RAPT_ISA

#if defined(RAPT_HAVE_TILES)
#include "cpu/tile/matrix_tiles.hpp"
#elif defined(RAPT_HAVE_DOTS)
#include "cpu/tile/matrix_dots.hpp"
#endif
