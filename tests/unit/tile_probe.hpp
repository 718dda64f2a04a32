// What test_tiles.cpp asks of the code for matrix units; tile_probe.cpp is compiled once per ISA that has one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/registry.hpp"

namespace rapt::cpu {

/// Tiles are 16 rows of 64 bytes; where no stride is given, one row after another.
struct TileProbe {
  /// Loads eight tiles, which lie one after another when rows are `from_stride` bytes apart, and stores them likewise.
  void (*round_trip)(const char* from, std::int64_t from_stride, bool once, char* to, std::int64_t to_stride) noexcept;
  /// Eight tiles that were loaded, then zeroed.
  void (*zero)(const char* from, char* to) noexcept;
  /// c[2 i + j] += a[i] b[j] for i, j < 2: bf16 tiles a and b, fp32 tiles c.
  void (*dot)(const char* a, const char* b, char* c) noexcept;
  /// c += a b: one tile each, of unsigned and of signed bytes, and of int32.
  void (*int8_dot)(const char* a, const char* b, char* c) noexcept;
  /// split_row of components.hpp for 1 or 2 components.
  bool (*split)(int components, DType type, const void* from, std::int64_t stride, std::int64_t n, std::int64_t padded,
                std::uint16_t* to, std::int64_t component_stride) noexcept;
};

namespace amx {
extern const TileProbe kTileProbe;
}
namespace amx_reference {
extern const TileProbe kTileProbe;
}

}  // namespace rapt::cpu
