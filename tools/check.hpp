// Results against the float64 oracle.
#pragma once

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

}  // namespace rapt::tools
