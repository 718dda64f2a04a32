// Operands and layouts of the products in bf16_mma.hpp.
#pragma once

#include "cpu/tile/components.hpp"

namespace rapt::cpu::RAPT_ISA {

// C is computed in chunks of 32 x 32 floats, each in rows of 32 ...
inline constexpr std::int64_t kChunk = 32, kRowBytes = 4 * kChunk;
struct InRows {
  static constexpr std::int64_t kRow = kChunk, kRight = 16;  // floats to the next row, and to the right half
};
// ... or the left half before the right one, in rows of 16: whole cache lines of a tile.
struct InHalves {
  static constexpr std::int64_t kRow = 16, kRight = 16 * kChunk;
};

// One operand of a sum of products over tiles: the offset of its tile for each of `steps` products.
struct TileOperand {
  const char* base;
  const std::int32_t* offset;  // [steps]
  std::int64_t stride;         // bytes between the rows of a tile
  std::int64_t other;          // bytes to the chunk's other tile: the one below (A) or to the right (B)
  // Vectors skip the padding of tiles: A has `rows` rows whose results are read (other rows of C keep their contents),
  // and its last product has `last_pairs` pairs before the zeros.
  std::int64_t rows = kChunk, last_pairs = kTileRows;

  const char* at(std::int64_t i) const { return base + offset[i]; }
};
// An operand whose tiles are `step` bytes apart.
struct SteppedOperand {
  const char* base;
  std::int64_t step, stride, other;

  const char* at(std::int64_t i) const { return base + i * step; }
};

// The last chunk, whose sums may still be in tile registers: where they are to be stored.
struct Pending {
  float* c;
};

}  // namespace rapt::cpu::RAPT_ISA
