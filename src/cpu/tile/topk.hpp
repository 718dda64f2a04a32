// The n largest scores of a row, found as its scores come by in the order of their positions. The larger score is
// first, of equal ones the lower position: so that a score no larger than the n-th largest of those before it is none
// of them, and most are passed over by one comparison. The others are collected; whenever there is no room left, all
// but the n largest are thrown away, by a radix selection, which is exact however many scores are equal.
#pragma once

#include "cpu/tile/carver.hpp"
#include "cpu/tile/panel.hpp"

namespace rapt::cpu::RAPT_ISA {

// Unsigned integers in the order of the scores: -0 is 0, and every NaN the largest.
[[gnu::always_inline]] inline std::uint32_t order_of(float score) {
  const auto bits = __builtin_bit_cast(std::uint32_t, score + 0.f);
  if (score != score) return UINT32_MAX;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float score_of(std::uint32_t order) {
  return __builtin_bit_cast(float, order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

inline constexpr int kRadixBits = 11, kRadix = 1 << kRadixBits, kDigits = 3;
[[gnu::always_inline]] inline std::uint32_t digit_of(std::uint32_t order, int digit) {
  return order >> (digit * kRadixBits) & (kRadix - 1);
}

class Topk {
 public:
  // Of `n` out of up to `keys`, which come kLanes at a time.
  Topk(Carver& carver, std::int64_t n, std::int64_t keys) : n_(n), capacity_(capacity(n, keys)) {
    order_ = carver.take<std::uint32_t>(capacity_);
    position_ = carver.take<std::int32_t>(capacity_);
    counts_ = carver.take<std::int32_t>(kRadix);
  }

  void start() { count_ = 0, least_ = -kInfinity, closed_ = false; }

  // Scores of positions [first, first + kLanes), of which lanes [begin, end) count.
  [[gnu::always_inline]] void add(vec score, std::int64_t first, std::int64_t begin, std::int64_t end) {
    if (!xsimd::any(!(score <= vec(least_)))) return;
    add_lanes(score, first, begin, end);
  }
  // One that another Topk has kept.
  void add(std::uint32_t order, std::int32_t position) {
    if (closed_ || order <= order_of(least_)) return;
    order_[count_] = order, position_[count_] = position;
    if (++count_ + kLanes > capacity_) prune();
  }

  // The largest so far, n or fewer, in the order of their positions.
  void keep_largest() {
    if (count_ > n_) prune();
  }
  std::int64_t count() const { return count_; }
  std::uint32_t order(std::int64_t i) const { return order_[i]; }
  std::int32_t position(std::int64_t i) const { return position_[i]; }

  // indices[i * stride] = position of the i-th largest; -1 behind the last.
  void store_indices(std::int32_t* indices, std::int64_t stride) {
    keep_largest();
    const std::int32_t* const sorted = sort();
    for (std::int64_t i = 0; i < count_; ++i) indices[i * stride] = sorted[i];
    for (std::int64_t i = count_; i < n_; ++i) indices[i * stride] = -1;
  }

 private:
  static std::int64_t capacity(std::int64_t n, std::int64_t keys) {
    const std::int64_t kept = min(n, keys);
    return round_up(max(2 * kept, min(keys, 3 * kept + 1024)), 16) + kLanes;  // sort() needs 2 * kept
  }

  [[gnu::noinline]] void add_lanes(vec score, std::int64_t first, std::int64_t begin, std::int64_t end) {
    if (closed_) return;
    alignas(64) float lane[kLanes];
    store(lane, score);
    for (std::int64_t i = begin; i < end; ++i)
      if (!(lane[i] <= least_)) {
        order_[count_] = order_of(lane[i]), position_[count_] = static_cast<std::int32_t>(first + i);
        ++count_;
      }
    if (count_ + kLanes > capacity_) prune();
  }

  // The n-th largest by one digit after the other; then all larger ones stay, and the first of those equal to it.
  [[gnu::noinline]] void prune() {
    if (count_ <= n_) return;
    std::uint32_t prefix = 0, mask = 0;
    std::int64_t wanted = n_;  // of those that have the prefix
    for (int digit = kDigits - 1; digit >= 0; --digit) {
      __builtin_memset(counts_, 0, sizeof(std::int32_t) * kRadix);
      for (std::int64_t i = 0; i < count_; ++i)
        if ((order_[i] & mask) == prefix) ++counts_[digit_of(order_[i], digit)];
      std::uint32_t d = kRadix - 1;
      for (; counts_[d] < wanted; --d) wanted -= counts_[d];
      prefix |= d << (digit * kRadixBits);
      mask |= static_cast<std::uint32_t>(kRadix - 1) << (digit * kRadixBits);
    }
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < count_; ++i) {
      const bool equal = order_[i] == prefix;
      const bool stays = order_[i] > prefix || (equal && wanted > 0);
      wanted -= equal;
      order_[kept] = order_[i], position_[kept] = position_[i];
      kept += stays;
    }
    count_ = kept;
    closed_ = prefix == UINT32_MAX;
    least_ = score_of(prefix);
  }

  // Positions by order, the largest first; those of equal ones rise already.
  const std::int32_t* sort() {
    constexpr std::int64_t kFew = 48;
    if (count_ <= kFew) {
      for (std::int64_t i = 1; i < count_; ++i) {
        const std::uint32_t order = order_[i];
        const std::int32_t position = position_[i];
        std::int64_t at = i;
        for (; at > 0 && order_[at - 1] < order; --at) order_[at] = order_[at - 1], position_[at] = position_[at - 1];
        order_[at] = order, position_[at] = position;
      }
      return position_;
    }
    std::int64_t from = 0, to = count_;
    for (int digit = 0; digit < kDigits; ++digit) {
      __builtin_memset(counts_, 0, sizeof(std::int32_t) * kRadix);
      for (std::int64_t i = from; i < from + count_; ++i) ++counts_[digit_of(order_[i], digit)];
      if (counts_[digit_of(order_[from], digit)] == count_) continue;
      auto at = static_cast<std::int32_t>(to);
      for (int d = kRadix - 1; d >= 0; --d) {
        const std::int32_t count = counts_[d];
        counts_[d] = at, at += count;
      }
      for (std::int64_t i = from; i < from + count_; ++i) {
        const std::int32_t place = counts_[digit_of(order_[i], digit)]++;
        order_[place] = order_[i], position_[place] = position_[i];
      }
      const std::int64_t before = from;
      from = to, to = before;
    }
    return position_ + from;
  }

  std::int64_t n_, capacity_, count_ = 0;
  float least_ = -kInfinity;  // no score that is not above it is among the largest
  bool closed_ = false;       // nor any other: all that are kept are NaN
  std::uint32_t* order_;      // of what has been collected, in the order of ...
  std::int32_t* position_;    // ... their positions
  std::int32_t* counts_;      // [kRadix]
};

}  // namespace rapt::cpu::RAPT_ISA
