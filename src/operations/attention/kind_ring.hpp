// Rows that are written again and again: key j lies in row j % sk, and the last sk keys are there.
#pragma once

#include <array>
#include <cstdint>

#include "operations/attention/kind.hpp"

namespace rapt {

template <>
struct KeyKind<KvSource::Kind::ring> : KeyKindDefaults<KvSource::Kind::ring> {
  template <class P>
  static constexpr std::array fields = {flag_field<P, &P::ring>("ring")};
  static constexpr bool is(const CacheProblem& p) { return p.ring; }
  static std::int64_t max_keys(std::int64_t) { return kMaxSize; }
  using KeyKindDefaults::fill;
  static void fill(std::int64_t, CacheProblem& p) { p.ring = true; }
  static void fill(const CacheProblem&, std::int64_t sk, KvLayout& f) { f.page_size = sk, f.ring = true; }
  static void check(const AttentionProblem& p);
  static void check_visible(const AttentionProblem& p, const AttentionParams& params);
  static constexpr KeyRefusal refusal{"a tensor for keys in a ring", "none: positions there have no end"};
};

}  // namespace rapt
