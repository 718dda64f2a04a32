// `rapt demo`: does it compute what a real model computed, what was chosen, how fast is it?
#pragma once

#include <string>

namespace rapt::tools {

struct DemoOptions {
  std::string data_dir = "tests/data";  ///< folder of the captured tensors
  int threads = 0;                      ///< most threads to use; 0: all
};

/// Prints to standard output; takes a few seconds. Returns 0, or 1 when a comparison failed. Throws std::runtime_error
/// when the captured tensors cannot be read.
int run_demo(const DemoOptions& options);

}  // namespace rapt::tools
