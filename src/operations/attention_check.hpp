// The checks of an attention problem that are made again of tensors, whose lengths may differ.
#pragma once

#include <cstdint>
#include <string>

#include "rapt/attention_problem.hpp"

namespace rapt {

// Throws Error unless hq is a multiple of hk.
void check_heads(std::int64_t hq, std::int64_t hk);

// Whether positions matter and the call does not say how queries and keys line up.
bool needs_align(const AttentionProblem& problem);
[[noreturn]] void refuse_align(std::int64_t q, std::int64_t k, const std::string& where = "");

// Whether sequences of a call may differ in length.
inline bool has_lengths(const AttentionProblem& p) {
  return p.ragged_q >= 0 || p.ragged_k >= 0 || p.kv_lengths;
}

// Throws Error for scales or zeros that no cache of the type and head sizes has.
void check_scales(const char* name, DType dtype, std::int64_t size, std::int64_t groups);

}  // namespace rapt
