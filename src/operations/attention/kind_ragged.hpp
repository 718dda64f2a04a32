// Sequences of unequal length, laid end to end.
#pragma once

#include <array>

#include "operations/attention/kind.hpp"

namespace rapt {

template <>
struct KeyKind<KvSource::Kind::ragged> : KeyKindDefaults<KvSource::Kind::ragged> {
  static constexpr const char* rows = "total_k hk";
  template <class A>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::cu_seqlens_k, &A::kv, &KvSource::cu_seqlens>("kv.cu_seqlens", kIntegers, "b+1")
          .in(bit, true)};
  static constexpr bool is(const AttentionProblem& p) { return p.ragged_k >= 0; }
  static void check_shapes(const KvSource& kv, Bound& bound);
  using KeyKindDefaults::fill;
  static void fill(const Bound& bound, AttentionProblem& p);
  static constexpr bool has_gradients = true;
};

}  // namespace rapt
