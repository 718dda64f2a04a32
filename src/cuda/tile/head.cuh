// Rows, keys and their memory: semantics/sequence.hpp and semantics/score.hpp for a kv head and a row, and how rows and
// keys are cut into tiles and blocks.
#pragma once

#include "cuda/tile/element.cuh"

namespace rapt::cuda {

// One kv head of one sequence. Keys [oldest, len_k) exist.
struct Head : Sequence {
  const AttentionParams& p;
  std::int64_t b, hk, offset;  // row 0 sits at key position `offset`

  __device__ Head(const AttentionParams& params, std::int64_t b, std::int64_t hk)
      : Head(params, b, hk, sequence_of(params, params, b)) {}
  __device__ Head(const AttentionParams& params, std::int64_t b, std::int64_t hk, const Sequence& sequence)
      : Sequence(sequence), p(params), b(b), hk(hk), offset(row_offset(params.score, sequence)) {}

  // The offset of key j's row in k or v.
  __device__ std::int64_t key_at(const Strides& s, std::int64_t j) const { return key_index(p, s, b, hk, k_first, j); }
};

// The offsets of a key's row of k or v: of its elements, scales, zeros and tail.
struct KvPlace {
  std::int64_t at, scale_at, zero_at, tail_at;
};

// k or v of any type, as the numbers that its elements or codes stand for.
struct KvSide {
  const void* data;
  DType type;
  const Strides& stride;
  const Quantization& quant;
  std::int64_t size, codes;  // columns; columns before the tail
  const KeyTail& tail;       // if codes < size

  __device__ static KvSide of_keys(const AttentionParams& p) {
    return {p.k, p.kv_type, p.k_stride, p.k_quant, p.d, p.d - p.k_tail.size, p.k_tail};
  }
  __device__ static KvSide of_values(const AttentionParams& p) {
    return {p.v, p.kv_type, p.v_stride, p.v_quant, p.dv, p.dv, p.k_tail};
  }

  __device__ KvPlace place(const Head& head, std::int64_t j) const {
    KvPlace row{head.key_at(stride, j), 0, 0, 0};
    if (quant.scale) row.scale_at = head.key_at(quant.scale_stride, j);
    if (quant.zero) row.zero_at = head.key_at(quant.zero_stride, j);
    if (codes < size) row.tail_at = head.key_at(tail.stride, j);
    return row;
  }
  // The number that a code of a row's n-th group stands for.
  __device__ float number(const KvPlace& row, std::int64_t n, float code) const {
    if (quant.zero) code -= quant.zero[row.zero_at + n * quant.zero_stride.d];
    return quant.scale ? code * quant.scale[row.scale_at + n * quant.scale_stride.d] : code;
  }
  // Column i of the tail.
  __device__ float of_tail(const KvPlace& row, std::int64_t i) const {
    return load(tail.data, tail.type, row.tail_at + i * tail.stride.d);
  }
  __device__ float element(const KvPlace& row, std::int64_t i) const {
    if (type == DType::f32 || type == DType::bf16 || type == DType::f16) return load(data, type, row.at + i * stride.d);
    if (i >= codes) return of_tail(row, i - codes);
    return number(row, i / quant.group, load_code(data, type, row.at, stride.d, i));
  }
};

// A key's row of k or v.
class KvRow {
 public:
  __device__ static KvRow of_key(const Head& head, std::int64_t j) { return {KvSide::of_keys(head.p), head, j}; }
  __device__ static KvRow of_value(const Head& head, std::int64_t j) { return {KvSide::of_values(head.p), head, j}; }
  __device__ float operator[](std::int64_t i) const { return side_.element(place_, i); }

 private:
  __device__ KvRow(const KvSide& side, const Head& head, std::int64_t j) : side_(side), place_(side.place(head, j)) {}

  KvSide side_;
  KvPlace place_;
};

// A query row, and the keys [first, last) that it sees.
struct Row {
  std::int64_t token, q_head, first, last;

