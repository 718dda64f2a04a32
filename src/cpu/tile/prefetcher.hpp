// Prefetches keys and values between arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/isa/isa.hpp"

namespace rapt::cpu::RAPT_ISA {

// Prefetches rows, some lines at a time between arithmetic. The order is that of memory: on Zen 4 this reached 17 of
// 20 GB/s of memory bandwidth. Without it 11 GB/s were reached, because tiles read several rows at once, which the
// hardware prefetcher does not follow; with bursts, or line by line across rows, 11 to 15, because a core drops
// prefetches when too many are under way. Lines go to L2 and not L1: up to a quarter faster on a Xeon, where few lines
// can be under way to L1.
class Prefetcher {
 public:
  Prefetcher() = default;
  Prefetcher(const std::byte* const* row, std::int64_t rows, std::int64_t bytes)
      : row_(row), end_(row + rows), bytes_(bytes) {
    start();
  }
  bool is_done() const { return row_ == end_; }
  // Prefetches the next n lines.
  [[gnu::always_inline]] void prefetch(int n) {
    for (int i = 0; i < n && row_ != end_; ++i) {
      __builtin_prefetch(line_, 0, 2);
      line_ += 64;
      if (line_ >= row_end_) ++row_, start();
    }
  }

 private:
  void start() {
    if (row_ != end_) line_ = *row_, row_end_ = line_ + bytes_;
  }
  const std::byte *const *row_ = nullptr, *const *end_ = nullptr;
  std::int64_t bytes_ = 0;
  const std::byte *line_ = nullptr, *row_end_ = nullptr;
};

// Prefetches between the register tiles of matrix products: rows of several tensors, group after group, in pieces of
// up to four lines. Adjacent rows are treated as one. The code takes few instructions a line and has no branch that
// depends on where a row ends: with such branches the tiles lost more time to prefetching than they would have lost to
// cache misses.
class TilePrefetcher {
 public:
  static constexpr int kGroups = 10;
  explicit TilePrefetcher(const std::byte** room) : room_(room) { clear(); }
  void clear() { end_ = room_, count_ = 0, group_ = groups_, left_ = total_ = 0; }
  // Adds a group of n rows of `bytes` bytes each; row_at(i) is the address of row i.
  template <class RowAt>
  [[gnu::always_inline]] void add(std::int64_t n, std::int64_t bytes, RowAt row_at) {
    if (n <= 0 || bytes <= 0) return;
    const std::byte* const first = row_at(0);
    const bool in_one_piece = row_at(n - 1) == first + (n - 1) * bytes;
    if (in_one_piece) bytes *= n, n = 1;
    std::int64_t lines = (bytes + 63) / 64;
    const std::int64_t of_piece = lines > 2 ? 4 : lines;
    lines = (lines + of_piece - 1) / of_piece * of_piece;
    groups_[count_++] = {end_, lines * 64, n * lines, of_piece};
    for (std::int64_t i = 0; i < n; ++i) *end_++ = row_at(i);
    total_ += n * lines;
  }
  // Sets the lines per prefetch() so that all are done after this many tiles.
  void spread_over(std::int64_t tiles) {
    lines_per_tile_ = (total_ + tiles - 1) / tiles;
    start();
  }
  [[gnu::always_inline]] void prefetch() {
    if (left_ > 0)
      prefetch(left_ < lines_per_tile_
                   ? left_
                   : lines_per_tile_);  // the last piece of a group may be short; nothing past its rows is addressed
  }
  [[gnu::always_inline]] void prefetch_rest() {
    while (left_ > 0) prefetch(left_);
  }

 private:
  struct Group {
    const std::byte* const* row;
    std::int64_t bytes, lines, of_piece;
  };
  void start() { column_ = 0, left_ = group_ < groups_ + count_ ? group_->lines : 0; }
  [[gnu::noinline]] void prefetch(std::int64_t n) {
    switch (group_->of_piece) {
      case 1:
        return prefetch_pieces<1>(n);
      case 2:
        return prefetch_pieces<2>(n);
      default:
        return prefetch_pieces<4>(n);
    }
  }
  template <int kLines>
  [[gnu::always_inline]] void prefetch_pieces(std::int64_t n) {
    const std::byte* const* row = group_->row;
    const std::int64_t bytes = group_->bytes;
    std::int64_t column = column_;
    for (; n > 0; n -= kLines, left_ -= kLines) {
      const std::byte* const at = *row + column;
      for (int i = 0; i < kLines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
      column += 64 * kLines;
      const std::int64_t is_last = (bytes - column - 1) >> 63;  // -1 or 0
      row -= is_last, column &= ~is_last;
    }
    group_->row = row, column_ = column;
    if (left_ <= 0) ++group_, start();
  }

  Group groups_[kGroups];
  Group* group_;
  std::int64_t column_ = 0, left_, total_, lines_per_tile_ = 0;  // in lines; left_ is what remains of the current group
  const std::byte **end_, **room_;
  int count_;
};

}  // namespace rapt::cpu::RAPT_ISA
