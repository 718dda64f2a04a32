// The problem of any operation, and its one-line text: the same text in logs, tests, bench rows and the command line.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <variant>

#include "rapt/operations.hpp"

namespace rapt {

namespace detail {
template <class First, class... Rest>
struct WithoutFirst {
  using Variant = std::variant<Rest...>;
};
}  // namespace detail

/// In the order of Operation.
using Problem = detail::WithoutFirst<void
#define RAPT_OPERATION(name, Name, NAME) , Name##Problem
#include "rapt/operations.def"
                                     >::Variant;

inline Operation operation_of(const Problem& problem) noexcept {
  return static_cast<Operation>(problem.index());
}
/// Reads the text of any operation's problem: the operation's name, then `key=value` words in any order. Throws Error
/// that names the word it cannot read.
RAPT_API Problem parse_problem(std::string_view text);
RAPT_API std::string to_string(const Problem& problem);

}  // namespace rapt
