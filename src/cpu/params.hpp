// The POD border between the framework and the kernels. Kernels include this, registry.hpp, tile/ and isa/ only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rapt::cpu {

inline constexpr double kLog2e = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

// What an element of q, k, v or out is.
enum class Element : std::uint8_t { f32, bf16, f16 };

// Strides in elements of the dimensions b, h, s (rows) and d (inner). Ragged tensors have b = 0.
struct Strides {
  std::int64_t b, h, s, d;
};

// Everything between q.k and the softmax, in the log2 domain where it says so.
struct ScoreParams {
  float scale_log2;    // scale * log2(e)
  float softcap_log2;  // c * log2(e); 0 = none
  // Row i sees keys i + offset - left <= j <= i + offset + right; sides are open at kOpen. Causal is right = 0.
  std::int64_t left, right, offset;
  bool bottom_right;         // offset += len_k - len_q of the sequence
  const void* bias;          // [b, hq, sq, sk] with broadcast strides of 0, f32; null = none
  const std::uint8_t* mask;  // [b, hq, sq, sk] likewise, nonzero = attend; null = none
  Strides bias_stride, mask_stride;
  const float* alibi;  // [b, hq] slopes; null = none
  std::int64_t alibi_stride_b, alibi_stride_h;
  const float* sinks;  // [hq]; null = none
  std::int64_t sinks_stride;
};
inline constexpr std::int64_t kOpen = std::int64_t{1} << 53;

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
  const std::int64_t* q_begin;  // [b + 1] first row of each sequence, null = dense: sq rows each
  const std::int64_t* k_begin;  // [b + 1] likewise for keys
  const std::int64_t* k_len;    // [b] keys in use, null = sk (dense) or k_begin's
  std::int64_t hk, group, sq, sk, d, dv;
  ScoreParams score;
};

// A range of query rows of one kv head of one sequence.
struct WorkItem {
  std::int64_t b, hk, row_begin, row_end;
};

// What a kernel needs to know to size its scratch.
struct ForwardShape {
  std::int64_t sk, d, dv;  // sk of the longest sequence
  std::int64_t rows;       // most rows in a work item
};

}  // namespace rapt::cpu
