// A query block: as many query rows as fill a register tile, the keys that they see, and the state of their online
// softmax.
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
// Like round_up(), but down and without a division: the step must be a power of two.
inline std::int64_t round_down(std::int64_t x, std::int64_t power_of_2) {
  return x & -power_of_2;
}

// The rounding error of a sum of n terms of one sign is up to n / 2 units in the last place. So sums have levels: over
// kSumKeys keys (counted from multiples of kSumKeys in the block), over those of the block, over blocks. Halving
// kSumKeys costs attention_prefill 1 % of its time.
inline constexpr std::int64_t kSumKeys = 32;

// One kv head of one sequence of a call.
struct Head : Sequence {
  const AttentionParams& p;
  std::int64_t b, hk, offset;  // the batch entry; query row 0 is at key position `offset`
  std::int64_t low, high;      // the existing keys of this work item: [low, high)
  bool whole;                  // the item stores final results, not partial ones

  Head(const AttentionParams& params, const WorkItem& item)
      : Sequence(sequence_of(params, params, item.b)),
        p(params),
        b(entry_of(params, item.b, *this)),
        hk(item.hk),
        offset(row_offset(params.score, *this)),
        low(max(item.key_begin, oldest)),
        high(max(low, min(item.key_end, len_k))),
        whole(!item.partial) {}
  // The index of key j's row in k or v, or in their scales.
  std::int64_t key_at(const Strides& s, std::int64_t j) const { return key_index(p, s, b, hk, k_first, j); }
  // Whether keys [j, j + n) are contiguous in memory: none of them starts another page.
  bool is_contiguous(std::int64_t j, std::int64_t n) const {
    return p.page_size == 0 || j % p.page_size + n <= p.page_size;
  }
  // Calls f(i, end, key_at() of key j + i) for each contiguous piece [i, end) of the n keys from j on. Within a piece,
  // keys are s.s apart.
  template <class F>
  [[gnu::always_inline]] void for_each_run(const Strides& s, std::int64_t j, std::int64_t n, F f) const {
    for (std::int64_t i = 0; i < n;) {
      const std::int64_t end = p.page_size == 0 ? n : min(n, i + p.page_size - (j + i) % p.page_size);
      f(i, end, key_at(s, j + i));
      i = end;
    }
  }
  // Writes key_at() of keys [j, j + n) to `to`.
  void keys_at(const Strides& s, std::int64_t j, std::int64_t n, std::int64_t* to) const {
    for_each_run(s, j, n, [&](auto i, auto end, auto at) {
      for (; i < end; ++i, at += s.s) to[i] = at;
    });
  }
};

// A query row: its token and head, and the keys [first, last) of the work item that it sees. `nearest` is
// nearest_key() of semantics/score.hpp.
struct Row {
  std::int64_t token, q_head, first, last, nearest;
};

inline Row row_of(const Head& head, std::int64_t token, std::int64_t q_head) {
  const std::int64_t position = token + head.offset;
  const KeyRange keys = visible_keys(head.p.score, token, position, head.low, head.high);
  return {token, q_head, keys.first, keys.last, nearest_key(position, head.len_k)};
}
// Fills in rows [r, r + n). Rows are counted as (token, query head of the group) pairs, heads innermost.
inline void find_rows(const Head& head, std::int64_t r, std::int64_t n, Row* row) {
  std::int64_t token = r / head.p.group, member = r % head.p.group;
  for (std::int64_t i = 0; i < n; ++i) {
    row[i] = row_of(head, token, head.hk * head.p.group + member);
    if (++member == head.p.group) member = 0, ++token;
  }
}

// The functions of semantics/score.hpp, for a Row and a key.
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
// Returns a function from a Row to its index in q, out or lse. The strides are captured by value so that they stay in
// registers over many rows. Sequences of ragged tensors start at q_first.
inline auto places_of_rows(const Strides& s, const Head& head) {
  return [start = head.b * s.b + head.q_first * s.s, h = s.h, s = s.s](const Row& row) {
    return start + row.q_head * h + row.token * s;
  };
}
inline std::int64_t row_at(const Strides& s, const Head& head, const Row& row) {
  return places_of_rows(s, head)(row);
}

// All pointers but `partial` point into scratch. attention_decode stores Q and O in another layout and leaves qt and
// ot null. Lanes past the last row repeat that row (attention_decode repeats all rows in turn, since its vectors hold
// several keys), or in attention_backward have any scores; their results are never stored.
struct QueryBlock {
  std::int64_t vecs = 0, width = 0;  // width = vecs * kLanes
  std::int64_t rows = 0;             // query rows in use, <= width
  Row* row = nullptr;                // [width]
  float* qt = nullptr;               // [d][width] Q^T
  float* ot = nullptr;               // [dv][width] O^T, unnormalised; garbage until `started`
  float* ot_accum = nullptr;         // [dv][width] O^T of earlier accumulation intervals; garbage until `has_accum`
  float* neg_m = nullptr;            // [width] -m: weights are 2^(score - m)
  float* l = nullptr;                // [width] sum of 2^(score - m) so far; 0 = no key seen yet
  float* l_compensation = nullptr;   // [width] the rounding errors of l (compensated summation)
  bool started = false, has_accum = false;
  float* partial = nullptr;  // the first row's partial result; null: the item stores final results

  // Row i sees keys [first(i), last(i)). Both rise with i.
  std::int64_t first(std::int64_t i) const { return row[i].first; }
  std::int64_t last(std::int64_t i) const { return row[i].last; }
};

}  // namespace rapt::cpu::RAPT_ISA
