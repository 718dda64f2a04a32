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

std::string digits(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

}  // namespace

std::string violation_of(const Errors& errors) {
  const auto off = [](const char* what, double times) {
    return std::string(what) + " is off by " + digits(times) + " times its bound";
  };
  const auto above = [](const char* what, double x, double limit) {
    return std::string(what) + " " + digits(x) + "; at most " + digits(limit) + " is allowed";
  };
  if (!errors.nonfinite_agree) return "NaN, Inf or a finite number where the reference has the other";
  if (errors.max_bound > 1) return off("an element", errors.max_bound);
  if (errors.rel_frobenius > errors.frobenius_limit)
    return above("relative Frobenius error", errors.rel_frobenius, errors.frobenius_limit);
  if (errors.max_abs > errors.max_abs_limit) return above("largest error", errors.max_abs, errors.max_abs_limit);
  if (errors.lse_max_bound > 1) return off("an lse", errors.lse_max_bound);
  return errors.ok() ? "" : "an error is not a number";
}

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
  if (violation_.empty()) verdict.violation = violation_of(verdict.errors);
  return verdict;
}

}  // namespace rapt::testing
