// What append_kv's kernels get: plain data, filled once, by validate().
#pragma once

#include "semantics/sequence.hpp"

namespace rapt {

// New rows of k or v, or columns of them, and the part of the cache that they are written to.
struct AppendKvSide {
  const void* from;  // [b, hk, n, d], or ragged
  void* to;          // the cache, as KvLayout has it
  DType from_type, to_type;
  Strides from_stride, to_stride;
  float *scale, *zero;  // null: none
  Strides scale_stride, zero_stride;
  std::int64_t size;    // elements of a row
  std::int64_t group;   // elements that share a scale
  bool computes_scale;  // scale and zero are outputs, computed from each row; else inputs
};

struct AppendKvParams : KvLayout {
  AppendKvSide side[3];  // k; v, unless it is columns of k, and written with them; the tail of keys, if they have one
  int sides;
  Integers len_before;    // [b] keys of each sequence before the call
  Integers from_begin;    // ragged: [b + 1] first new row of each sequence
  std::int64_t b, hk, n;  // n: new rows of each sequence, unless they are ragged
  std::int64_t total;     // new rows of all sequences
  std::int64_t room;      // keys of a sequence; of rings their rows
};

// New rows of sequence i, and the first of them in the packed tensors.
struct NewRows {
  std::int64_t first, count;
};
RAPT_HOST_DEVICE NewRows new_rows(const AppendKvParams& p, std::int64_t i) {
  if (!p.from_begin) return {0, p.n};
  return {p.from_begin[i], p.from_begin[i + 1] - p.from_begin[i]};
}

}  // namespace rapt
