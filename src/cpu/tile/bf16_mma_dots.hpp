// bf16_mma.hpp by products of pairs in vectors, for CPUs without a matrix unit. A product (add_dots() of the leaf)
// takes kDotRows rows of A, a pair or two of each:
//  - one row, a pair in all lanes, by a vector of B: 8 rows by 2 vectors of 16 columns, 10 loads for 16 products;
//  - two rows, two pairs of each, by two columns of B, whose rows of pairs are merged for that (components.hpp): 4 rows
//    by 16 columns, 2 loads of A and 8 of B for 16 products. A's two rows are loaded as they lie, two products' worth
//    of each at once, and exchange halves; so do rows of C when a sum begins and ends.
// (Interleaving other work was 3 to 4 % slower than doing it afterwards.)
#pragma once

#include "cpu/tile/bf16_mma_operands.hpp"

namespace rapt::cpu::RAPT_ISA {

// (64 was 1 to 6 % slower on Zen 4, with sums half as long; 256 no faster.)
inline constexpr std::int64_t kBlockKeys = 128;

// Chunks are stored immediately, so no thread state is held and nothing is pending.
inline constexpr bool kLeavesPending = false;
struct Tiles {};
template <class = InRows>
[[gnu::always_inline]] inline void store_pending(Tiles&, Pending&, float*) {}

// A block of C in registers: kBlockRows rows of A by kBlockVecs vectors of columns, in groups of kDotRows rows and
// vectors. The vectors of a group hold a row each; exchange() swaps halves so that add_dots() can add to them.
constexpr int kBlockRows = kDotRows == 1 ? 8 : 4, kBlockVecs = kDotRows == 1 ? 2 : 4,
              kBlockGroups = kBlockRows / kDotRows;
constexpr std::int64_t kBlockColumns = kBlockVecs * kLanes, kTileColumns = 16;
using Sums = vec[kBlockGroups][kBlockVecs][kDotRows];
template <int kRows>
[[gnu::always_inline]] inline void exchange(vec (&x)[kRows]) {
  if constexpr (kRows == 2) exchange_halves(x[0], x[1]);
}

// The offset of the i-th vector of columns, for a distance `lane` between lanes and `tile` between the two tiles of a
// chunk.
constexpr std::int64_t column_at(int i, std::int64_t lane, std::int64_t tile) {
  return i * kLanes / kTileColumns * tile + i * kLanes % kTileColumns * lane;
}

// sum += A B for kBlockRows rows of a tile of A and a block's columns of tiles of B. `pairs`, a multiple of
// kPairsAtOnce, is the depth in pairs.
constexpr std::int64_t kPairsAtOnce = kDotRows * kDotRows;
[[gnu::always_inline]] inline void add_product(Sums& sum, const char* a, std::int64_t a_stride, const char* b,
                                               std::int64_t other, std::int64_t b_stride, std::int64_t pairs) {
  const char* row[kBlockGroups][kDotRows];
#pragma GCC unroll 16
  for (int i = 0; i < kBlockRows; ++i) {
    row[i / kDotRows][i % kDotRows] = a + i * a_stride;
    asm(""
        : "+r"(row[i / kDotRows]
               [i % kDotRows]));  // else the compiler computes the addresses of all pairs first, and spills them
  }
#pragma GCC unroll kTileRows / kPairsAtOnce
  for (std::int64_t k = 0; k < pairs; k += kPairsAtOnce) {
    vec left[kBlockGroups][kDotRows];
#pragma GCC unroll 2
    for (int p = 0; p < kDotRows; ++p, b += kDotRows * b_stride) {
      asm("" : "+r"(b));
      vec right[kBlockVecs][kDotRows];
#pragma GCC unroll 2
      for (int m = 0; m < kDotRows; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kBlockVecs; ++v)
          right[v][m] = load(reinterpret_cast<const float*>(b + m * b_stride + column_at(v, 4, other)));
#pragma GCC unroll 16
      for (int g = 0; g < kBlockGroups; ++g) {
        if (p == 0) load_dots(left[g], row[g], 4 * k);
#pragma GCC unroll 4
        for (int v = 0; v < kBlockVecs; ++v)
#pragma GCC unroll 2
          for (int m = 0; m < kDotRows; ++m) add_dots(sum[g][v][m], left[g][p], right[v][m]);
      }
    }
  }
}

// Multiplies kBlockRows rows of a chunk. Not inlined: values that the caller holds in registers would displace the
// sums.
template <class Layout>
[[gnu::noinline]] void multiply_rows(const char* rows, const TileOperand& a, const TileOperand& b, std::int64_t steps,
                                     const float* start, float* c) {
  Sums sum;
  const auto each_group = [&](auto f) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int g = 0; g < kBlockGroups; ++g)
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVecs; ++v) f(sum[g][v], g * kDotRows * Layout::kRow + column_at(v, 1, Layout::kRight));
  };
  const std::int64_t last_pairs = round_up(a.last_pairs, kPairsAtOnce);
  const std::int64_t whole = last_pairs < kTileRows ? steps - 1 : steps;
  const char* base = b.base;
#pragma GCC unroll 1
  for (std::int64_t column = 0; column < kChunk; column += kBlockColumns) {
    each_group([&](vec(&x)[kDotRows], std::int64_t at) __attribute__((always_inline)) {
      for (int m = 0; m < kDotRows; ++m) x[m] = start ? load(start + at + m * Layout::kRow) : vec(0.f);
      exchange(x);
    });
    const auto add = [&](std::int64_t i, std::int64_t pairs) __attribute__((always_inline)) {
      add_product(sum, rows + a.offset[i], a.stride, base + b.offset[i], b.other, b.stride, pairs);
    };
    for (std::int64_t i = 0; i < whole; ++i) add(i, kTileRows);
    if (whole < steps) add(whole, last_pairs);
    each_group([&](vec(&x)[kDotRows], std::int64_t at) __attribute__((always_inline)) {
      exchange(x);
      for (int m = 0; m < kDotRows; ++m) store(c + at + m * Layout::kRow, x[m]);
    });
    base += b.other, c += Layout::kRight, start = start ? start + Layout::kRight : nullptr;
  }
}

template <bool kStreamA = true, bool kGoesOn = false, class Layout = InRows, class Interleaved>
[[gnu::always_inline]] inline void multiply_chunk(Tiles&, const TileOperand& a, const TileOperand& b,
                                                  std::int64_t steps, const float* start, float* c, Pending&,
                                                  Interleaved&&) {
  static_assert(!kGoesOn && (kBlockColumns == kChunk || kBlockColumns == kTileColumns));
  for (std::int64_t r = 0; r < a.rows; r += kBlockRows) {
    const char* const rows = a.base + r / kTileRows * a.other + r % kTileRows * a.stride;
    const std::int64_t at = r * Layout::kRow;
    multiply_rows<Layout>(rows, a, b, steps, start ? start + at : nullptr, c + at);
  }
}

}  // namespace rapt::cpu::RAPT_ISA
