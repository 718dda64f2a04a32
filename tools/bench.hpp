// rapt bench: problems timed on entries, beside the machine's peak.
#pragma once

#include <string>
#include <vector>

namespace rapt::tools {

struct BenchOptions {
  std::string set = "quick";          ///< one that is built in, or a file; unused when `problems` is given
  std::vector<std::string> problems;  ///< texts of problems
  std::vector<int> threads = {1};
  std::string entry;         ///< a name or a part of one; empty: dispatch's choice
  int seeds = 1;             ///< random inputs per problem; their samples are pooled
  double min_time = 0.5;     ///< seconds of samples per row
  std::string compare_path;  ///< of an earlier run's json_path; empty: none
  std::string json_path;     ///< empty: no file
  std::string trace_path;    ///< likewise
};

/// Times calls of the operations and prints a table; see docs/bench.md. Returns kFailure when a result is wrong, when a
/// row is slower than that of the earlier run, or when that run has none of them.
int run_bench(const BenchOptions& options);

}  // namespace rapt::tools
