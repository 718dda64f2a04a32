// Tests of keys whose sequences are laid end to end.
#pragma once

#include "operations/attention/layout.hpp"

namespace rapt::testing {

template <>
struct KeyLayout<KvSource::Kind::ragged> : KeyLayoutDefaults {
  static bool is(const AttentionProblem& p) { return p.ragged_k >= 0; }
  static KvSource make(const TensorView& k, const TensorView& v, const KeyIndices& i) {
    return KvSource::ragged(k, v, i.cu_seqlens);
  }
  template <class Given, class Choices>
  static void choose(Given& g, Choices& c, FuzzedKeys& keys, KvSource& kv) {
    const auto rows = borders(c, keys.b);
    const std::int64_t half = keys.dtype == DType::i4x2 ? 2 : 1;
    kv = KvSource::ragged(floats(g, c, {rows.back(), keys.hk, keys.d / half}, keys.dtype),
                          floats(g, c, {rows.back(), keys.hk, keys.dv / half}, keys.dtype), integers(g, c, rows));
    keys.sk = 5;
  }
  static inputs::Slot slot(const KvSource& kv, std::int64_t n, std::int64_t j) {
    return {inputs::read_index(kv.cu_seqlens, {n}) + j, 0};
  }
};

}  // namespace rapt::testing
