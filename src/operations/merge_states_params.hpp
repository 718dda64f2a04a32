// What merge_states's kernels get: plain data, filled once, by validate().
#pragma once

#include "core/pod.hpp"

namespace rapt {

// Attention over some of the keys. The stride d of `out` leads from element to element.
struct AttentionState {
  const void* out;
  DType out_type;
  Strides out_stride;
  const float* lse;
  Strides lse_stride;
};

struct MergeStatesParams {
  const AttentionState* states;  // [count]
  std::int64_t count;
  void* out;
  DType out_type;
  Strides out_stride;
  float* lse;  // null: not wanted
  Strides lse_stride;
  std::int64_t b, h, s, dv;  // b * h * s rows
};

// The index of a row, of b * h * s in this order.
RAPT_HOST_DEVICE std::int64_t row_index(const MergeStatesParams& p, const Strides& stride, std::int64_t row) {
  return row / (p.h * p.s) * stride.b + row / p.s % p.h * stride.h + row % p.s * stride.s;
}

}  // namespace rapt
