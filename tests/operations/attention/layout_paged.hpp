// Tests of keys in pages.
#pragma once

#include "operations/attention/layout.hpp"

namespace rapt::testing {

template <>
struct KeyLayout<KvSource::Kind::paged> : KeyLayoutDefaults {
  static bool is(const CacheProblem& p) { return p.page_size > 0; }
  static constexpr bool is_sampled = true;
  static void sample(Random& random, AttentionProblem& p) {
    p.page_size = pick(random, {1, 2, 5, 16, 17, 64, 128});
    p.sk = (p.sk + p.page_size - 1) / p.page_size * p.page_size;
    const bool positions = p.causal || p.window_left >= 0 || p.window_right >= 0 || p.alibi;
    if (positions && p.align == AttentionProblem::Align::none) p.sq = p.sk;
  }
  static KvCache make_cache(const MutableTensorView& k, const MutableTensorView& v, const TensorView& table) {
    return KvCache::paged(k, v, table);
  }
  static KvSource make(const TensorView& k, const TensorView& v, const KeyIndices& i) {
    return KvSource::paged(k, v, i.block_table, i.seqlens);
  }
  template <class Given, class Choices>
  static void choose(Given& g, Choices& c, FuzzedKeys& keys, KvSource& kv) {
    const std::int64_t page_size = 1 + c.below(4), columns = c.below(4), pages = 1 + c.below(5);
    keys.sk = page_size * columns;
    std::vector<std::int64_t> table(static_cast<std::size_t>(keys.b * columns));
    for (auto& page : table) page = c.one_in(32) ? c.below(16) - 8 : c.below(static_cast<int>(pages));
    const auto lengths = fuzzed_lengths(c, keys.b, keys.sk);
    kv = KvSource::paged(cache(g, c, pages, keys.hk, page_size, keys.d, keys.dtype),
                         cache(g, c, pages, keys.hk, page_size, keys.dv, keys.dtype),
                         as_rank(integers(g, c, table), {keys.b, columns}), integers(g, c, lengths));
  }
  static inputs::Slot slot(const KvSource& kv, std::int64_t n, std::int64_t j) {
    const std::int64_t page_size = kv.k.shape[2];
    return {inputs::read_index(kv.block_table, {n, j / page_size}), j % page_size};
  }
};

}  // namespace rapt::testing
