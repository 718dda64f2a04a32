#pragma once

#include <string>

#include "common.hpp"

namespace rapt::tools {

struct InfoOptions {
  std::string problem;  ///< empty: the machine and the build only
  int threads = 0;      ///< for `problem`; 0: all
  bool json = false;
  std::string json_path;  ///< with `json`; empty: standard output, in place of text
};

/// What an entry is, in fields.
Json describe(const EntryInfo& entry);
/// Prints what this build can do on this machine, or what would run for one problem and why.
int run_info(const InfoOptions& options);

}  // namespace rapt::tools
