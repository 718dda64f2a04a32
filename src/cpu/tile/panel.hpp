// A register panel of query rows: which rows they are, which keys they see, and their softmax state.
#pragma once

#include "cpu/tile/element.hpp"
#include "cpu/tile/vec.hpp"

namespace rapt::cpu::RAPT_ISA {

inline constexpr auto kLog2e = static_cast<float>(rapt::kLog2e);

inline std::int64_t least(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}
inline std::int64_t most(std::int64_t a, std::int64_t b) {
  return a > b ? a : b;
}
inline std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return least(most(x, low), high);
}
inline std::int64_t round_up(std::int64_t x, std::int64_t step) {
  return (x + step - 1) / step * step;
}

// A sum of n terms of one sign is off by up to n / 2 roundings of itself, so long sums are sums of short ones: of
// kSumKeys keys, which start at multiples of it within the block, then of the block's, then of blocks. Each halving
// costs 1 % of attention_forward's time.
inline constexpr std::int64_t kSumKeys = 32;

// One kv head of one sequence of a call.
struct Head {
  const ForwardParams& p;
  std::int64_t b, hk;
  std::int64_t q_first = 0, k_first = 0;  // ragged: first row in the packed tensors
  std::int64_t len_q, len_k, offset;
  std::int64_t low, high;  // keys [low, high) are this item's and there
  bool whole;              // the item finishes its rows

  Head(const ForwardParams& params, const WorkItem& item)
      : p(params), b(item.b), hk(item.hk), len_q(p.sq), len_k(p.sk), whole(!item.state) {
    if (p.q_begin) q_first = p.q_begin[b], len_q = p.q_begin[b + 1] - q_first;
    if (p.k_begin) k_first = p.k_begin[b], len_k = p.k_begin[b + 1] - k_first;
    if (p.k_len) len_k = p.k_len[b];
    offset = p.score.offset + (p.score.bottom_right ? len_k - len_q : 0);
    low = most(item.key_begin, p.ring ? len_k - p.page_size : 0);
    high = most(low, least(item.key_end, len_k));
  }
  // Key j's row in k or v, or in their scales, as an index.
  std::int64_t key_at(const Strides& s, std::int64_t j) const {
    if (p.page_size == 0) return b * s.b + hk * s.h + (k_first + j) * s.s;
    const std::int64_t page = p.ring ? b : p.pages.element(b * p.pages_stride_b + j / p.page_size * p.pages.stride);
    return page * s.b + hk * s.h + j % p.page_size * s.s;
  }
  // Rows [j, j + n) lie one after another.
  bool in_one_piece(std::int64_t j, std::int64_t n) const {
    return p.page_size == 0 || j % p.page_size + n <= p.page_size;
  }
  // key_at() of keys [j, j + n).
  void keys_at(const Strides& s, std::int64_t j, std::int64_t n, std::int64_t* at) const {
    for (std::int64_t i = 0; i < n;) {
      const std::int64_t left = p.page_size == 0 ? n : p.page_size - (j + i) % p.page_size, end = least(n, i + left);
      for (std::int64_t first = key_at(s, j + i); i < end; ++i, first += s.s) at[i] = first;
    }
  }
};

// Where a row lies, and the item's keys [first, last) that causal, window and lengths leave it. Both ends rise with the
// row. `at` is the key nearest to its position among the keys.
struct Row {
  std::int64_t token, q_head, first, last, at;
};

// Rows [r, r + n) of (token, head of the group) pairs.
inline void find_rows(const Head& head, std::int64_t r, std::int64_t n, Row* row) {
  const ScoreParams& s = head.p.score;
  std::int64_t token = r / head.p.group, member = r % head.p.group;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t at = token + head.offset;
    const std::int64_t first = s.left == kOpen ? head.low : clamp(at - s.left, head.low, head.high);
    const std::int64_t last = s.right == kOpen ? head.high : clamp(at + s.right + 1, head.low, head.high);
    row[i] = {token, head.hk * head.p.group + member, first, last, clamp(at, 0, most(head.len_k - 1, 0))};
    if (++member == head.p.group) member = 0, ++token;
  }
}
inline float alibi_slope_log2(const Head& head, const Row& row) {
  const ScoreParams& s = head.p.score;
  return number_at(s.alibi, s.alibi_type, head.b * s.alibi_stride_b + row.q_head * s.alibi_stride_h) * kLog2e;
}
// Kernels count ALiBi's distances from the key nearest to the row, where they are exact whatever the offset. The rest
// of the way is the same for all keys: it lowers all scores of the row by this much.
inline float alibi_shift_log2(const Head& head, const Row& row) {
  const std::int64_t rest = row.token + head.offset - row.at;
  return head.p.score.alibi && rest != 0 ? alibi_slope_log2(head, row) * __builtin_fabsf(static_cast<float>(rest)) : 0;
}
// The row's place in q, out or lse, as an index. Ragged sequences start at q_first.
inline std::int64_t row_at(const Strides& s, const Head& head, const Row& row) {
  return head.b * s.b + row.q_head * s.h + (head.q_first + row.token) * s.s;
}
// The row's bias or mask, as an index: local to the sequence, broadcast dimensions have stride 0.
inline std::int64_t term_row(const Strides& s, const Head& head, const Row& row) {
  return head.b * s.b + row.q_head * s.h + row.token * s.s;
}
inline bool hidden_by_mask(const Head& head, const Row& row, std::int64_t key) {
  const ScoreParams& s = head.p.score;
  return s.mask && !s.mask[term_row(s.mask_stride, head, row) + key * s.mask_stride.d];
}
inline float bias_of(const Head& head, const Row& row, std::int64_t key) {
  const ScoreParams& s = head.p.score;
  return number_at(s.bias, s.bias_type, term_row(s.bias_stride, head, row) + key * s.bias_stride.d);
}

// All pointers but `state` lead into scratch; attention_decode, whose Q and O lie otherwise, has no qt and ot. Lanes
// past the last row repeat it; their results are never stored.
struct Panel {
  std::int64_t vecs = 0, width = 0;  // width = vecs * kLanes
  std::int64_t rows = 0;             // rows that exist, <= width
  Row* row = nullptr;                // [width]
  float* qt = nullptr;               // [d][width] Q^T
  float* ot = nullptr;               // [dv][width] O^T, unnormalised; garbage until `started`
  float* total = nullptr;            // [dv][width] O^T of earlier runs of blocks; garbage until `joined`
  float* minus_m = nullptr;          // [width] negated reference of the softmax
  float* l = nullptr;                // [width] sum of 2^(score - m) so far; 0 = no key seen yet
  float* l_low = nullptr;            // [width] what rounding took away from it
  bool started = false, joined = false;
  float* state = nullptr;  // of its first row, if the item leaves states

  // Key ranges of its rows: the first row sees [first(0), last(0)), and so on.
  std::int64_t first(std::int64_t i) const { return row[i].first; }
  std::int64_t last(std::int64_t i) const { return row[i].last; }
};

}  // namespace rapt::cpu::RAPT_ISA
