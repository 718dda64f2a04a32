#include "support/verdict.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace rapt::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Infinite where exactly one of the two is a finite number.
double distance(double got, double wanted) {
  if (got == wanted || (std::isnan(got) && std::isnan(wanted))) return 0;
  return std::isfinite(got) && std::isfinite(wanted) ? std::fabs(got - wanted) : kInfinity;
}
double share(double error, double bound) {
  return error == 0 ? 0 : error / bound;
}

}  // namespace

void Tally::add(double got, double wanted, double bound) {
  const double error = distance(got, wanted);
  if (error == kInfinity) {
    errors_.nonfinite_agree = false;
    return;
  }
  errors_.max_abs = std::max(errors_.max_abs, error);
  errors_.max_bound = std::max(errors_.max_bound, share(error, bound));
  squared_error_ += error * error;
  if (std::isfinite(wanted)) squared_norm_ += wanted * wanted;
}

void Tally::add_lse(double got, double wanted, double bound) {
  const double error = distance(got, wanted);
  if (error == kInfinity) {
    errors_.nonfinite_agree = false;
    return;
  }
  errors_.lse_max = std::max(errors_.lse_max, error);
  errors_.lse_max_bound = std::max(errors_.lse_max_bound, share(error, bound));
}

void Tally::violate(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

Verdict Tally::verdict() const {
  Verdict verdict{errors_, violation_};
  verdict.errors.rel_frobenius = squared_norm_ > 0 ? std::sqrt(squared_error_ / squared_norm_) : 0;
  verdict.errors.frobenius_limit = verdict.errors.max_abs_limit = kInfinity;
  if (!violation_.empty()) return verdict;
  const auto off = [](const char* what, double times) {
    char text[80];
    std::snprintf(text, sizeof text, "%s is off by %.3g times its bound", what, times);
    return std::string(text);
  };
  if (!errors_.nonfinite_agree) verdict.violation = "NaN, Inf or a finite number where the reference has the other";
  else if (errors_.max_bound > 1) verdict.violation = off("an element", errors_.max_bound);
  else if (errors_.lse_max_bound > 1) verdict.violation = off("an lse", errors_.lse_max_bound);
  return verdict;
}

}  // namespace rapt::testing
