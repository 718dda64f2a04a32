// The POD border between the framework and the CUDA kernels, passed to them by value.
#pragma once

#include <cstdint>

#include "rapt/types.hpp"
#include "score_params.hpp"

namespace rapt::cuda {

// One attention call; every pointer leads to device memory. A query row is a (token, head of the group) pair: row r of
// kv head h is token r / group, query head h * group + r % group.
struct AttentionParams {
  const void* q;  // [b, hq, sq, d]
  const void* k;  // [b, hk, sk, d]
  const void* v;  // [b, hk, sk, dv]
  void* out;      // [b, hq, sq, dv]
  float* lse;     // [b, hq, sq]; null = not wanted
  DType q_type, kv_type, out_type;
  Strides q_stride, k_stride, v_stride, out_stride, lse_stride;
  Integers q_begin;               // ragged: [b + 1] first row of each sequence
  Integers k_begin;               // [b + 1] likewise for keys
  Integers k_len;                 // [b] keys in use; none = sk (dense) or k_begin's
  std::int64_t total_q, total_k;  // ragged: rows in all; -1 = dense
  // Pages: key j of sequence b is row j % page_size of page pages[b, j / page_size], to which the strides' b leads; in
  // a ring it is row j % page_size of entry b, of which the last page_size keys are left.
  std::int64_t page_size;  // 0 = none
  bool ring;
  Integers pages;
  std::int64_t pages_stride_b, page_count;
  std::int64_t b, hk, group, sq, sk, d, dv;
  std::int64_t term_rows, term_keys;  // bias and mask have no more; what lies past them is masked
  ScoreParams score;
};

}  // namespace rapt::cuda
