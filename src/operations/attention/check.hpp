// The checks of attention that several files or operations make.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/fields.hpp"
#include "operations/attention/features.hpp"
#include "operations/attention/params.hpp"
#include "operations/bound.hpp"
#include "rapt/attention.hpp"

namespace rapt {

// The fields of an attention problem's text, and what they leave open: operations that differentiate it have more.
std::span<const Field<AttentionProblem>> attention_fields();
void complete(const Words& words, AttentionProblem& problem);

// Fills what `score` asks for into `p` and `params`, which have the sizes and lengths already. Throws Error.
void fill_score(const ScoreSpec& score, AttentionProblem& p, AttentionParams& params);

// Throws Error for keys of two kinds, and for what does not go with keys of this one; for modifiers that do not; and
// for sizes and lengths that such keys do not have.
void check_kind(const AttentionProblem& problem);
void check_modifiers(const AttentionProblem& problem);
void check_key_lengths(const AttentionProblem& problem);
// Throws Error for a cache of two kinds, the argument `kind`, and for pages of k that sk is not made of.
void check_cache(const CacheProblem& problem, std::int64_t sk, const char* k, const char* kind);

// A tensor for pairs of a query and a key, right-aligned as [b, hq, sq, sk]: its sizes, 1 for dimensions that are
// missing, and the steps along those of other sizes.
struct Pairs {
  std::int64_t size[4] = {1, 1, 1, 1}, step[4] = {};

  explicit Pairs(const Layout& t);
};

// Throws Error unless hq is a multiple of hk.
void check_heads(std::int64_t hq, std::int64_t hk);

// What a problem says of `align`, the argument `name`.
void set_align(const std::optional<Align>& align, const char* name, AttentionProblem::Align& kind,
               std::int64_t& offset);
// Whether positions matter and the call does not say how queries and keys line up.
bool needs_align(const AttentionProblem& problem);
// `need`: of what, behind the ways to say it.
[[noreturn]] void refuse_align(const char* name, std::int64_t q, std::int64_t k, const std::string& where,
                               const char* need = " for causal, window and alibi");

// The strides of b, h, s and d of [b, h, s, d] or ragged [total, h, d]; without `has_elements` of tensors like lse,
// that have no d.
Strides row_strides(const Layout& t, bool ragged, bool has_elements);

// Throws Error for what is no share of weights to drop.
void check_dropout(const char* name, float p);

// Throws Error for a tail of keys of size d, columns in a tensor of their own, that no cache of the type has.
void check_tail(std::string_view name, DType dtype, std::int64_t d, std::int64_t tail, DType tail_dtype);

// Throws Error for scales that no cache of the type and head dimensions has.
void check_scales(std::string_view name, DType dtype, std::int64_t size, std::int64_t groups);

}  // namespace rapt
