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

// A row's position, of b * h * s in this order, and its index.
struct RowPosition {
  std::int64_t b, h, s;
};
RAPT_HOST_DEVICE RowPosition position_of(const MergeStatesParams& p, std::int64_t row) {
  return {row / (p.h * p.s), row / p.s % p.h, row % p.s};
}
RAPT_HOST_DEVICE std::int64_t row_index(const Strides& stride, const RowPosition& at) {
  return at.b * stride.b + at.h * stride.h + at.s * stride.s;
}

}  // namespace rapt
