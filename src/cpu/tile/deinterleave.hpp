// Rows of bf16 whose 2 kLanes elements are stored even ones first, then odd ones. One operation each makes such
// vectors of pairs in memory, where widening in order takes a shuffle and a shift. Rows that are multiplied by them,
// and sums of them, have the same order. Elements past the last whole 2 kLanes stay in order.
#pragma once

#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

// How many of n elements are deinterleaved.
inline std::int64_t deinterleaved(std::int64_t n) {
  return n / (2 * kLanes) * (2 * kLanes);
}

[[gnu::always_inline]] inline vec load_pairs(const bf16* p) {
  return load_any(reinterpret_cast<const float*>(p));
}
[[gnu::always_inline]] inline vec even_elements(vec pairs) {
  return cast_to_float(shift_left<16>(cast_to_int(pairs)));
}
[[gnu::always_inline]] inline vec odd_elements(vec pairs) {
  return cast_to_float(cast_to_int(pairs) & ivec(-0x10000));
}

// every_second: lanes kFirst, kFirst + 2, ... of a and then of b. in_turns: lanes of a and b in turns, from lane
// kFirst of each on.
template <int kFirst, int... kLane>
[[gnu::always_inline]] inline vec every_second(vec a, vec b, std::integer_sequence<int, kLane...>) {
  return vec(__builtin_shufflevector(a.data, b.data, (2 * kLane + kFirst)...));
}
template <int kFirst, int... kLane>
[[gnu::always_inline]] inline vec in_turns(vec a, vec b, std::integer_sequence<int, kLane...>) {
  return vec(__builtin_shufflevector(a.data, b.data, (kLane % 2 * kLanes + kFirst + kLane / 2)...));
}

// In place, for rows of n numbers.
inline void deinterleave(float* row, std::int64_t n) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
  for (float* const end = row + deinterleaved(n); row < end; row += 2 * kLanes) {
    const vec a = load(row), b = load(row + kLanes);
    store(row, every_second<0>(a, b, Lanes())), store(row + kLanes, every_second<1>(a, b, Lanes()));
  }
}
inline void reinterleave(float* row, std::int64_t n) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
  for (float* const end = row + deinterleaved(n); row < end; row += 2 * kLanes) {
    const vec even = load(row), odd = load(row + kLanes);
    store(row, in_turns<0>(even, odd, Lanes())), store(row + kLanes, in_turns<kLanes / 2>(even, odd, Lanes()));
  }
}

}  // namespace rapt::cpu::RAPT_ISA
