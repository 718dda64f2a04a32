// The POD border between the framework and the kernels. Kernels include this, registry.hpp, tile/ and isa/ only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "score_params.hpp"

namespace rapt::cpu {

// How k or v is quantised: element i of a row counts as (x - zero[i / group]) * scale[i / group], where the rows of
// scale and zero are found like those of k or v, and strides.d is from group to group.
struct Quantization {
  const float* scale;  // null = 1
  const float* zero;   // null = 0
  Strides scale_stride, zero_stride;
  std::int64_t group;  // elements
};

// One attention_forward call. A query row is a (token, head of the group) pair: row r of kv head h is token r / group,
// query head h * group + r % group, so that GQA and short queries fill vector lanes too.
struct ForwardParams {
  const void* q;  // [b, hq, sq, d]
  const void* k;  // [b, hk, sk, d]
  const void* v;  // [b, hk, sk, dv]
  void* out;      // [b, hq, sq, dv]
  float* lse;     // [b, hq, sq]; null = not wanted
  Element q_type, kv_type, out_type;
  Strides q_stride, k_stride, v_stride, out_stride, lse_stride;
  Integers q_begin;  // [b + 1] first row of each sequence, null = dense: sq rows each
  Integers k_begin;  // [b + 1] likewise for keys
  Integers k_len;    // [b] keys in use, null = sk (dense) or k_begin's
  // Pages: key j of sequence b is row j % page_size of page pages[b, j / page_size], to which the strides' b leads; in
  // a ring it is row j % page_size of entry b, of which the last page_size keys are left.
  std::int64_t page_size;  // 0 = none
  bool ring;
  Integers pages;
  std::int64_t pages_stride_b;
  Quantization k_quant, v_quant;
  std::int64_t hk, group, sq, sk, d, dv;
  ScoreParams score;
};

// A range of query rows of one kv head of one sequence, and the keys they look at.
struct WorkItem {
  std::int64_t b, hk, row_begin, row_end;
  std::int64_t key_begin, key_end;  // key_end may lie past the sequence's length
  // Null: the rows are finished, and go to out and lse. Else they are states for attention_combine:
  // [row][state_floats].
  float* state;
  bool same_keys = false;  // the item before it in this scratch was of the same call, sequence and kv head
};

inline constexpr std::int64_t kMaxParts = 64;  // of a row's keys, each with a state of its own

// The state of a row over some of its keys: dv weighted sums of values, not yet divided; minus the softmax's reference;
// and the sum of weights relative to it (0 = no key seen), padded to whole lines. States lie as [kv head][range of
// rows][part][row]: a kernel writes rows, attention_combine reads parts and rows.
[[gnu::always_inline]] constexpr std::int64_t state_floats(std::int64_t dv) {
  return (dv + 2 + 15) / 16 * 16;
}

// What a kernel needs to know to size its scratch.
struct ForwardShape {
  std::int64_t sk, d, dv;  // sk of the longest sequence
  std::int64_t rows;       // most rows in a work item
};

}  // namespace rapt::cpu
