// What a kind of keys is, a way in which they lie in memory: of each, in one struct, everything that operations with
// keys say of it.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/arguments.hpp"
#include "operations/attention/params.hpp"
#include "operations/bound.hpp"
#include "operations/shape.hpp"
#include "rapt/attention.hpp"
#include "rapt/attention_problem.hpp"
#include "rapt/kv_cache.hpp"
#include "rapt/kv_source.hpp"

namespace rapt {

// The kinds as bits of a call's features, and what positions their keys have.
struct KvKinds {
  enum class Positions : std::uint8_t { consecutive, packed, blocks, endless, none };
  struct Kind {
    unsigned bit;
    Positions positions;
  };
  static constexpr Kind kinds[] = {
#define RAPT_KV_KIND(name, NAME, value, text, positions) {1u << value, Positions::positions},
#include "rapt/kv_kinds.def"
  };
  static constexpr auto last = static_cast<KvSource::Kind>(std::size(kinds) - 1);

  static constexpr unsigned with(Positions positions) {
    unsigned bits = 0;
    for (const Kind& kind : kinds) bits |= kind.positions == positions ? kind.bit : 0;
    return bits;
  }
};

struct KvBits : KvKinds {
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
  static constexpr unsigned needs_lengths = positions & ~consecutive;
};

// What a kind says; all but `is` has a default, which a kind inherits. `Cache` is a KvSource, or a KvCache of keys that
// can be appended; of such keys problems say what a CacheProblem has, of others what an AttentionProblem has.
//
//     is(problem)                     whether a problem's keys are of this kind
//     rows                            the sizes of k and v before that of a row; null: b hk sk
//     fields<P>                       of the text of problems
//     arguments<Args>                 its own tensors, of an operation whose arguments have a KvSource `kv`
//     cache_arguments<C, path...>     the same, of the C structure C and the KvCache at this path of the arguments
//     check_batch(kv, bound)          throws Error for another number of sequences than queries have
//     check_shapes(kv, bound)         throws Error, and gives `bound` the sk that no tensor has. It reads no lengths
//                                     on a device
//     max_keys(sk)                    that a sequence may have
//     fill(bound, problem)            what a problem says of a call with such keys; of caches, whose blocks have so
//                                     many rows, fill(rows, problem)
//     check(problem)                  throws Error
//     check_blocks(problem, sk, k)    throws Error that names the keys `k`; the cache may be of another kind
//     fill(problem, sk, layout)       what parameters say of the problem
//     fill_tensors(cache, layout)     and of tensors of its own, whose values are not read
//     check_visible(problem, params)  throws Error where a row sees a key that is not there. `params` have what scores
//                                     become already
//     refusal                         what an argument is that does not go with such keys, and what is wanted
//     has_gradients
template <KvSource::Kind kKind>
struct KeyKind;

struct KeyRefusal {
  const char *got = nullptr, *wanted = "none";  // null: "one for <the kind's text>"
};

template <KvSource::Kind kKind>
struct KeyKindDefaults {
  static constexpr unsigned bit = 1u << static_cast<unsigned>(kKind);
  static constexpr const char* rows = nullptr;
  template <class P>
  static constexpr std::array<Field<P>, 0> fields{};
  template <class Args>
  static constexpr std::array<Argument, 0> arguments{};
  template <class C, auto... kCache>
  static constexpr std::array<Argument, 0> cache_arguments{};
  static void check_batch(const KvSource&, const Bound&) {}
  static void check_shapes(const KvSource&, Bound&) {}
  static std::int64_t max_keys(std::int64_t sk) { return sk; }
  static void fill(const Bound&, AttentionProblem&) {}
  static void fill(std::int64_t, CacheProblem&) {}
  static void check(const AttentionProblem&) {}
  static void check_blocks(const CacheProblem&, std::int64_t, const char*) {}
  static void fill(const CacheProblem&, std::int64_t, KvLayout&) {}
  template <class Cache>
  static void fill_tensors(const Cache&, KvLayout&) {}
  static void check_visible(const AttentionProblem&, const AttentionParams&) {}
  static constexpr KeyRefusal refusal{};
  static constexpr bool has_gradients = false;
};

}  // namespace rapt
