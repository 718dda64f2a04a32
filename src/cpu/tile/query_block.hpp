// A register query block of query rows: which rows they are, which keys they see, and what the online softmax has of
// them.
#pragma once

#include "cpu/tile/dtype.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr auto kLog2e = static_cast<float>(rapt::kLog2e);

inline std::int64_t min(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}
inline std::int64_t max(std::int64_t a, std::int64_t b) {
  return a > b ? a : b;
}
inline std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return min(max(x, low), high);
}
inline std::int64_t round_up(std::int64_t x, std::int64_t step) {
  return (x + step - 1) / step * step;
}
// Without a division, of steps that are powers of two.
inline std::int64_t round_down(std::int64_t x, std::int64_t power_of_2) {
  return x & -power_of_2;
}

// A sum of n terms of one sign is off by up to n / 2 roundings of itself, so long sums are sums of short ones: of
// kSumKeys keys, which start at multiples of it within the block, then of the block's, then of blocks. Each halving
// costs 1 % of attention_prefill's time.
inline constexpr std::int64_t kSumKeys = 32;

// One kv head of one sequence of a call.
struct Head : Sequence {
  const AttentionParams& p;
  std::int64_t b, hk, offset;  // the entry of the batch; row 0 sits at key position `offset`
  std::int64_t low, high;      // keys [low, high) are there and this item's
  bool whole;                  // the item finishes its rows

  Head(const AttentionParams& params, const WorkItem& item)
      : Sequence(sequence_of(params, params, item.b)),
        p(params),
        b(entry_of(params, item.b, *this)),
        hk(item.hk),
        offset(row_offset(params.score, *this)),
        low(max(item.key_begin, oldest)),
        high(max(low, min(item.key_end, len_k))),
        whole(!item.partial) {}
  // Key j's row in k or v, or in their scales, as an index.
  std::int64_t key_at(const Strides& s, std::int64_t j) const { return key_index(p, s, b, hk, k_first, j); }
  // Rows [j, j + n) lie one after another.
  bool is_contiguous(std::int64_t j, std::int64_t n) const {
    return p.page_size == 0 || j % p.page_size + n <= p.page_size;
  }
  // f(i, end, key_at() of key j + i) for the parts [i, end) of n keys from j on that lie s.s apart.
  template <class F>
  [[gnu::always_inline]] void for_each_run(const Strides& s, std::int64_t j, std::int64_t n, F f) const {
    for (std::int64_t i = 0; i < n;) {
      const std::int64_t end = p.page_size == 0 ? n : min(n, i + p.page_size - (j + i) % p.page_size);
      f(i, end, key_at(s, j + i));
      i = end;
    }
  }
  // key_at() of keys [j, j + n).
  void keys_at(const Strides& s, std::int64_t j, std::int64_t n, std::int64_t* to) const {
    for_each_run(s, j, n, [&](auto i, auto end, auto at) {
      for (; i < end; ++i, at += s.s) to[i] = at;
    });
  }
};

// Where a row lies, and the item's keys [first, last) that it sees. `nearest` is nearest_key() of semantics/score.hpp.
struct Row {
  std::int64_t token, q_head, first, last, nearest;
};

inline Row row_of(const Head& head, std::int64_t token, std::int64_t q_head) {
  const std::int64_t position = token + head.offset;
  const KeyRange keys = visible_keys(head.p.score, token, position, head.low, head.high);
  return {token, q_head, keys.first, keys.last, nearest_key(position, head.len_k)};
}
// Rows [r, r + n) of (token, head of the group) pairs.
inline void find_rows(const Head& head, std::int64_t r, std::int64_t n, Row* row) {
  std::int64_t token = r / head.p.group, member = r % head.p.group;
  for (std::int64_t i = 0; i < n; ++i) {
    row[i] = row_of(head, token, head.hk * head.p.group + member);
    if (++member == head.p.group) member = 0, ++token;
  }
}

// What semantics/score.hpp says of a row and a key.
inline constexpr auto kNumberAt = [](const void* data, DType dtype, std::int64_t index) __attribute__((always_inline)) {
  return number_at(data, dtype, index);
};
inline ScorePlace place_of(const Head& head, const Row& row, std::int64_t key) {
  return {head.b, row.q_head, row.token, key};
}
inline float alibi_slope_log2(const Head& head, const Row& row) {
  return alibi_slope_log2(head.p.score, head.b, row.q_head, kNumberAt);
}
inline float alibi_shift_log2(const Head& head, const Row& row) {
  return alibi_shift_log2(head.p.score, head.b, row.q_head, row.token + head.offset, row.nearest, kNumberAt);
}
// Row -> its place in q, out or lse, as an index; of many rows, by numbers that stay in registers. Ragged sequences
// start at q_first.
inline auto places_of_rows(const Strides& s, const Head& head) {
  return [start = head.b * s.b + head.q_first * s.s, h = s.h, s = s.s](const Row& row) {
    return start + row.q_head * h + row.token * s;
  };
}
inline std::int64_t row_at(const Strides& s, const Head& head, const Row& row) {
  return places_of_rows(s, head)(row);
}

// All pointers but `partial` lead into scratch; attention_decode, whose Q and O lie otherwise, has no qt and ot. Lanes
// past the last row repeat it (in attention_decode, where vectors have several keys, all rows in turn); their results
// are never stored.
struct QueryBlock {
  std::int64_t vecs = 0, width = 0;  // width = vecs * kLanes
  std::int64_t rows = 0;             // rows that exist, <= width
  Row* row = nullptr;                // [width]
  float* qt = nullptr;               // [d][width] Q^T
  float* ot = nullptr;               // [dv][width] O^T, unnormalised; garbage until `started`
  float* ot_accum = nullptr;         // [dv][width] O^T of earlier runs of blocks; garbage until `joined`
  float* neg_m = nullptr;            // [width] -m, what weights are relative to
  float* l = nullptr;                // [width] sum of 2^(score - m) so far; 0 = no key seen yet
  float* l_compensation = nullptr;   // [width] what rounding took away from it
  bool started = false, has_accum = false;
  float* partial = nullptr;  // of its first row, if the item leaves partial results

  // Key ranges of its rows: the first row sees [first(0), last(0)), and so on.
  std::int64_t first(std::int64_t i) const { return row[i].first; }
  std::int64_t last(std::int64_t i) const { return row[i].last; }
};

}  // namespace rapt::cpu::RAPT_ISA
