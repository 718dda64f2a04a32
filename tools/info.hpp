// rapt info: the machine, the build and its kernels.
#pragma once

#include <string>

#include "common.hpp"

namespace rapt::tools {

struct InfoOptions {
  std::string problem;  ///< empty: the machine and the build only
  int threads = 0;      ///< for `problem`; 0: all
  bool code = false;    ///< what the build read out of the kernels' object files, in place of the machine
  bool json = false;
  std::string json_path;  ///< with `json`; empty: standard output, in place of text
};

/// Prints what this build can do on this machine, or what would run for one problem and why.
int run_info(const InfoOptions& options);

/// JSON, an object for each kernel's object file: tools/kernel_code.py says what. Empty where the build had no Python.
extern const char* const kKernelCode;

}  // namespace rapt::tools
