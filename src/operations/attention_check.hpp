// The checks of an attention problem that are made again of tensors, whose lengths may differ.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/attention_params.hpp"
#include "rapt/attention.hpp"

namespace rapt {

// The fields of an attention problem's text, and what they leave open: operations that differentiate it have more.
std::span<const Field<AttentionProblem>> attention_fields();
void complete(const Words& words, AttentionProblem& problem);

// Throws Error unless hq is a multiple of hk.
void check_heads(std::int64_t hq, std::int64_t hk);

// Whether positions matter and the call does not say how queries and keys line up.
bool needs_align(const AttentionProblem& problem);
[[noreturn]] void refuse_align(std::int64_t q, std::int64_t k, const std::string& where = "");

// Whether sequences of a call may differ in length.
inline bool has_lengths(const AttentionProblem& p) {
  return p.ragged_q >= 0 || p.ragged_k >= 0 || p.kv_lengths;
}

// The strides of b, h, s and d of [b, h, s, d] or ragged [total, h, d]; without `has_elements` of tensors like lse,
// that have no d.
Strides row_strides(const Layout& t, bool ragged, bool has_elements);

// validate() of a forward whose out and lse are inputs, but for overlaps: fills `params` and adds every tensor to
// `all`.
AttentionProblem check_forward(const AttentionArgs& args, AttentionParams& params, std::vector<Checked>& all);
// Throws Error for what is no share of weights to drop.
void check_dropout(const char* name, float p);

// Throws Error for scales or zeros that no cache of the type and head sizes has.
void check_scales(const char* name, DType dtype, std::int64_t size, std::int64_t groups);

}  // namespace rapt
