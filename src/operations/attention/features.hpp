// The features of calls with keys, and the shapes that follow from them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "core/fields.hpp"
#include "operations/attention/kinds.hpp"
#include "operations/shape.hpp"
#include "rapt/attention_problem.hpp"
#include "rapt/kv_source.hpp"

namespace rapt {

struct KvFeatures : KvBits {
  static constexpr std::array<const char*, std::size(kinds)> names = {
#define RAPT_KV_KIND(name, NAME, value, text, positions) text,
#include "rapt/kv_kinds.def"
  };
  static constexpr const char* name_of(unsigned kind) {
    return names[static_cast<std::size_t>(std::countr_zero(kind))];
  }
  static unsigned of(KvSource::Kind kind, const char* argument, const char* wanted) {
    if (kind > last) throw Error(argument, "an unknown kind", wanted);
    return 1u << static_cast<unsigned>(kind);
  }
  // The kind of a problem's keys; of a CacheProblem, of its cache.
  template <class P>
  static constexpr unsigned of(const P& p) {
    unsigned kind = 0;
    KeyKinds::for_each([&]<class K>(K) {
      if constexpr (KeyKinds::can_be<K, P>) kind = K::is(p) ? K::bit : kind;
    });
    return kind;
  }
};

// Features of a call: the kind of its keys, and whether its queries are ragged.
struct AttentionFeatures : KvFeatures {
  static constexpr unsigned ragged_q = any + 1;
  static constexpr auto names = join(KvFeatures::names, std::array{"ragged queries"});

  static unsigned of(const KvSource& kv, const TensorView& cu_seqlens_q) {
    return KvFeatures::of(kv.kind, "kv", "one of KvSource's factories") | (cu_seqlens_q ? ragged_q : 0);
  }
  using KvFeatures::of;
  // Says of an argument that it does not go with keys of this kind.
  [[noreturn]] static void refuse(unsigned kind, const char* argument);
};

// Whether keys are those of a sequence, and not of a list for each token.
constexpr bool has_positions(const AttentionProblem& p) {
  return AttentionFeatures::of(p) & AttentionFeatures::positions;
}
// Whether no row may see a sequence's first keys.
constexpr bool may_start_late(const AttentionProblem& p) {
  return p.window_left >= 0 || AttentionFeatures::of(p) & AttentionFeatures::endless;
}

// Whether sequences of a call may differ in length.
inline bool has_lengths(const AttentionProblem& p) {
  return p.ragged_q >= 0 || p.ragged_k >= 0 || p.kv_lengths || !has_positions(p);
}

// The problem as plans and kernels see it: of gathered keys, each query token is a sequence of its own.
inline AttentionProblem in_sequences(AttentionProblem p) {
  if (!has_positions(p)) p.b *= p.sq, p.sq = std::min<std::int64_t>(p.sq, 1);
  return p;
}

// Of k and v before the size of a row, of any of these kinds.
constexpr Shapes key_shapes(unsigned kinds) {
  Shapes shapes("b hk sk");
  KeyKinds::visit(kinds, [&]<class K>(K) {
    if (K::rows != nullptr) shapes = shapes.when(K::bit, K::rows);
  });
  return shapes;
}

struct AttentionShapes {
  using Features = AttentionFeatures;
  static constexpr Shapes queries = Shapes("b hq sq").when(Features::ragged_q, "total_q hq");
  static constexpr Shapes keys = key_shapes(Features::any), cache = key_shapes(Features::caches);
  // Of pairs of a query and a key. Indices of ragged sequences are local, with room for the longest one.
  static constexpr Shapes pairs = Shapes("b? hq? sq? sk|1")
                                      .when(Features::ragged | Features::ragged_q, "b? hq? sq?> sk|1>")
                                      .when(Features::ragged, "b? hq? sq? sk|1>")
                                      .when(Features::ragged_q, "b? hq? sq?> sk|1");
};

}  // namespace rapt
