// Which keys the sequences of an attention call have, and whether those that rows see are there.
#pragma once

#include "operations/attention/params.hpp"
#include "operations/bound.hpp"
#include "rapt/attention.hpp"

namespace rapt {

// Steps of the table. Each throws Error for what shapes of the arguments before it cannot say: of k beside q, of scales
// beside k and v, and of lists of lengths and keys, from which `bound` gets sq and sk where no tensor has them.
void check_key_shapes(const KvSource& kv, const Bound& bound);
void check_scale_shapes(const KvSource& kv, const Bound& bound);
void check_lengths(const TensorView& cu_seqlens_q, const KvSource& kv, Bound& bound);
// Of a list of starts, the longest sequence, or on a device the most that it can be. Throws Error.
std::int64_t longest_sequence(const char* name, const TensorView& starts, const Bound& bound, std::int64_t total);

// What a problem says of the kind of keys of a call with these features, and what parameters do.
void fill_kind(unsigned features, const Bound& bound, AttentionProblem& problem);
void fill_layout(const AttentionProblem& problem, KvLayout& layout);
// The same of a cache by itself, whose sequences have `rows` of a page or their own, or have room for sk keys.
void fill_cache(unsigned features, std::int64_t rows, CacheProblem& problem);
void fill_layout(const CacheProblem& problem, std::int64_t sk, KvLayout& layout);
// Fills lengths, the block table and lists of keys into `params`. Their values are not read.
void fill_keys(const AttentionArgs& args, const AttentionProblem& p, AttentionParams& params);

// Throws Error where a row sees a key that is not there: overwritten, or in a page that is none. `params` has what
// scores become already. On a device, whose lengths and block tables are not read, only what shapes tell is checked.
void check_visible_keys(const AttentionProblem& p, const AttentionParams& params);

}  // namespace rapt
