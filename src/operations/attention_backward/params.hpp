// What attention_backward's kernels get: plain data, filled once, by validate().
#pragma once

#include "operations/attention/params.hpp"

namespace rapt {

// A gradient that is written; null: not wanted.
struct Gradient {
  void* data;
  DType type;
  Strides stride;

  RAPT_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// The forward's parameters, of which out and lse are inputs here.
struct AttentionBackwardParams : AttentionParams {
  const void* dout;   // as out
  const float* dlse;  // as lse; null: 0
  DType dout_type;
  Strides dout_stride, dlse_stride;
  float scale;  // not in the log2 domain
  std::int64_t hq;
  Gradient grad_q, grad_k, grad_v;
  Gradient grad_bias;                                               // summed over dimensions of size 1
  std::int64_t grad_bias_b, grad_bias_h, grad_bias_q, grad_bias_k;  // its sizes
  Gradient grad_sinks, grad_alibi;  // [hq]; [hq] or [b, hq], summed over b where the stride is 0
  std::int64_t pools;  // gathered: entries of k, each of page_count rows, which lists of so many sequences choose from
};

}  // namespace rapt
