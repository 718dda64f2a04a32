// rapt bench --compare: the rows of a run beside those of an earlier one.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "common.hpp"

namespace rapt::tools {

/// A file that `rapt bench --json` wrote.
class EarlierRun {
 public:
  /// A row is slower if it has less than this share of the earlier speed: two runs of one build differ by less.
  static constexpr double kSlower = 0.95;

  /// Throws UsageError if the file cannot be read or has other contents.
  explicit EarlierRun(const std::filesystem::path& path);

  /// How many times the speed of the earlier row of the same problem and threads a row of to_json() has; NaN if there
  /// is none. Clocks move between runs, so speeds are the rows' best shares of their own peaks: of the multiply-adds',
  /// or of the read bandwidth if that share is larger.
  double speedup(const Json& row) const;

  /// Prints how all rows compare. Returns whether one is slower.
  bool report(const Machine& machine, const Json& rows) const;

 private:
  std::string name_;
  std::string cpu_;
  std::map<std::string, Json> rows_;  // by problem and threads
};

}  // namespace rapt::tools
