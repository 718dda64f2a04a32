// What tests do with keys of any layout.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

#include "operations/attention/all_layouts.hpp"

namespace rapt::testing {

inline constexpr KvSource::Kind kKinds[] = {
#define RAPT_KV_KIND(name, NAME, value, text, positions) KvSource::Kind::name,
#include "rapt/kv_kinds.def"
};
/// Whether P, a problem or a CacheProblem, may have keys of this layout.
template <class L, class P>
inline constexpr bool kCanBe = requires(const P& p) {
  L::is(p);
};

/// Calls f with the layout of this kind.
template <class F>
void with_layout(KvSource::Kind kind, const F& f) {
  switch (kind) {
#define RAPT_KV_KIND(name, NAME, value, text, positions) \
  case KvSource::Kind::name:                             \
    return f(KeyLayout<KvSource::Kind::name>());
#include "rapt/kv_kinds.def"
  }
}
/// The kind of a problem's keys, or of a cache.
template <class P>
KvSource::Kind kind_of(const P& p) {
  KvSource::Kind found = KvSource::Kind::strided;
  for (const KvSource::Kind kind : kKinds)
    with_layout(kind, [&]<class L>(L) {
      if constexpr (kCanBe<L, P>) found = L::is(p) ? kind : found;
    });
  return found;
}
/// Calls f with the layout of a cache.
template <class F>
void with_cache(const CacheProblem& p, const F& f) {
  with_layout(kind_of(p), [&]<class L>(L layout) {
    if constexpr (kCanBe<L, CacheProblem>) f(layout);
  });
}

/// Lets the keys of a problem lie in blocks, now and then.
inline void sample_blocks(Random& random, AttentionProblem& p) {
  if (kind_of(p) != KvSource::Kind::strided) return;
  std::vector<KvSource::Kind> kinds;
  for (const KvSource::Kind kind : kKinds)
    with_layout(kind, [&]<class L>(L) {
      if (L::is_sampled) kinds.push_back(kind);
    });
  const auto choice = static_cast<std::size_t>(between(random, 0, std::ssize(kinds)));
  if (choice == kinds.size()) return;
  p.kv_lengths = true;
  with_layout(kinds[choice], [&]<class L>(L) {
    if constexpr (L::is_sampled) L::sample(random, p);
  });
}

inline bool lies_in_order(const AttentionProblem& p) {
  const KvSource::Kind kind = kind_of(p);
  return kind == KvSource::Kind::strided || kind == KvSource::Kind::ragged;
}
inline void lay_in_order(AttentionProblem& p) {
  static_cast<CacheProblem&>(p) = {};
  for (const KvSource::Kind kind : kKinds) with_layout(kind, [&]<class L>(L) { L::undo(p); });
}

/// Key lengths of the sequences of a case that has them.
inline Dims key_lengths(const AttentionProblem& p, std::uint64_t seed, std::mt19937_64 random) {
  Dims lengths(static_cast<std::size_t>(p.b), p.sk);
  // Without an alignment, scores that look at positions need equal lengths.
  const bool positions = p.causal || p.window_left >= 0 || p.window_right >= 0 || p.alibi;
  if (positions && p.align == AttentionProblem::Align::none) return lengths;
  const auto between = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (std::size_t n = 0; n < lengths.size(); ++n)
    with_layout(kind_of(p), [&]<class L>(L) { lengths[n] = L::length(p, (n + seed) % 4, between); });
  return lengths;
}

/// The row of key j in its sequence's entry of k, of sk rows, of keys that are neither paged nor gathered.
inline std::int64_t row_in_entry(const CacheProblem& p, std::int64_t sk, std::int64_t j) {
  std::int64_t row = 0;
  with_cache(p, [&]<class L>(L) { row = L::row(sk, j); });
  return row;
}

/// Keys that a sequence may have, `fresh` of them new, with room for sk; far more where there is room for any number.
inline std::int64_t max_keys_before(const CacheProblem& p, std::int64_t sk, std::int64_t fresh) {
  std::int64_t count = 0;
  with_cache(p, [&]<class L>(L) { count = L::max_keys(sk, fresh); });
  return count;
}
/// Of `fresh` keys that are written at once, the first that stays.
inline std::int64_t first_kept(const CacheProblem& p, std::int64_t sk, std::int64_t fresh) {
  std::int64_t first = 0;
  with_cache(p, [&]<class L>(L) { first = L::first_kept(sk, fresh); });
  return first;
}
inline KvCache cache_of(const CacheProblem& p, const MutableTensorView& k, const MutableTensorView& v,
                        const TensorView& block_table) {
  KvCache cache;
  with_cache(p, [&]<class L>(L) { cache = L::make_cache(k, v, block_table); });
  return cache;
}
inline KvSource source_of(const AttentionProblem& p, const TensorView& k, const TensorView& v, const KeyIndices& i) {
  KvSource kv;
  with_layout(kind_of(p), [&]<class L>(L) { kv = L::make(k, v, i); });
  return kv;
}

/// Keys of b sequences of sq rows by a fuzzer's choices (tests/fuzz/call.hpp); returns the sk that terms of scores must
/// have. A third of them are strided.
template <class Given, class Choices>
std::int64_t choose_layout(Given& g, Choices& c, KvSource& kv, std::int64_t b, std::int64_t hk, std::int64_t sq,
                           std::int64_t sk, std::int64_t d, std::int64_t dv, DType dtype) {
  FuzzedKeys keys{b, hk, sq, sk, d, dv, dtype};
  const auto choice = static_cast<std::size_t>(c.below(static_cast<int>(std::size(kKinds)) + 1));
  with_layout(choice + 1 < std::size(kKinds) ? kKinds[choice + 1] : kKinds[0],
              [&]<class L>(L) { L::choose(g, c, keys, kv); });
  return keys.sk;
}

namespace inputs {

inline Slot slot_of(const KvSource& kv, std::int64_t n, std::int64_t j) {
  Slot slot{};
  with_layout(kv.kind, [&]<class L>(L) { slot = L::slot(kv, n, j); });
  return slot;
}

/// The first of a sequence's keys that is there.
inline std::int64_t first_key(const KvSource& kv, std::int64_t len_k) {
  std::int64_t first = 0;
  with_layout(kv.kind, [&]<class L>(L) { first = L::first_key(kv, len_k); });
  return first;
}

}  // namespace inputs
}  // namespace rapt::testing