  Row() = default;
  // Row r: a pair of token and head of the group.
  __device__ Row(const Head& head, std::int64_t r)
      : Row(head, r / head.p.group, head.hk * head.p.group + r % head.p.group) {}
  __device__ Row(const Head& head, std::int64_t token, std::int64_t q_head) : token(token), q_head(q_head) {
    const KeyRange keys = visible_keys(head.p.score, token, token + head.offset, head.oldest, head.len_k);
    first = keys.first, last = keys.last;
  }
  // nearest_key() of semantics/score.hpp.
  __device__ std::int64_t nearest(const Head& head) const { return nearest_key(token + head.offset, head.len_k); }
};

// Row r, with 32-bit divisions.
__device__ inline Row row_of(const Head& head, int r) {
  const unsigned group = static_cast<unsigned>(head.p.group), token = static_cast<unsigned>(r) / group;
  return Row(head, token, head.hk * group + (static_cast<unsigned>(r) - token * group));
}

// The offset in q, out or lse of a query head's row for a token.
__device__ inline std::int64_t row_at(const Strides& s, const Head& head, std::int64_t q_head, std::int64_t token) {
  return head.b * s.b + q_head * s.h + (head.q_first + token) * s.s;
}
__device__ inline std::int64_t row_at(const Strides& s, const Head& head, const Row& row) {
  return row_at(s, head, row.q_head, row.token);
}

// Which of `count` consecutive sequences contains `number`: the last one for which first(i), its beginning, is at most
// `number`. Empty sequences begin where the next one does.
template <class Number, class First>
__device__ Number sequence_at(Number number, Number count, First first) {
  Number low = 0, high = count;
  while (high - low > 1) {
    const Number middle = (low + high) / 2;
    (first(middle) <= number ? low : high) = middle;
  }
  return low;
}

// Pieces of kSize rows of consecutive ragged sequences, numbered so that each piece begins at its sequence's row 0. No
// sequence knows the lengths of all others, so there are more numbers than pieces: total / kSize + b.
template <int kSize>
struct Pieces {
  const Integers& begin;   // [b + 1]
  std::int64_t b, total;   // total: rows of all sequences
  std::int64_t group = 1;  // rows for each unit of `begin`

  // The first number of sequence i.
  __device__ std::int64_t first(std::int64_t i) const {
    return i == 0 ? 0 : clamp_to(begin[i], 0, total) * group / kSize + i;
  }
  // The sequence of a piece.
  __device__ std::int64_t sequence(std::int64_t number) const {
    return sequence_at(number, b, [&](std::int64_t i) { return first(i); });
  }
};

// A call's query rows in tiles of kRows rows of one head of one sequence: of a kv head, whose rows are the pairs of a
// token and a query head; or with kOfQueryHeads of a query head, whose rows are tokens. Tiles are numbered head by
// head; each dense sequence has heads of its own.
template <int kRows, bool kOfQueryHeads = false>
struct Tiling {
  struct Tile {
    std::int64_t b, head, row;
  };

  __host__ __device__ static std::int64_t heads(const AttentionParams& p) {
    return p.total_q >= 0 ? in_sequence(p) : p.b * in_sequence(p);
  }
  // The tiles of a head. For ragged calls an upper bound: tiles past a sequence's last row are empty.
  __host__ __device__ static std::int64_t tiles(const AttentionParams& p) {
    return p.total_q >= 0 ? p.total_q * rows_of_token(p) / kRows + p.b : ceil_div(p.sq * rows_of_token(p), kRows);
  }

  __device__ static Pieces<kRows> ragged(const AttentionParams& p) {
    return {p.q_begin, p.b, p.total_q, rows_of_token(p)};
  }
  // The head's tile number `tile`.
  __device__ static Tile find(const AttentionParams& p, int head, int tile) {
    if (p.total_q < 0) {
      const auto heads = static_cast<int>(in_sequence(p));
      return {head / heads, head % heads, std::int64_t{tile} * kRows};
    }
    const std::int64_t b = ragged(p).sequence(tile);
    return {b, head, (tile - ragged(p).first(b)) * kRows};
  }
  // The inverse of find(): a tile's number.
  __device__ static std::int64_t number(const AttentionParams& p, std::int64_t b, std::int64_t head, std::int64_t row) {
    if (p.total_q < 0) return (b * in_sequence(p) + head) * tiles(p) + row / kRows;
    return head * tiles(p) + ragged(p).first(b) + row / kRows;
  }

 private:
  __host__ __device__ static std::int64_t in_sequence(const AttentionParams& p) {
    return kOfQueryHeads ? p.hk * p.group : p.hk;
  }
  __host__ __device__ static std::int64_t rows_of_token(const AttentionParams& p) {
    return kOfQueryHeads ? 1 : p.group;
  }
};

template <int kRows>
using QueryHeadTiling = Tiling<kRows, true>;

// Keys in blocks of kKeys, cut at multiples of kKeys from key 0 of a sequence and numbered from the first block that
// has keys. Every sequence has at least one.
template <int kKeys>
struct Blocking {
  struct Block {
    std::int64_t b, hk, key;  // its first key
  };

  __host__ __device__ static std::int64_t heads(const AttentionParams& p) { return p.total_k >= 0 ? p.hk : p.b * p.hk; }
  // The blocks of one head. A ring may begin and end within a block.
  __host__ __device__ static std::int64_t blocks(const AttentionParams& p) {
    if (p.total_k >= 0) return p.total_k / kKeys + p.b;
    const std::int64_t count = ceil_div(p.sk, kKeys) + (p.ring ? 1 : 0);
    return count > 1 ? count : 1;
  }

  __device__ static Pieces<kKeys> ragged(const AttentionParams& p) { return {p.k_begin, p.b, p.total_k}; }
  // The first key of a sequence's first block.
  __device__ static std::int64_t origin(const Head& head) { return head.oldest / kKeys * kKeys; }
  // Block number `block` of all heads.
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
