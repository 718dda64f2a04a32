// Tests of keys that each query token has a list of.
#pragma once

#include "operations/attention/layout.hpp"

namespace rapt::testing {

template <>
struct KeyLayout<KvSource::Kind::gathered> : KeyLayoutDefaults {
  static bool is(const AttentionProblem& p) { return p.gathered; }
  static void undo(AttentionProblem& p) { p.gathered = false; }
  static KvSource make(const TensorView& k, const TensorView& v, const KeyIndices& i) {
    return KvSource::gathered(k, v, i.indices, i.counts);
  }
  template <class Given, class Choices>
  static void choose(Given& g, Choices& c, FuzzedKeys& keys, KvSource& kv) {
    const auto& [b, hk, sq, sk, d, dv, dtype] = keys;
    const std::int64_t n = c.below(6), entries = c.one_in(3) ? 1 : b;
    std::vector<std::int64_t> lists(static_cast<std::size_t>(b * sq * n));
    for (auto& row : lists) row = c.one_in(64) ? c.template raw<std::int32_t>() : c.below(static_cast<int>(sk) + 1) - 1;
    const auto counts = fuzzed_lengths(c, b * sq, n);
    const TensorView k = cache(g, c, entries, hk, sk, d, dtype), v = cache(g, c, entries, hk, sk, dv, dtype);
    kv = KvSource::gathered(k, v, as_rank(integers(g, c, lists), {b, sq, n}),
                            c.one_in(3) ? as_rank(integers(g, c, counts), {b, sq}) : TensorView());
    keys.sk = n;
  }
  static inputs::Slot slot(const KvSource&, std::int64_t, std::int64_t) { return {}; }  // listed_slots() has them
};

/// Gathers the keys, which goes with nothing that has positions.
inline void keep_no_positions(AttentionProblem& p) {
  const AttentionProblem none;
  p.gathered = true, p.kv_lengths = false, p.ragged_q = p.ragged_k = -1;
  p.causal = p.alibi = false, p.window_left = p.window_right = -1;
  p.align = none.align, p.align_offset = 0, p.bias = p.mask = none.kNone, p.bias_dtype = none.bias_dtype, p.dropout = 0;
}

/// Whether keys are those of a sequence, and not of a list for each token.
inline bool has_positions(const AttentionProblem& p) {
  return !p.gathered;
}
inline bool has_positions(const KvSource& kv) {
  return kv.kind != KvSource::Kind::gathered;
}

namespace inputs {

/// Of gathered keys, the rows that token i of sequence n attends to, in the order of its list.
inline std::vector<Slot> listed_slots(const KvSource& kv, std::int64_t n, std::int64_t i) {
  const std::int64_t count = kv.counts ? read_index(kv.counts, {n, i}) : kv.indices.shape[2];
  std::vector<Slot> slots;
  for (std::int64_t j = 0; j < count; ++j)
    if (const std::int64_t row = read_index(kv.indices, {n, i, j}); row >= 0) slots.push_back({n, row});
  return slots;
}

}  // namespace inputs
}  // namespace rapt::testing
