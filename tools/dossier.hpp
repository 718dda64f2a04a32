// What is known of each kernel, on a page.
#pragma once

#include <span>
#include <string>

namespace rapt::tools {

struct DossierOptions {
  std::string entry;      ///< a name or a part of one; empty: all
  bool no_check = false;  ///< no errors against float64
  int threads = 0;        ///< of these; 0: all
  bool json = false;
  std::string json_path;  ///< with `json`; empty: standard output, in place of Markdown
};

/// Prints a page for each kernel that has such entries: what the build recorded, what the library says of them, and
/// what they are off by here. Returns kFailure when a result is out of bounds, and throws when an entry is on no page.
int run_dossier(const DossierOptions& options);

/// What the build recorded, JSON for each kernel: tools/dossier/make.py says what. Empty where it had no Python.
std::span<const char* const> kernel_pages();

}  // namespace rapt::tools
