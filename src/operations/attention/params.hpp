// What attention's kernels get, on every backend: plain data, filled once, by validate().
#pragma once

#include "semantics/score.hpp"

namespace rapt {

// The last columns of keys, where the others are quantised and they are not. Rows are found like those of k.
struct KeyTail {
  const void* data;
  DType type;
  Strides stride;
  std::int64_t size;  // 0: none
};

// A query row is a (token, head of the group) pair: row r of kv head h is token r / group and query head
// h * group + r % group, so that GQA and short queries fill vector lanes and tiles, too.
struct AttentionParams : Lengths, KvLayout {
  const void* q;         // [b, hq, sq, d]
  const float* q_scale;  // [b, hq, sq], one for a row of f8e4m3 queries; null: 1
  const void* k;         // [b, hk, sk, d]
  const void* v;         // [b, hk, sk, dv]
  void* out;             // [b, hq, sq, dv]
  float* lse;            // [b, hq, sq]; null: not wanted
  DType q_type, kv_type, out_type;
  Strides q_stride, q_scale_stride, k_stride, v_stride, out_stride, lse_stride;
  Quantization k_quant, v_quant;
  KeyTail k_tail;  // what k has of a key's d columns is the others
  std::int64_t hk, group, d, dv;
  ScoreParams score;
};

// Whether rows of v are what rows of k begin with, before their scales and zeros, as in latent attention.
RAPT_HOST_DEVICE bool values_in_keys(const AttentionParams& p) {
  const Strides &k = p.k_stride, &v = p.v_stride;
  return p.v == p.k && v.b == k.b && v.h == k.h && v.s == k.s && v.d == k.d && p.dv <= p.d - p.k_tail.size;
}

}  // namespace rapt
