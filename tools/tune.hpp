// rapt tune: measures how this machine's threads should share calls.
#pragma once

#include <string>
#include <vector>

namespace rapt::tools {

struct TuneOptions {
  std::string set = "tune";           ///< one that is built in, or a file; unused when `problems` is given
  std::vector<std::string> problems;  ///< texts of problems
  std::vector<int> threads;           ///< empty: all
  double min_time = 0.5;              ///< seconds of a comparison of one problem
  std::string output_path;            ///< empty: no file
};

/// Tries other values of what plans go by (rapt/tuning.hpp), prints what they bring, and writes those that win. Returns
/// kFailure when a result's bits change, which they must not.
int run_tune(const TuneOptions& options);

}  // namespace rapt::tools
