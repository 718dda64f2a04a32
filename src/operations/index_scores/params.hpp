// What index_scores's kernels get: plain data, filled once, by validate().
#pragma once

#include "semantics/score.hpp"

namespace rapt {

struct IndexScoresParams : Lengths, KvLayout {
  const void* q;          // [b, sq, h, d]
  const void* k;          // [b, sk, d]
  const float* weights;   // [b, sq, h]
  const float* k_scale;   // [b, sk]; null: 1
  float* scores;          // [b, sq, sk]; null: not wanted
  std::int32_t* indices;  // [b, sq, n]; null: not wanted
  DType q_type, k_type;
  Strides q_stride, k_stride, weights_stride, k_scale_stride, scores_stride, indices_stride;
  Integers key_begin, key_end;  // [b, sq], whose rows are so far apart
  std::int64_t key_begin_stride_b, key_end_stride_b;
  std::int64_t h, d, topk;
  float scale;
  bool relu;
  ScoreParams score;  // what hides keys: causal and align
};

// The keys that query `token` of sequence i sees.
RAPT_HOST_DEVICE KeyRange visible_keys(const IndexScoresParams& p, std::int64_t i, const Sequence& s,
                                       std::int64_t token) {
  KeyRange keys = visible_keys(p.score, token, row_offset(p.score, s) + token, 0, s.len_k);
  const auto at = [&](const Integers& list, std::int64_t stride_b) __attribute__((always_inline)) {
    return clamp_to(list.element(i * stride_b + token * list.stride), 0, s.len_k);
  };
  if (p.key_begin) {
    const std::int64_t begin = at(p.key_begin, p.key_begin_stride_b);
    if (begin > keys.first) keys.first = begin;
  }
  if (p.key_end) {
    const std::int64_t end = at(p.key_end, p.key_end_stride_b);
    if (end < keys.last) keys.last = end;
  }
  if (keys.last < keys.first) keys.last = keys.first;
  return keys;
}

}  // namespace rapt
