// Sets of problems: bench/sets/*.txt, which this library carries within itself, and files of the user's own.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rapt/rapt.hpp"

namespace rapt::bench {

/// A file of problems, as it was when this library was built.
struct BuiltInSet {
  std::string_view name, text;
};
/// Those of bench/sets.
std::span<const BuiltInSet> built_in_sets();
/// tests/operations/*/problems.txt, each by its operation's name.
std::span<const BuiltInSet> built_in_checks();
/// Their names, "decode, full, ...".
std::string set_names();

/// The problem of a text, in which the word "attention" may be left out. Throws Error.
Problem parse_line(const std::string& text);

struct SetLine {
  Problem problem;
  std::string where;  ///< "bench/sets/quick.txt:3"
};

/// The problems of a set: one a line, with the word "attention" optional; "#" begins a comment. `set` is the name of
/// one that is built in, or else the path of a file. Throws Error, for a bad line "file:line: got; wanted".
std::vector<SetLine> read_set(const std::string& set);

/// What `rapt check` tries of every operation: the problems of built_in_checks().
const std::vector<SetLine>& check_problems();

}  // namespace rapt::bench
