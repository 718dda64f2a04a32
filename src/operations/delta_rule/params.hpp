// What delta_rule's kernels get: plain data, filled once, by validate().
#pragma once

#include "core/pod.hpp"

namespace rapt {

// The rows of a tensor [b, t, h, d]; stride s leads from token to token. Ragged ones count as one sequence. Null: not
// given.
struct TokenRows {
  const void* data;
  DType type;
  Strides stride;

  RAPT_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// States [slots or b, h, d, dv].
struct StateRows {
  void* data;  // the initial one is not written; null: not given
  DType type;  // f32 or bf16
  std::int64_t slot_stride, head_stride, d_stride, dv_stride;

  RAPT_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  RAPT_HOST_DEVICE std::int64_t at(std::int64_t slot, std::int64_t head) const {
    return slot * slot_stride + head * head_stride;
  }
};

struct DeltaRuleParams {
  TokenRows q, k, v, g, beta, out;  // g and beta have strides of 0 where they do not vary
  StateRows initial, final;
  Integers begin;                // ragged: [b + 1] first token of each sequence
  Integers slots;                // [b], or [b, steps] with stride 1 along steps
  std::int64_t slots_stride_b;   // of [b, steps]
  Integers accepted;             // [b]
  std::int64_t slot_count;       // of the pools
  const float *a_log, *dt_bias;  // null: 0
  std::int64_t a_log_stride, dt_bias_stride_h, dt_bias_stride_d;
  std::int64_t b, t, total, h, q_group, k_group, v_group;  // state head i reads head i / group of k and v
  std::int64_t d, dv, steps;
  std::int64_t reads;  // query heads of a state head; state heads of a query head are q_group
  float scale, gate_lower_bound;
  bool has_delta, gate, is_gate_bounded, l2norm, beta_sigmoid, beta_double;
  Decay decay;
};

// Tokens [first, first + count) of sequence b, of the tensors' rows.
struct TokenRange {
  std::int64_t first, count;
};
RAPT_HOST_DEVICE TokenRange tokens_of(const DeltaRuleParams& p, std::int64_t b) {
  if (!p.begin) return {0, p.t};
  const std::int64_t first = clamp_to(p.begin[b], 0, p.total), end = clamp_to(p.begin[b + 1], first, p.total);
  return {first, clamp_to(end - first, 0, p.t)};
}
RAPT_HOST_DEVICE std::int64_t token_at(const Strides& stride, std::int64_t b, std::int64_t token, std::int64_t head) {
  return b * stride.b + token * stride.s + head * stride.h;
}
// A slot of sequence b that lies in the pool; -1: none.
RAPT_HOST_DEVICE std::int64_t slot_of(const DeltaRuleParams& p, std::int64_t b, std::int64_t step) {
  if (!p.slots) return b;
  const std::int64_t slot = p.slots.element(b * p.slots_stride_b + step * p.slots.stride);
  return slot >= 0 && slot < p.slot_count ? slot : -1;
}
// Where sequence b starts from.
RAPT_HOST_DEVICE std::int64_t initial_slot(const DeltaRuleParams& p, std::int64_t b) {
  return slot_of(p, b, p.accepted ? clamp_to(p.accepted[b], 1, p.steps) - 1 : 0);
}

}  // namespace rapt
