// A validated call: every tensor with four strides, lengths on the host where they can be looked at. What backends run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

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
  // Ragged: [b + 1] first rows. Keys with lengths: [b]. Empty otherwise.
  std::vector<std::int64_t> q_begin, k_begin, k_lengths;
  // Paged: the page of key j of sequence i is pages[first_page[i] + j / page_size], for every key a row may see.
  std::vector<std::int32_t> pages;
  std::vector<std::int64_t> first_page;

  // On another device than the host, whose memory nobody can look at here: as given, with strides in [0] and [1], and
  // unchecked. The problem then has the largest sq and sk there can be. Bias and mask have so many rows and keys.
  int device = 0;
  Operand cu_seqlens_q, cu_seqlens_k, seqlens, block_table;
  std::int64_t pages_available = 0;
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
