// Which rows, keys and memory belong together. Lengths in device memory were checked by nobody: they are clamped to
// what the tensors hold, so that whatever they say, nothing outside is touched.
#pragma once

#include "cuda/tile/element.cuh"

namespace rapt::cuda {

__device__ inline std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return min(max(x, low), high);
}

__host__ __device__ inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// One kv head of one sequence of a call.
struct Head {
  const AttentionParams& p;
  std::int64_t b, hk;
  std::int64_t q_first = 0, k_first = 0;  // ragged: first row in the packed tensors
  std::int64_t len_q, len_k, offset;
  std::int64_t low, high;  // keys [low, high) are there

  __device__ Head(const AttentionParams& params, std::int64_t b, std::int64_t hk)
      : p(params), b(b), hk(hk), len_q(p.sq), len_k(p.sk) {
    if (p.total_q >= 0) {
      q_first = clamp(p.q_begin[b], 0, p.total_q);
      len_q = clamp(p.q_begin[b + 1], q_first, p.total_q) - q_first;
    }
    if (p.total_k >= 0) {
      k_first = clamp(p.k_begin[b], 0, p.total_k);
      len_k = clamp(p.k_begin[b + 1], k_first, p.total_k) - k_first;
    }
    if (p.k_len) len_k = clamp(p.k_len[b], 0, p.ring ? std::int64_t{1} << 48 : p.sk);
    offset = p.score.offset + (p.score.bottom_right ? len_k - len_q : 0);
    low = p.ring ? max(len_k - p.page_size, std::int64_t{0}) : 0;
    high = len_k;
  }

  // Key j's row in k or v, as an index.
  __device__ std::int64_t key_at(const Strides& s, std::int64_t j) const {
    if (p.page_size == 0) return b * s.b + hk * s.h + (k_first + j) * s.s;
    std::int64_t page = b;
    if (!p.ring)
      page = clamp(p.pages.element(b * p.pages_stride_b + j / p.page_size * p.pages.stride), 0, p.page_count - 1);
    return page * s.b + hk * s.h + j % p.page_size * s.s;
  }
};

// Where a row lies, and the keys [first, last) that causal, window and lengths leave it.
struct Row {
  std::int64_t token, q_head, first, last;

  Row() = default;
  // Row r of (token, head of the group) pairs.
  __device__ Row(const Head& head, std::int64_t r)
      : Row(head, r / head.p.group, head.hk * head.p.group + r % head.p.group) {}
  __device__ Row(const Head& head, std::int64_t token, std::int64_t q_head) : token(token), q_head(q_head) {
    const ScoreParams& s = head.p.score;
    const std::int64_t at = token + head.offset;
    first = s.left == kOpen ? head.low : clamp(at - s.left, head.low, head.high);
    last = s.right == kOpen ? head.high : clamp(at + s.right + 1, head.low, head.high);
    last = min(last, token < head.p.term_rows ? head.p.term_keys : 0);
  }
  // The key nearest to its position among the keys.
  __device__ std::int64_t nearest(const Head& head) const {
    return clamp(token + head.offset, 0, max(head.len_k - 1, std::int64_t{0}));
  }
};

// The row's place in q, out or lse, as an index.
__device__ inline std::int64_t row_at(const Strides& s, const Head& head, const Row& row) {
  return head.b * s.b + row.q_head * s.h + (head.q_first + row.token) * s.s;
}

// Pieces of kSize rows of ragged sequences that lie one after another, numbered so that each begins with its sequence's
// row 0. No sequence knows the lengths of all others: there are more numbers than pieces, total / kSize + b of them.
template <int kSize>
struct Pieces {
  const Integers& begin;  // [b + 1]
  std::int64_t b, total;  // rows in all
  std::int64_t each = 1;  // so many of this piece's rows to one of `begin`

