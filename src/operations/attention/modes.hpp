// The kinds of keys: what the shapes of attention's arguments depend on, the words of problems, and what does not go
// with each.
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
#include "operations/arguments.hpp"
#include "operations/shape.hpp"
#include "rapt/attention_problem.hpp"
#include "rapt/kv_source.hpp"

namespace rapt {

struct KvKinds {
  enum class Positions : std::uint8_t { consecutive, packed, blocks, endless, none };
  struct Kind {
    unsigned mode;
    Positions positions;
  };
  static constexpr Kind kinds[] = {
#define RAPT_KV_KIND(name, NAME, value, text, positions) {1u << value, Positions::positions},
#include "rapt/kv_kinds.def"
  };
  static constexpr auto last = static_cast<KvSource::Kind>(std::size(kinds) - 1);

  static constexpr unsigned with(Positions positions) {
    unsigned modes = 0;
    for (const Kind& kind : kinds) modes |= kind.positions == positions ? kind.mode : 0;
    return modes;
  }
};

// The kinds as bits of modes, and which have what in common.
struct KvModes : KvKinds {
#define RAPT_KV_KIND(name, NAME, value, text, positions) static constexpr unsigned name = 1u << value;
#include "rapt/kv_kinds.def"
  static constexpr unsigned any = (1u << std::size(kinds)) - 1, endless = with(Positions::endless);
  static constexpr unsigned consecutive = with(Positions::consecutive) | with(Positions::packed);
  // Keys that have a position in a sequence, which starts at the first of them.
  static constexpr unsigned sequences = consecutive | with(Positions::blocks);
  static constexpr unsigned positions = sequences | endless;
  static constexpr unsigned lists = with(Positions::none);
  // Those with room for more keys.
  static constexpr unsigned caches = positions & ~with(Positions::packed);

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
  // The kind of a problem's cache.
  static constexpr unsigned of(const CacheProblem& p) {
    return p.ring ? ring : p.page_size > 0 ? paged : strided;
  }
};

// Words of the kinds of caches.
template <class P>
constexpr std::array cache_fields = {
    Field<P>{"page", false,
             [](const P& p, std::string_view key, std::string& text) {
               if (p.page_size != 0) print_word(text, key, std::to_string(p.page_size));
             },
             [](P& p, const Word& word) {
               p.page_size = word.integer();
               if (p.page_size == 0) word.refuse("pages of 1 row or more");
             }},
    flag_field<P, &P::ring>("ring"),
};

// Modes of a call: the kind of its keys, and whether its queries are ragged.
struct AttentionModes : KvModes {
  static constexpr unsigned ragged_q = any + 1;
  static constexpr auto names = join(KvModes::names, std::array{"ragged queries"});

  static unsigned of(const KvSource& kv, const TensorView& cu_seqlens_q) {
    return KvModes::of(kv.kind, "kv", "one of KvSource's factories") | (cu_seqlens_q ? ragged_q : 0);
  }
  // The kind of a problem's keys.
  static constexpr unsigned of(const AttentionProblem& p) {
    const unsigned cache = KvModes::of(p);
    return p.gathered ? gathered : cache != strided ? cache : p.ragged_k >= 0 ? ragged : strided;
  }
  // Says of an argument that it does not go with keys of this kind.
  [[noreturn]] static void refuse(unsigned kind, const char* argument);
  static constexpr auto fields =
      join(cache_fields<AttentionProblem>,
           std::array{flag_field<AttentionProblem, &AttentionProblem::gathered>("gathered")});
};

// Whether keys are those of a sequence, and not of a list for each token.
constexpr bool has_positions(const AttentionProblem& p) {
  return AttentionModes::of(p) & AttentionModes::positions;
}

// Whether sequences of a call may differ in length.
inline bool has_lengths(const AttentionProblem& p) {
  return p.ragged_q >= 0 || p.ragged_k >= 0 || p.kv_lengths || p.gathered;
}

// The problem as plans and kernels see it: of gathered keys, each query token is a sequence of its own.
inline AttentionProblem in_sequences(AttentionProblem p) {
  if (p.gathered) p.b *= p.sq, p.sq = std::min<std::int64_t>(p.sq, 1);
  return p;
}

struct AttentionShapes {
  using M = AttentionModes;
  static constexpr Shapes queries = Shapes("b hq sq").when(M::ragged_q, "total_q hq");
  static constexpr Shapes keys = Shapes("b hk sk")
                                     .when(M::ragged, "total_k hk")
                                     .when(M::paged, "pages hk page_size")
                                     .when(M::gathered, "b_or_one hk k_rows");
  // Of pairs of a query and a key. Indices of ragged sequences are local, with room for the longest one.
  static constexpr Shapes pairs = Shapes("b? hq? sq? sk|1")
                                      .when(M::ragged | M::ragged_q, "b? hq? sq?> sk|1>")
                                      .when(M::ragged, "b? hq? sq? sk|1>")
                                      .when(M::ragged_q, "b? hq? sq?> sk|1");
};

}  // namespace rapt
