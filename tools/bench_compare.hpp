// rapt bench --compare: the rows of a run beside those of an earlier one.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "common.hpp"

namespace rapt::tools {

/// A file that `rapt bench --json` wrote.
class EarlierRun {
 public:
  /// A row is slower if it has less than this share of the earlier speed.
  static constexpr double kSlower = 0.95;

  /// Throws UsageError if the file cannot be read or has other contents.
  explicit EarlierRun(const std::filesystem::path& path);

  /// The speed of `row`, one of to_json()'s, over that of the earlier row of the same problem and threads: of the same
  /// entry, or else of the only one. NaN without such a row. docs/bench.md says what speeds are.
  double speedup(const Json& row) const;

  /// Prints how all rows compare. Returns whether one is slower or none was compared.
  bool report(const Machine& machine, const Json& rows) const;

 private:
  std::string name_;
  std::string cpu_;
  std::map<std::string, std::vector<Json>> rows_;  // by problem and threads
};

}  // namespace rapt::tools