  // The first of sequence i: at most first(i + 1) - (those that i needs).
  __device__ std::int64_t first(std::int64_t i) const {
    return i == 0 ? 0 : clamp(begin[i], 0, total) * each / kSize + i;
  }
  // The sequence that has a number.
  __device__ std::int64_t sequence(std::int64_t number) const {
    std::int64_t low = 0, high = b;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (first(middle) <= number ? low : high) = middle;
    }
    return low;
  }
};

// A call's query rows in tiles of kRows rows of one kv head of one sequence. Tiles are numbered head by head, dense
// sequences counting as heads of their own.
template <int kRows>
struct Tiling {
  struct Tile {
    std::int64_t b, hk, row;
  };

  __host__ __device__ static std::int64_t heads(const AttentionParams& p) { return p.total_q >= 0 ? p.hk : p.b * p.hk; }
  // Of ragged sequences these are more than there are: tiles past a sequence's last row are empty.
  __host__ __device__ static std::int64_t tiles(const AttentionParams& p) {
    return p.total_q >= 0 ? p.total_q * p.group / kRows + p.b : ceil_div(p.sq * p.group, kRows);
  }

  __device__ static Pieces<kRows> ragged(const AttentionParams& p) { return {p.q_begin, p.b, p.total_q, p.group}; }
  // `tile` of those of one head.
  __device__ static Tile find(const AttentionParams& p, int head, int tile) {
    if (p.total_q < 0) {
      const auto hk = static_cast<int>(p.hk);
      return {head / hk, head % hk, std::int64_t{tile} * kRows};
    }
    const std::int64_t b = ragged(p).sequence(tile);
    return {b, head, (tile - ragged(p).first(b)) * kRows};
  }
  // A tile's number, from what find() says of it.
  __device__ static std::int64_t number(const AttentionParams& p, std::int64_t b, std::int64_t hk, std::int64_t row) {
    if (p.total_q < 0) return (b * p.hk + hk) * tiles(p) + row / kRows;
    return hk * tiles(p) + ragged(p).first(b) + row / kRows;
  }
};

// Keys likewise in blocks of kKeys, cut at multiples of kKeys from key 0 of a sequence and numbered from the first
// block that has keys: every sequence has at least one.
template <int kKeys>
struct Blocking {
  struct Block {
    std::int64_t b, hk, key;  // its first
  };

  __host__ __device__ static std::int64_t heads(const AttentionParams& p) { return p.total_k >= 0 ? p.hk : p.b * p.hk; }
  // Of one head. A ring may begin and end within a block.
  __host__ __device__ static std::int64_t blocks(const AttentionParams& p) {
    if (p.total_k >= 0) return p.total_k / kKeys + p.b;
    const std::int64_t most = ceil_div(p.sk, kKeys) + (p.ring ? 1 : 0);
    return most > 1 ? most : 1;
  }

  __device__ static Pieces<kKeys> ragged(const AttentionParams& p) { return {p.k_begin, p.b, p.total_k}; }
  // The first key of a sequence's first block.
  __device__ static std::int64_t origin(const Head& head) { return head.low / kKeys * kKeys; }
  // `block` of those of all heads.
  __device__ static Block find(const AttentionParams& p, std::int64_t block) {
    const std::int64_t head = block / blocks(p), in_head = block % blocks(p);
    const std::int64_t b = p.total_k >= 0 ? ragged(p).sequence(in_head) : head / p.hk;
    const std::int64_t first = p.total_k >= 0 ? ragged(p).first(b) : 0, hk = p.total_k >= 0 ? head : head % p.hk;
    return {b, hk, (in_head - first) * kKeys + origin(Head(p, b, hk))};
  }
  // The number of the block that begins with `key`.
  __device__ static std::int64_t number(const Head& head, std::int64_t key) {
    const AttentionParams& p = head.p;
    const std::int64_t in_sequence = (key - origin(head)) / kKeys;
    if (p.total_k < 0) return (head.b * p.hk + head.hk) * blocks(p) + in_sequence;
    return head.hk * blocks(p) + ragged(p).first(head.b) + in_sequence;
  }
};

}  // namespace rapt::cuda
