// Fetches keys and values into the cache ahead of their use, between arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/isa/isa.hpp"

namespace rapt::cpu::RAPT_ISA {

// Prefetches rows in the order they lie in memory, some lines at a time between arithmetic. On Zen 4, memory gave 17
// of 20 GB/s so; 11 without (tiles read several rows at once, which the hardware's own prefetcher does not follow), and
// 11 to 15 in bursts (more than a core can have under way are dropped) or line by line across rows. Into L2, not L1: up
// to a quarter faster on a Xeon, where lines under way to L1 are few.
class Prefetcher {
 public:
  Prefetcher() = default;
  Prefetcher(const std::byte* const* row, std::int64_t rows, std::int64_t bytes)
      : row_(row), end_(row + rows), bytes_(bytes) {
    start();
  }
  bool is_done() const { return row_ == end_; }
  // So many lines more.
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

}  // namespace rapt::cpu::RAPT_ISA
