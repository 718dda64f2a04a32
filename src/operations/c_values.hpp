// Numbers of the C interface as values of the C++ one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "rapt/attention_problem.hpp"
#include "rapt/score.hpp"

namespace rapt::c {

// `value` as the C++ enumeration E, whose last enumerator is `last`.
template <class E>
E to_enum(std::int32_t value, E last, const std::string& name) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    throw Error(name, std::to_string(value), "0 to " + std::to_string(static_cast<int>(last)));
  }
  return static_cast<E>(value);
}

// Nothing for RAPT_ALIGN_NONE.
inline std::optional<Align> to_align(std::int32_t kind, std::int64_t offset, const std::string& name) {
  using Kind = AttentionProblem::Align;
  switch (to_enum(kind, Kind::offset, name)) {
    case Kind::none:
      break;
    case Kind::top_left:
      return Align::top_left();
    case Kind::bottom_right:
      return Align::bottom_right();
    case Kind::offset:
      return Align::offset(offset);
  }
  return {};
}

}  // namespace rapt::c
