// The problem of any operation, and its text on one line, which logs, tests, benchmarks and the command line share.
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

/// The problem of any operation: the alternatives are in the order of Operation.
using Problem = detail::WithoutFirst<void
#define RAPT_OPERATION(name, Name, NAME) , Name##Problem
#include "rapt/operations.def"
                                     >::Variant;

/// The operation of a problem.
inline Operation operation_of(const Problem& problem) noexcept {
  return static_cast<Operation>(problem.index());
}
/// Reads the text of any operation's problem: the operation's name, then `key=value` words in any order. Throws Error,
/// which names an unknown, malformed or repeated word.
RAPT_API Problem parse_problem(std::string_view text);
/// The text of a problem, which parse_problem() reads.
RAPT_API std::string to_string(const Problem& problem);

}  // namespace rapt
