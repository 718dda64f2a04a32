// What comparing a result with its oracle says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "operations/attention/oracle.hpp"

namespace rapt::testing {

struct Verdict {
  Errors errors;
  std::string violation;  ///< empty, or what is wrong in one line
};

/// The bound that the errors pass, in one line; empty if none.
std::string violation_of(const Errors& errors);

/// Between rows that are compared: every row_step-th of n, and the last.
inline std::int64_t next_row(std::int64_t row, std::int64_t row_step, std::int64_t n) {
  return row + row_step < n ? row + row_step : std::max(row + 1, n - 1);
}

/// Collects the figures of an operation whose elements each have a bound of their own.
class Tally {
 public:
  /// An element that is `got` and may be off `wanted` by `bound`.
  void add(double got, double wanted, double bound);
  void add_lse(double got, double wanted, double bound);
  /// Something other than an element; what comes first is kept.
  void violate(const std::string& what);
  Verdict verdict() const;

 private:
  Errors errors_;
  double squared_error_ = 0, squared_norm_ = 0;
  std::string violation_;
};

}  // namespace rapt::testing
