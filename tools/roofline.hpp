// rapt roofline: problems below the measured ceilings of the machine.
#pragma once

#include <string>
#include <vector>

namespace rapt::tools {

struct RooflineOptions {
  std::string set = "roofline";       ///< one that is built in, or a file; unused when `problems` is given
  std::vector<std::string> problems;  ///< texts of problems
  int threads = 1;
  int seeds = 1;                               ///< random inputs per problem
  double min_time = 0.2;                       ///< seconds of samples per dot, over all seeds
  std::string json_path, svg_path, html_path;  ///< empty: no file
};

/// Measures what this machine can do at most, times problems, and prints where they stand, fused and as three steps.
/// Throws std::runtime_error when a result is wrong.
int run_roofline(const RooflineOptions& options);

}  // namespace rapt::tools
