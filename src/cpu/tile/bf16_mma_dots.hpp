// bf16_mma.hpp by products of pairs in vectors, for CPUs without a matrix unit: 8 rows of A by 2 vectors of B, 10 loads
// for 16 products. (Interleaving other work was 3 to 4 % slower than doing it afterwards.)
#pragma once

#include "cpu/tile/bf16_mma_operands.hpp"

namespace rapt::cpu::RAPT_ISA {

// (64 was 1 to 6 % slower on Zen 4, with sums half as long; 256 no faster.)
inline constexpr std::int64_t kBlockKeys = 128;

// Chunks are stored at once: nothing is held, and nothing pends.
inline constexpr bool kLeavesPending = false;
struct Tiles {};
template <class = InRows>
[[gnu::always_inline]] inline void store_pending(Tiles&, Pending&, float*) {}

// sum += A B for kR rows of a tile of A and a pair of tiles of B.
template <int kR>
[[gnu::always_inline]] inline void add_product(vec (&sum)[kR][2], const char* a, std::int64_t a_stride, const char* b,
                                               std::int64_t other, std::int64_t b_stride, std::int64_t pairs) {
  const char* row[kR];
#pragma GCC unroll 16
  for (int i = 0; i < kR; ++i) {
    row[i] = a + i * a_stride;
    asm("" : "+r"(row[i]));  // else the addresses of all pairs are computed first, and spilled
  }
#pragma GCC unroll 16
  for (std::int64_t k = 0; k < pairs; ++k, b += b_stride) {
    asm("" : "+r"(b));
    const vec left = load(reinterpret_cast<const float*>(b)), right = load(reinterpret_cast<const float*>(b + other));
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      const vec pair = broadcast_pair(row[i] + 4 * k);
      add_dots(sum[i][0], pair, left);
      add_dots(sum[i][1], pair, right);
    }
  }
}

// kR rows of a chunk. (A function of its own, or what its caller holds in registers crowds out the sums.)
template <int kR, class Layout>
[[gnu::noinline]] void multiply_rows(const char* rows, const TileOperand& a, const TileOperand& b, std::int64_t steps,
                                     const float* start, float* c) {
  vec sum[kR][2];
#pragma GCC unroll 16
  for (int i = 0; i < kR; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) sum[i][v] = start ? load(start + i * Layout::kRow + v * Layout::kRight) : vec(0.f);
  const auto add = [&](std::int64_t i, std::int64_t pairs) __attribute__((always_inline)) {
    add_product(sum, rows + a.offset[i], a.stride, b.base + b.offset[i], b.other, b.stride, pairs);
  };
  const std::int64_t whole = a.last_pairs < kTileRows ? steps - 1 : steps;
  for (std::int64_t i = 0; i < whole; ++i) add(i, kTileRows);
  if (whole < steps) add(whole, a.last_pairs);
#pragma GCC unroll 16
  for (int i = 0; i < kR; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(c + i * Layout::kRow + v * Layout::kRight, sum[i][v]);
}

template <bool kStreamA = true, bool kGoesOn = false, class Layout = InRows, class Interleaved>
[[gnu::always_inline]] inline void multiply_chunk(Tiles&, const TileOperand& a, const TileOperand& b,
                                                  std::int64_t steps, const float* start, float* c, Pending&,
                                                  Interleaved&&) {
  static_assert(2 * kLanes == kChunk && !kGoesOn);
  constexpr int kR = 8;
  for (std::int64_t r = 0; r < a.rows; r += kR) {
    const char* const rows = a.base + r / kTileRows * a.other + r % kTileRows * a.stride;
    const std::int64_t at = r * Layout::kRow;
    multiply_rows<kR, Layout>(rows, a, b, steps, start ? start + at : nullptr, c + at);
  }
}

}  // namespace rapt::cpu::RAPT_ISA
