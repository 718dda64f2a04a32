#include "operations/attention/kind_gathered.hpp"

#include <string>
#include <utility>

#include "core/span.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/operation.hpp"

namespace rapt {

using Gathered = KeyKind<KvSource::Kind::gathered>;

void Gathered::check_batch(const KvSource& kv, const Bound& bound) {
  if (const std::int64_t b = bound[attention_dimension("b")]; kv.k.shape[0] != 1 && kv.k.shape[0] != b)
    throw Error("k", "shape " + shape_text(kv.k), "1, or q's batch b = " + std::to_string(b));
}

void Gathered::check_shapes(const KvSource&, Bound& bound) {
  bound.derive(attention_dimension("sk"), bound[attention_dimension("n")]);
}

void Gathered::fill_tensors(const KvSource& kv, KvLayout& f) {
  f.pages = integers_of(kv.indices, 2);
  f.pages_stride_b = kv.indices.strides[0], f.pages_stride_token = kv.indices.strides[1];
  f.page_count = kv.k.shape[2];
  if (kv.counts) f.counts = integers_of(kv.counts, 1), f.counts_stride_b = kv.counts.strides[0];
}

// Keys have no positions but those in a list: what counts on others is refused by its name.
void Gathered::check(const AttentionProblem& p) {
  if (p.ragged_q >= 0) throw Error("cu_seqlens_q", "ragged queries with gathered keys", "[b, hq, sq, d] queries");
  if (p.kv_lengths) throw Error("kv", "gathered keys with lengths", "one kind of keys");
  for (const auto& [name, given] : {std::pair{"score.causal", p.causal},
                                    {"score.window", p.window_left >= 0 || p.window_right >= 0},
                                    {"score.align", p.align != AttentionProblem::Align::none}})
    if (given) AttentionFeatures::refuse(bit, name);
  check_modifiers(p);
}

}  // namespace rapt
