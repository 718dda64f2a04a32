// A tensor for keys of every sequence, optionally with lengths.
#pragma once

#include "operations/attention/kind.hpp"

namespace rapt {

template <>
struct KeyKind<KvSource::Kind::strided> : KeyKindDefaults<KvSource::Kind::strided> {
  static constexpr bool is(const CacheProblem&) { return true; }  // unless they are of another kind, too
  static constexpr bool has_gradients = true;
};

}  // namespace rapt
