// A validated call: every tensor with four strides. What backends run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "rapt/attention.hpp"
#include "rapt/problem.hpp"
#include "score_params.hpp"

namespace rapt {

// Pointer and strides in elements of dimensions b, h, s, d; broadcast or ragged dimensions have stride 0.
struct Operand {
  void* data = nullptr;  // never written through unless it is out or lse
  DType dtype = DType::f32;
  std::array<std::int64_t, 4> strides{};
};

struct Call {
  Problem problem;
  float scale = 0;                                      // the default filled in
  Operand q, k, v, out, lse, bias, mask, alibi, sinks;  // paged k and v: strides[0] is from page to page
  // Indexed like k and v, but groups for d; no data: none.
  Operand k_scale, v_scale, k_zero, v_zero;
  // In device memory these are unchecked, and the problem has the largest sq and sk that there can be.
  Integers q_begin{}, k_begin{};  // ragged: [b + 1] first rows
  Integers k_len{};               // [b] keys in use
  Integers pages{};               // paged: [b, n]; key j of sequence i is in page [i, j / page_size]
  std::int64_t pages_stride_b = 0, page_count = 0;

  int device = 0;
  // Bias and mask have so many rows and keys.
  std::int64_t term_rows = std::numeric_limits<std::int64_t>::max(), term_keys = term_rows;
};

// Checks everything contract.md lists under bad input. Throws Error; writes nothing. `workspace` is the caller's, if
// any.
Call validate(const AttentionArgs& args, std::span<const std::byte> workspace = {});

// What kernels take of it.
Element element_of(DType dtype);
Strides strides(const Operand& operand);
ScoreParams score_params(const Call& call);

// The checks that need no tensors: sizes, head counts, windows, scale, alignment.
void check(const Problem& problem);

}  // namespace rapt
