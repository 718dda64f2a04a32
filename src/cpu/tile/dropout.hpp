// Dropout with query rows in the lanes: evaluates semantics/dropout.hpp for whole vectors.
//
// One draw is Philox for a (query, 8 keys) pair. A round has two products of 32 bits. Two vectors of 64-bit lanes hold
// the products of a vector's lanes: the words are in the lower halves, the upper halves are ignored. In rounds 1 and 2
// one product depends on the query alone and one on the keys alone, so these are computed once and not per draw. A
// draw then costs 8 rounds of 12 instructions with AVX-512 (16 lanes x 8 keys), of 16 with AVX2 (8 x 8).
#pragma once

#include "cpu/tile/head.hpp"

namespace rapt::cpu::RAPT_ISA {

// Philox's words, each in the lower half of a 64-bit lane.
using WordLanes = GccVector<std::uint64_t, kLanes / 2>;
using Bits = GccVector<std::int32_t, kLanes>;

// Moves the upper halves of 64-bit lanes to the lower halves.
template <std::size_t... kLane>
[[gnu::always_inline]] inline WordLanes high_halves(WordLanes x, std::index_sequence<kLane...>) {
  const Bits bits = (Bits)x;
  return (WordLanes)__builtin_shufflevector(bits, bits, (static_cast<int>(kLane) | 1)...);
}
// One vector of the lower halves of both. Each 128 bits have two lanes of a and two of b, which is one instruction on
// every ISA.
template <std::size_t... kLane>
[[gnu::always_inline]] inline Bits low_halves(WordLanes a, WordLanes b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector((Bits)a, (Bits)b,
                                 (static_cast<int>(kLane % 4 / 2 * kLanes + kLane / 4 * 4 + kLane % 2 * 2))...);
}
// The lane of a vector of rows that 64-bit lane i of the first or second vector stands for.
constexpr int lane_of_word(int i, int second) {
  return i / 2 * 4 + second * 2 + i % 2;
}

// x / (1 - p) where a weight is kept, else 0. It selects instead of multiplying: inf or NaN of a dropped value must
// not leak.
struct AfterDropout {
  Bits kept;  // lanes of 0 or -1
  vec scale;

  [[gnu::always_inline]] vec operator()(vec x) const {
    const Bits bits = (Bits)(x * scale).data, none = {};
    return vec((typename vec::register_type)(kept ? bits : none));
  }
};

// The draws of one vector of query rows.
class DroppedLanes {
 public:
  DroppedLanes(const Head& head, const Row* row) : dropout_(head.p.score.dropout) {
    for (int r = 0; r < kPhiloxRounds; ++r)
      for (int i = 0; i < 2; ++i) key_[r][i] = dropout_.key[i] + static_cast<std::uint32_t>(r) * kPhiloxStep[i];
    for (int second = 0; second < 2; ++second) {
      WordLanes of_row, of_head;
      for (int i = 0; i < kLanes / 2; ++i) {
        const Row& row_of_lane = row[lane_of_word(i, second)];
        of_row[i] = static_cast<std::uint32_t>(row_of_lane.token);
        of_head[i] = dropout_head(dropout_, head.b, row_of_lane.q_head);
      }
      const WordLanes product = multiply_low(of_head, WordLanes{} + kPhiloxMultiplier[1]);
      first_[second] = product;
      second_[second] = multiply_low(high(product) ^ of_row ^ key_[0][0], WordLanes{} + kPhiloxMultiplier[0]);
    }
  }

  // Draws for keys [8 n, 8 n + 8).
  [[gnu::always_inline]] void draw(std::int64_t n, AfterDropout (&after)[kKeysPerDraw]) const {
    const auto low = [](std::uint64_t x) { return std::uint64_t{static_cast<std::uint32_t>(x)}; };
    const std::uint64_t of_keys = kPhiloxMultiplier[0] * low(static_cast<std::uint64_t>(n));
    const std::uint64_t next = kPhiloxMultiplier[1] * (of_keys >> 32 ^ dropout_.offset ^ key_[0][1]);
    WordLanes x[2][4];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      x[i][0] = first_[i] ^ (next >> 32 ^ key_[1][0]);
      x[i][1] = WordLanes{} + next;
      x[i][2] = high(second_[i]) ^ (low(of_keys) ^ key_[1][1]);
      x[i][3] = second_[i];
    }
#pragma GCC unroll 8
    for (int r = 2; r < kPhiloxRounds; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const WordLanes p = multiply_low(x[i][0], WordLanes{} + kPhiloxMultiplier[0]),
                        q = multiply_low(x[i][2], WordLanes{} + kPhiloxMultiplier[1]);
        x[i][0] = high(q) ^ x[i][1] ^ key_[r][0], x[i][1] = q;
        x[i][2] = high(p) ^ x[i][3] ^ key_[r][1], x[i][3] = p;
      }
    const Bits threshold = Bits{} + static_cast<std::int32_t>(dropout_.threshold);
    const vec scale(dropout_.scale);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      const Bits random = low_halves(x[0][w], x[1][w], std::make_index_sequence<kLanes>());
      const Bits first = random & 0xffff;
      const Bits second = (Bits)((GccVector<std::uint32_t, kLanes>)random >> 16);
      after[2 * w] = {first >= threshold, scale};
      after[2 * w + 1] = {second >= threshold, scale};
    }
  }

 private:
  [[gnu::always_inline]] static WordLanes high(WordLanes x) {
    return high_halves(x, std::make_index_sequence<kLanes>());
  }

  DropoutParams dropout_;
  std::uint64_t key_[kPhiloxRounds][2];
  WordLanes first_[2], second_[2];  // the products of rounds 1 and 2 that depend on the query alone
};

// Calls f(j, after_dropout) for keys [begin, end) of the block at k0, a multiple of 8, and one vector of query rows.
template <class F>
[[gnu::always_inline]] inline void for_each_drawn_key(const Head& head, const Row* row, std::int64_t k0,
                                                      std::int64_t begin, std::int64_t end, F f) {
  const DroppedLanes lanes(head, row);
  for (std::int64_t j = begin / kKeysPerDraw * kKeysPerDraw; j < end; j += kKeysPerDraw) {
    AfterDropout after[kKeysPerDraw];
    lanes.draw((k0 + j) / kKeysPerDraw, after);
    const bool whole = begin <= j && j + kKeysPerDraw <= end;
#pragma GCC unroll 8
    for (int i = 0; i < kKeysPerDraw; ++i)
      if (whole || (begin <= j + i && j + i < end)) f(j + i, after[i]);
  }
}

// Applies dropout to the weights of keys [begin, end) at p[key][width]. (A weight that is not finite makes its row's
// sum NaN, and so the row, even where it is dropped.)
[[gnu::noinline]] inline void drop_weights(const Head& head, const Row* row, std::int64_t k0, std::int64_t begin,
                                           std::int64_t end, std::int64_t width, float* p) {
  for_each_drawn_key(
      head, row, k0, begin, end, [&](std::int64_t j, AfterDropout after) __attribute__((always_inline)) {
        store(p + j * width, after(load(p + j * width)));
      });
}

}  // namespace rapt::cpu::RAPT_ISA
