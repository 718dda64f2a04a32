// Tests of keys in a tensor for every sequence.
#pragma once

#include "operations/attention/layout.hpp"

namespace rapt::testing {

template <>
struct KeyLayout<KvSource::Kind::strided> : KeyLayoutDefaults {
  static bool is(const CacheProblem&) { return true; }  // unless they lie otherwise, too
  static KvCache make_cache(const MutableTensorView& k, const MutableTensorView& v, const TensorView&) {
    return KvCache::strided(k, v);
  }
  static KvSource make(const TensorView& k, const TensorView& v, const KeyIndices& i) {
    return KvSource::strided(k, v, i.seqlens);
  }
  template <class Given, class Choices>
  static void choose(Given& g, Choices& c, FuzzedKeys& keys, KvSource& kv) {
    const auto& [b, hk, sq, sk, d, dv, dtype] = keys;
    const auto lengths = fuzzed_lengths(c, b, sk);
    kv = KvSource::strided(cache(g, c, b, hk, sk, d, dtype), cache(g, c, b, hk, sk, dv, dtype),
                           c.one_in(3) ? integers(g, c, lengths) : TensorView());
  }
  static inputs::Slot slot(const KvSource&, std::int64_t n, std::int64_t j) { return {n, j}; }
};

}  // namespace rapt::testing
