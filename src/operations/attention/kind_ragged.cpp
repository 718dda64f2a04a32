#include "operations/attention/kind_ragged.hpp"

#include "core/span.hpp"
#include "operations/attention/operation.hpp"
#include "operations/call.hpp"

namespace rapt {

using Ragged = KeyKind<KvSource::Kind::ragged>;

void Ragged::check_shapes(const KvSource& kv, Bound& bound) {
  bound.derive(attention_dimension("sk"),
               longest_sequence("kv.cu_seqlens", kv.cu_seqlens, bound, bound[attention_dimension("total_k")]));
}

void Ragged::fill(const Bound& bound, AttentionProblem& p) {
  p.ragged_k = bound[attention_dimension("total_k")];
}

}  // namespace rapt
