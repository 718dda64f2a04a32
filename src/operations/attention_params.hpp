// What attention's kernels get, on every backend: plain data, filled once, by validate().
#pragma once

#include "semantics/score.hpp"

namespace rapt {

// A query row is a (token, head of the group) pair: row r of kv head h is token r / group and query head
// h * group + r % group, so that GQA and short queries fill vector lanes and tiles, too.
struct AttentionParams : Lengths, KvLayout {
  const void* q;  // [b, hq, sq, d]
  const void* k;  // [b, hk, sk, d]
  const void* v;  // [b, hk, sk, dv]
  void* out;      // [b, hq, sq, dv]
  float* lse;     // [b, hq, sq]; null: not wanted
  DType q_type, kv_type, out_type;
  Strides q_stride, k_stride, v_stride, out_stride, lse_stride;
  Quantization k_quant, v_quant;
  std::int64_t hk, group, d, dv;
  ScoreParams score;
};

}  // namespace rapt
