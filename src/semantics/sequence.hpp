// The number of rows and keys of each sequence of a call, and where its keys are. The checker, the work list and the
// kernels of every backend use these functions.
//
// Lengths and block tables may change while a call runs and, on a GPU, may hold anything. They are clamped to the
// sizes of the tensors, so that no access is out of bounds.
#pragma once

#include "core/pod.hpp"

namespace rapt {

struct Lengths {
  std::int64_t b, sq, sk;         // rows and keys of each of b sequences, unless overridden below
  Integers q_begin;               // ragged queries: [b + 1] first row of each sequence, of total_q rows
  Integers k_begin;               // ragged keys, likewise of total_k
  Integers k_len;                 // [b] keys in use; null: all
  std::int64_t total_q, total_k;  // -1: dense
};

// Where key j of sequence i is. Dense and ragged keys are consecutive. Paged: row j % page_size of page pages[i, j /
// page_size], which is an index into the dimension of the strides' b. Ring: row j % page_size of batch entry i; only
// the last page_size keys exist.
//
// Gathered keys are pages of one row, found token by token. Each of the `tokens` query tokens of a batch entry is a
// sequence of one row; its key j is row pages[entry, token, j] of the entry's k and v.
struct KvLayout {
  std::int64_t page_size;  // 0: neither pages nor a ring; gathered: 1
  bool ring;
  Integers pages;  // [b, n]; gathered: rows of k, [entries, tokens, n]
  std::int64_t pages_stride_b, page_count;
  std::int64_t tokens, pages_stride_token;  // tokens: 0 unless keys are gathered
  std::int64_t list_tokens;                 // gathered: tokens, also where a backend turns lists into pages
  Integers counts;  // gathered: [entries, tokens] how many entries of each list count; null: all. Kernels see k_len
  std::int64_t counts_stride_b;
};

struct Sequence {
  // First row in ragged tensors, else 0. Gathered keys: the token, and the offset of its list in the entry's part of
  // the table.
  std::int64_t q_first, k_first;
  std::int64_t len_q, len_k;
  std::int64_t oldest;  // the first key that a ring still has; else 0
};

RAPT_HOST_DEVICE Sequence sequence_of(const Lengths& l, const KvLayout& kv, std::int64_t i) {
  Sequence s{0, 0, l.sq, l.sk, 0};
  if (l.q_begin) {
    s.q_first = clamp_to(l.q_begin[i], 0, l.total_q);
    s.len_q = clamp_to(l.q_begin[i + 1], s.q_first, l.total_q) - s.q_first;
  }
  if (l.k_begin) {
    s.k_first = clamp_to(l.k_begin[i], 0, l.total_k);
    s.len_k = clamp_to(l.k_begin[i + 1], s.k_first, l.total_k) - s.k_first;
  }
  if (l.k_len) s.len_k = clamp_to(l.k_len[i], 0, kv.ring ? kMaxSize : l.sk);
  if (kv.ring && s.len_k > kv.page_size) s.oldest = s.len_k - kv.page_size;
  return s;
}

// Whether all sequences of a call have the same lengths.
RAPT_HOST_DEVICE bool are_alike(const Lengths& l) {
  return !l.q_begin && !l.k_begin && !l.k_len;
}

// Of `count` keys that are written at once, the first that stays: of more than a ring has room for, the last ones do.
RAPT_HOST_DEVICE std::int64_t first_kept(const KvLayout& kv, std::int64_t count) {
  return kv.ring && count > kv.page_size ? count - kv.page_size : 0;
}

// The batch entry (index of the strides' b) of sequence i. It is i, except for gathered keys, where the function also
// sets the token of `s`.
RAPT_HOST_DEVICE std::int64_t entry_of(const KvLayout& kv, std::int64_t i, Sequence& s) {
  if (kv.tokens == 0) return i;
  s.q_first = i % kv.tokens, s.k_first = s.q_first * kv.pages_stride_token;
  return i / kv.tokens;
}

// The index of the strides' b for key j of sequence i: a page, or the sequence's own entry.
RAPT_HOST_DEVICE std::int64_t block_of(const KvLayout& kv, std::int64_t i, std::int64_t j) {
  if (kv.page_size == 0 || kv.ring) return i;
  const std::int64_t page = kv.pages.element(i * kv.pages_stride_b + j / kv.page_size * kv.pages.stride);
  return clamp_to(page, 0, kv.page_count - 1);
}

// Key j's row there.
RAPT_HOST_DEVICE std::int64_t row_in_block(const KvLayout& kv, std::int64_t j) {
  return kv.page_size > 0 ? j % kv.page_size : j;
}

// The row of k and v that element j of a list of gathered keys names; `i` is the batch entry.
RAPT_HOST_DEVICE std::int64_t listed_row(const KvLayout& kv, std::int64_t i, std::int64_t k_first, std::int64_t j) {
  const std::int64_t row = kv.pages.element(i * kv.pages_stride_b + k_first + j * kv.pages.stride);
  return clamp_to(row, 0, kv.page_count - 1);
}

// The index of key j's row in k or v, or in their scales, of sequence i (gathered keys: batch entry i) and kv head hk.
RAPT_HOST_DEVICE std::int64_t key_index(const KvLayout& kv, const Strides& s, std::int64_t i, std::int64_t hk,
                                        std::int64_t k_first, std::int64_t j) {
  if (kv.page_size == 0) return i * s.b + hk * s.h + (k_first + j) * s.s;
  if (kv.tokens > 0) return i * s.b + hk * s.h + listed_row(kv, i, k_first, j) * s.s;
  return block_of(kv, i, j) * s.b + hk * s.h + j % kv.page_size * s.s;
}

}  // namespace rapt
