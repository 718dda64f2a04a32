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
      q_first = clamp(load(p.q_begin, b), 0, p.total_q);
      len_q = clamp(load(p.q_begin, b + 1), q_first, p.total_q) - q_first;
    }
    if (p.total_k >= 0) {
      k_first = clamp(load(p.k_begin, b), 0, p.total_k);
      len_k = clamp(load(p.k_begin, b + 1), k_first, p.total_k) - k_first;
    }
    if (p.k_len.data) len_k = clamp(load(p.k_len, b), 0, p.ring ? std::int64_t{1} << 48 : p.sk);
    offset = p.score.offset + (p.score.bottom_right ? len_k - len_q : 0);
    low = p.ring ? max(len_k - p.page_size, std::int64_t{0}) : 0;
    high = len_k;
  }

  // Key j's row in k or v, as an index.
  __device__ std::int64_t key_at(const Strides& s, std::int64_t j) const {
    if (p.page_size == 0) return b * s.b + hk * s.h + (k_first + j) * s.s;
    std::int64_t page = b;
    if (!p.ring) {
      const Integers row = {p.pages.data, p.pages.wide, 1};
      page = clamp(load(row, b * p.pages_stride_b + j / p.page_size * p.pages.stride), 0, p.page_count - 1);
    }
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
};

// The row's place in q, out or lse, as an index.
__device__ inline std::int64_t row_at(const Strides& s, const Head& head, const Row& row) {
  return head.b * s.b + row.q_head * s.h + (head.q_first + row.token) * s.s;
}

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

  // The first of sequence b, of the tiles of one head: at most first(b + 1) - (those that b needs).
  __device__ static std::int64_t first(const AttentionParams& p, std::int64_t b) {
    return b == 0 ? 0 : clamp(load(p.q_begin, b), 0, p.total_q) * p.group / kRows + b;
  }
  // `tile` of those of one head.
  __device__ static Tile find(const AttentionParams& p, int head, int tile) {
    if (p.total_q < 0) {
      const auto hk = static_cast<int>(p.hk);
      return {head / hk, head % hk, std::int64_t{tile} * kRows};
    }
    std::int64_t low = 0, high = p.b;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (first(p, middle) <= tile ? low : high) = middle;
    }
    return {low, head, (tile - first(p, low)) * kRows};
  }
  // A tile's number, from what find() says of it.
  __device__ static std::int64_t number(const AttentionParams& p, std::int64_t b, std::int64_t hk, std::int64_t row) {
    if (p.total_q < 0) return (b * p.hk + hk) * tiles(p) + row / kRows;
    return hk * tiles(p) + first(p, b) + row / kRows;
  }
};

}  // namespace rapt::cuda
