// The score modifiers together.
#pragma once

#include "operations/attention/all_modifiers.hpp"

namespace rapt {

template <class... M>
struct ModifierList {
  template <class Args>
  static constexpr auto arguments = join(M::template arguments<Args>...);
  static constexpr auto fields = join(M::fields...);
  // Calls f(M()) for each modifier.
  template <class F>
  static void for_each(const F& f) {
    (f(M()), ...);
  }
};

// `First` stands before the first comma of the list, and is none of it.
template <class First, class... M>
using ModifiersAfter = ModifierList<M...>;
using Modifiers = ModifiersAfter<void
#define RAPT_SCORE_MODIFIER(name, Name) , modifiers::Name
#include "rapt/score_modifiers.def"
                                 >;

// What has_modifiers() and changes_derivative() of semantics/score.hpp say of the parameters, of a problem.
inline bool has_modifiers(const AttentionProblem& p) {
  bool any = false;
  Modifiers::for_each([&](auto modifier) { any |= modifier.is_in_score && modifier.is_given(p); });
  return any;
}
inline bool changes_derivative(const AttentionProblem& p) {
  bool any = false;
  Modifiers::for_each([&](auto modifier) { any |= modifier.changes_derivative && modifier.is_given(p); });
  return any;
}

}  // namespace rapt
