// Selects the n largest scores of a row from a stream of scores in the order of their positions. Larger scores rank
// first, equal ones by lower position. So a score that is not larger than the n-th largest so far cannot be selected,
// and one comparison skips most scores. The others are collected in a buffer; when it is full, all but the n largest
// are dropped. A bisection finds the n-th largest, which is exact however many scores are equal.
#pragma once

#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/head.hpp"

namespace rapt::cpu::RAPT_ISA {

using IntLanes = GccVector<std::int32_t, kLanes>;  // integers; as a condition -1 is true and 0 false

[[gnu::always_inline]] inline IntLanes load_lanes(const std::int32_t* p) {
  IntLanes x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
[[gnu::always_inline]] inline IntLanes lane_indices() {
  IntLanes x = {};
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}
[[gnu::always_inline]] inline std::int64_t sum_of(IntLanes x) {
  std::int64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

// Maps scores to integers of the same order. -0 equals 0, and every NaN is the largest.
[[gnu::always_inline]] inline IntLanes order_of(vec score) {
  const auto number = (GccVector<float, kLanes>)(score + vec(0.f)).data;
  const auto bits = (IntLanes)number;
  const IntLanes order = bits ^ ((bits >> 31) & INT32_MAX);
  return number == number ? order : IntLanes{} + INT32_MAX;
}
inline float score_of(std::int32_t order) {
  return __builtin_bit_cast(float, order ^ ((order >> 31) & INT32_MAX));
}

class Topk {
 public:
  // Selects `n` of up to `keys` scores.
  Topk(BumpAllocator& allocator, std::int64_t n, std::int64_t keys) : n_(n), capacity_(capacity(n, keys)) {
    order_ = allocator.take<std::int32_t>(capacity_ + kLanes);
    position_ = allocator.take<std::int32_t>(capacity_ + kLanes);
    counts_ = allocator.take<std::uint32_t>(kDigits * kRadix);
  }

  void start() { count_ = 0, min_order_ = kMinOrder, min_score_ = -kInfinity; }

  // Adds the scores of positions [first, first + kLanes), lanes [begin, end) only.
  [[gnu::always_inline]] void add(vec score, std::int64_t first, std::int64_t begin, std::int64_t end) {
    if (!xsimd::any(!(score <= vec(min_score_)))) return;
    const IntLanes lane = lane_indices();
    const IntLanes valid = (lane >= static_cast<std::int32_t>(begin)) & (lane < static_cast<std::int32_t>(end));
    add_lanes(order_of(score), lane + static_cast<std::int32_t>(first), valid);
  }
  // Adds what another Topk has selected; the arrays have room for kLanes more.
  void add(const std::int32_t* order, const std::int32_t* position, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += kLanes)
      add_lanes(load_lanes(order + i), load_lanes(position + i),
                lane_indices() < static_cast<std::int32_t>(min(count - i, kLanes)));
  }

  // Drops all but the n largest so far, and keeps them in the order of their positions.
  void keep_largest() {
    if (count_ > n_) prune();
  }
  std::int64_t count() const { return count_; }
  const std::int32_t* order() const { return order_; }
  const std::int32_t* position() const { return position_; }

  // indices[i * stride] = position of the i-th largest; -1 behind the last.
  void store_indices(std::int32_t* indices, std::int64_t stride) {
    keep_largest();
    const std::int32_t* const sorted = sort();
    for (std::int64_t i = 0; i < count_; ++i) indices[i * stride] = sorted[i];
    for (std::int64_t i = count_; i < n_; ++i) indices[i * stride] = -1;
  }

 private:
  static constexpr std::int32_t kMinOrder = static_cast<std::int32_t>(0xff800000u ^ 0x7fffffffu);  // of -inf
  static constexpr int kRadixBits = 8, kRadix = 1 << kRadixBits, kDigits = 4;

  static std::int64_t capacity(std::int64_t n, std::int64_t keys) {
    const std::int64_t kept = min(n, keys);
    return round_up(max(2 * kept, min(keys, 3 * kept + 1024)), 16) + kLanes;  // sort() needs 2 * kept
  }

  [[gnu::noinline]] void add_lanes(IntLanes order, IntLanes position, IntLanes valid) {
    append_lanes(order, position, valid & (order > min_order_), count_);
    if (count_ + kLanes > capacity_) prune();
  }

  // Appends the lanes where `selected` is true to the first `at` elements.
  [[gnu::always_inline]] void append_lanes(IntLanes order, IntLanes position, IntLanes selected, std::int64_t& at) {
#if defined(RAPT_HAVE_COMPRESS)
    compress(order, selected, order_ + at);
    at += compress(position, selected, position_ + at);
#else
    for (int i = 0; i < kLanes; ++i) order_[at] = order[i], position_[at] = position[i], at -= selected[i];
#endif
  }

  // How many collected scores are `order` or larger.
  std::int64_t count_from(std::int32_t order) const {
    IntLanes count = {};
    for (std::int64_t i = 0; i < count_; i += kLanes) count += load_lanes(order_ + i) >= order;
    return -sum_of(count);
  }

  [[gnu::noinline]] void prune() {
    if (count_ <= n_) return;
    for (int i = 0; i < kLanes; ++i) order_[count_ + i] = INT32_MIN;  // lower than every score: pads the last vector
    std::int64_t low = min_order_, high = INT32_MAX;                  // bounds of the n-th largest
    while (low < high) {
      const std::int64_t middle = low + (high - low + 1) / 2;
      if (count_from(static_cast<std::int32_t>(middle)) >= n_) low = middle;
      else high = middle - 1;
    }
    min_order_ = static_cast<std::int32_t>(low), min_score_ = score_of(min_order_);
    // All larger scores stay, and as many of the equal ones as fit, lowest positions first.
    std::int64_t equal = n_ - (low < INT32_MAX ? count_from(min_order_ + 1) : 0), kept = 0, i = 0;
    for (; equal > 0; i += kLanes) {
      const IntLanes order = load_lanes(order_ + i), position = load_lanes(position_ + i);
      IntLanes selected = order >= min_order_;
      std::int64_t here = -sum_of(order == min_order_);
      for (int lane = kLanes - 1; here > equal; --lane)
        if (order[lane] == min_order_) selected[lane] = 0, --here;
      equal -= here;
      append_lanes(order, position, selected, kept);
    }
    for (; i < count_; i += kLanes) {
      const IntLanes order = load_lanes(order_ + i);
      append_lanes(order, load_lanes(position_ + i), order > min_order_, kept);
    }
    count_ = kept;
  }

  static std::uint32_t digit_of(std::int32_t order, int digit) {  // 0 for the largest
    return (static_cast<std::uint32_t>(order) ^ INT32_MAX) >> (digit * kRadixBits) & (kRadix - 1);
  }
  // Radix sort: positions, largest score first. It is stable, so equal scores stay in the order of their positions.
  const std::int32_t* sort() {
    __builtin_memset(counts_, 0, sizeof(std::uint32_t) * kDigits * kRadix);
    for (std::int64_t i = 0; i < count_; ++i)
      for (int digit = 0; digit < kDigits; ++digit) ++counts_[digit * kRadix + digit_of(order_[i], digit)];
    std::int64_t from = 0, to = count_;
    for (int digit = 0; digit < kDigits && count_ > 1; ++digit) {
      std::uint32_t* const places = counts_ + digit * kRadix;
      if (places[digit_of(order_[from], digit)] == count_) continue;
      auto place = static_cast<std::uint32_t>(to);  // of two halves of up to 2^31 elements
      for (int d = 0; d < kRadix; ++d) {
        const std::uint32_t count = places[d];
        places[d] = place, place += count;
      }
      for (std::int64_t i = from; i < from + count_; ++i) {
        const std::uint32_t at = places[digit_of(order_[i], digit)]++;
        order_[at] = order_[i], position_[at] = position_[i];
      }
      const std::int64_t before = from;
      from = to, to = before;
    }
    return position_ + from;
  }

  std::int64_t n_, capacity_, count_ = 0;
  std::int32_t min_order_ = kMinOrder;  // scores up to this one cannot be selected
  float min_score_ = -kInfinity;
  std::int32_t* order_;     // of what has been collected, in the order of ...
  std::int32_t* position_;  // ... their positions
  std::uint32_t* counts_;   // [kDigits][kRadix]
};

}  // namespace rapt::cpu::RAPT_ISA
