// The kinds of keys together.
#pragma once

#include "operations/attention/all_kinds.hpp"

namespace rapt {

template <class... K>
struct KeyKindList {
  template <class Args>
  static constexpr auto arguments = join(K::template arguments<Args>...);
  template <class C, auto... kCache>
  static constexpr auto cache_arguments = join(K::template cache_arguments<C, kCache...>...);
  // Whether the problem P can be one of keys of this kind.
  template <class Kind, class P>
  static constexpr bool can_be = requires(const P& p) {
    Kind::is(p);
  };
  template <class Kind, class P>
  static constexpr auto fields_of() {
    if constexpr (can_be<Kind, P>) return Kind::template fields<P>;
    else return std::array<Field<P>, 0>{};
  }
  template <class P>
  static constexpr auto fields = join(fields_of<K, P>()...);
  // Calls f(K()) for each kind, or for those among the features.
  template <class F>
  static constexpr void for_each(const F& f) {
    (f(K()), ...);
  }
  template <class F>
  static constexpr void visit(unsigned features, const F& f) {
    for_each([&]<class Kind>(Kind kind) {
      if (features & Kind::bit) f(kind);
    });
  }
};

// `First` stands before the first comma of the list, and is none of it.
template <class First, class... K>
using KeyKindsAfter = KeyKindList<K...>;
using KeyKinds = KeyKindsAfter<void
#define RAPT_KV_KIND(name, NAME, value, text, positions) , KeyKind<KvSource::Kind::name>
#include "rapt/kv_kinds.def"
                               >;

}  // namespace rapt
