// What rotary_append_kv's kernels get: plain data, filled once, by validate().
#pragma once

#include "operations/append_kv/params.hpp"

namespace rapt {

// Rows of q, or of keys, and where they go once they are rotated.
struct RotarySide {
  const void* from;  // [b, heads, n, d], or ragged
  void* to;          // null: to the cache
  DType from_type, to_type;
  Strides from_stride, to_stride;
  const void* norm;  // [d]; null: none
  DType norm_type;
  std::int64_t norm_stride;
  std::int64_t heads;
};

struct RotaryAppendKvParams : AppendKvParams {
  RotarySide q, k;  // q has 0 heads if there is none
  // Of each part of the cache: the column of keys that it begins with; -1: it has values.
  std::int64_t key_column[3];
  const void *cos, *sin;  // [positions, r], or [b, rows, r]
  DType table_type;
  Strides cos_stride, sin_stride;  // s: from position to position, or from row to row
  Integers positions;              // null: they follow from len_before, or the tables have a row for each new row
  std::int64_t positions_stride_b;
  std::int64_t position_count;            // 0: a row for each new row
  std::int64_t d, rotary, rotary_offset;  // channels of a row; those that are rotated, and the first of them
  bool half_tables, interleaved, norm_plus_one;
  float norm_eps;
};

// Of row t of sequence i, whose first row in ragged tensors is `first`: the rows of cos and sin.
struct AngleRows {
  std::int64_t cos, sin;
};
RAPT_HOST_DEVICE std::int64_t position_of(const RotaryAppendKvParams& p, std::int64_t i, std::int64_t t,
                                          std::int64_t first) {
  return p.positions ? p.positions.element(i * p.positions_stride_b + (first + t) * p.positions.stride)
                     : p.len_before[i] + t;
}
RAPT_HOST_DEVICE AngleRows angle_rows(const RotaryAppendKvParams& p, std::int64_t i, std::int64_t t,
                                      std::int64_t first) {
  if (p.position_count == 0)
    return {i * p.cos_stride.b + (first + t) * p.cos_stride.s, i * p.sin_stride.b + (first + t) * p.sin_stride.s};
  const std::int64_t at = clamp_to(position_of(p, i, t, first), 0, p.position_count - 1);
  return {at * p.cos_stride.s, at * p.sin_stride.s};
}

// The two channels of pair n, and their places in a row of cos and sin.
struct Pair {
  std::int64_t channel[2], angle[2];
};
RAPT_HOST_DEVICE Pair pair_of(const RotaryAppendKvParams& p, std::int64_t n) {
  const std::int64_t half = p.rotary / 2, first = p.interleaved ? 2 * n : n,
                     second = p.interleaved ? 2 * n + 1 : n + half;
  return {{p.rotary_offset + first, p.rotary_offset + second}, {p.half_tables ? n : first, p.half_tables ? n : second}};
}

}  // namespace rapt
