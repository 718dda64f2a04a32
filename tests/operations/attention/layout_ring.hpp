// Tests of keys in a ring.
#pragma once

#include "operations/attention/layout.hpp"

namespace rapt::testing {

template <>
struct KeyLayout<KvSource::Kind::ring> : KeyLayoutDefaults {
  static bool is(const CacheProblem& p) { return p.ring; }
  static constexpr bool is_sampled = true;
  static void sample(Random& random, AttentionProblem& p) {
    p.ring = true;
    p.bias = p.mask = AttentionProblem::kNone;
    // Windows that leave room for a chunk: without one, causal rows of a ring that has gone round are refused.
    if (p.causal && p.align == AttentionProblem::Align::bottom_right && p.sq <= p.sk && one_in(random, 2))
      p.window_left = between(random, 0, p.sk - p.sq);
  }
  static std::int64_t row(std::int64_t sk, std::int64_t j) { return j % sk; }
  static std::int64_t max_keys(std::int64_t sk, std::int64_t) { return 7 * sk; }
  static std::int64_t first_kept(std::int64_t sk, std::int64_t fresh) { return std::max<std::int64_t>(0, fresh - sk); }

  /// Whether a ring still has every key that p.sq rows of a sequence of `length` see, by asking each of them.
  static bool has_all(const AttentionProblem& p, std::int64_t length) {
    const std::int64_t offset = p.align == AttentionProblem::Align::bottom_right ? length - p.sq
                                : p.align == AttentionProblem::Align::offset     ? p.align_offset
                                                                                 : 0;
    constexpr std::int64_t kFar = std::int64_t{1} << 60;  // further than any key
    const std::int64_t left = std::min(p.window_left, kFar), right = p.causal ? 0 : std::min(p.window_right, kFar);
    for (std::int64_t at = offset; at < offset + p.sq; ++at) {
      const std::int64_t end = right < 0 ? length : std::min(length, at + right + 1);
      const std::int64_t begin = std::max<std::int64_t>(0, left < 0 ? end - p.sk : at - left);
      if (begin < end && begin < length - p.sk) return false;
    }
    return true;
  }
  template <class Between>
  static std::int64_t length(const AttentionProblem& p, std::uint64_t choice, const Between& between) {
    const std::int64_t length = choice == 3   ? p.sk * 7 + between(0, p.sk)
                                : choice == 2 ? p.sk + between(1, p.sk)
                                              : KeyLayoutDefaults::length(p, choice, between);
    return has_all(p, length) ? length : p.sk;
  }
  static KvCache make_cache(const MutableTensorView& k, const MutableTensorView& v, const TensorView&) {
    return KvCache::ring(k, v);
  }
  static KvSource make(const TensorView& k, const TensorView& v, const KeyIndices& i) {
    return KvSource::ring(k, v, i.seqlens);
  }
  template <class Given, class Choices>
  static void choose(Given& g, Choices& c, FuzzedKeys& keys, KvSource& kv) {
    const auto& [b, hk, sq, sk, d, dv, dtype] = keys;
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(b));
    for (auto& length : lengths) length = c.one_in(8) ? c.template raw<std::int32_t>() : c.below(40);
    kv = KvSource::ring(cache(g, c, b, hk, sk, d, dtype), cache(g, c, b, hk, sk, dv, dtype), integers(g, c, lengths));
  }
  static inputs::Slot slot(const KvSource& kv, std::int64_t n, std::int64_t j) { return {n, j % kv.k.shape[2]}; }
  static std::int64_t first_key(const KvSource& kv, std::int64_t count) {
    return std::max<std::int64_t>(0, count - kv.k.shape[2]);
  }
};

}  // namespace rapt::testing
