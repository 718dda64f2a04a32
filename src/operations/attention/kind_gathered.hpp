// A list of keys for each query token.
#pragma once

#include <array>
#include <cstdint>

#include "operations/attention/kind.hpp"

namespace rapt {

template <>
struct KeyKind<KvSource::Kind::gathered> : KeyKindDefaults<KvSource::Kind::gathered> {
  static constexpr const char* rows = "b_or_one hk k_rows";
  template <class P>
  static constexpr std::array fields = {flag_field<P, &P::gathered>("gathered")};
  template <class A>
  static constexpr std::array arguments = {
      read<&rapt_attention_args::indices, &A::kv, &KvSource::indices>("kv.indices", kIntegers, "b sq n").in(bit, true),
      read<&rapt_attention_args::kv_counts, &A::kv, &KvSource::counts>("kv.counts", kIntegers, "b sq").in(bit),
  };
  static constexpr bool is(const AttentionProblem& p) { return p.gathered; }
  static void check_batch(const KvSource& kv, const Bound& bound);
  static void check_shapes(const KvSource& kv, Bound& bound);
  using KeyKindDefaults::fill;
  static void fill(const Bound&, AttentionProblem& p) { p.gathered = true; }
  static void fill(const AttentionProblem& p, std::int64_t, KvLayout& f) {
    f.page_size = 1, f.tokens = f.list_tokens = p.sq;
  }
  static void fill_tensors(const KvSource& kv, KvLayout& f);
  static void check(const AttentionProblem& p);
  static constexpr KeyRefusal refusal{"one for gathered keys",
                                      "none: a token attends to the keys of its list, all alike"};
  static constexpr bool has_gradients = true;
};

}  // namespace rapt
