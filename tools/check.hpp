// Results against the float64 oracle.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "rapt/rapt.hpp"

namespace rapt::tools {

struct CheckOptions {
  std::vector<std::string> problems;  ///< empty: a list that covers the features
  std::string entry;                  ///< a name or a part of one; empty: dispatch's choice
  int seeds = 1;                      ///< random inputs per problem
  int threads = 0;                    ///< 0: all
  std::string json_path;              ///< empty: no file
};

/// Prints one line per problem, entry and seed. Returns kFailure when a result is out of bounds.
int run_check(const CheckOptions& options);

/// What rapt's own list of problems says of an entry, one seed each.
struct EntryErrors {
  int checked = 0, refused = 0;
  std::string violation;      ///< the first; empty: there is none
  double of_bound = 0;        ///< the largest share of a bound ...
  std::string worst_problem;  ///< ... and where
  /// Largest relative Frobenius error of an output, of problems whose tensors have one type, by that type; inputs made
  /// hard are not among them.
  std::map<std::string, double> rel_frobenius;
};
EntryErrors errors_of(const std::string& entry, int threads);

}  // namespace rapt::tools
