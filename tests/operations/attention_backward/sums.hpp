// What the oracle of attention's gradients adds up, and how far sums may be off.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "operations/attention/oracle_inputs.hpp"
#include "operations/attention_backward/oracle.hpp"

namespace rapt::testing::gradients {

using namespace inputs;

constexpr double kTiny = 1e-37;

/// What one rounding is likely to be off by, and a sum of many terms of either sign by the root of their squares.
constexpr double kLikely = kUnit / 4, kLikelySum = 2 * kUnit;

struct Types {
  DType inputs;  ///< the coarsest of q, kv and dout
  double eps;    ///< its unit roundoff; 0: fp32
  double out_eps;

  explicit Types(const AttentionBackwardArgs& args) : inputs(args.q.dtype) {
    for (const DType dtype : {args.kv.k.dtype, args.dout.dtype})
      if (unit_of(dtype) > unit_of(inputs)) inputs = dtype;
    eps = unit_of(inputs);
    out_eps = std::max(unit_of(args.out.dtype), kUnit);
  }
};

/// What sums of terms come to: one gradient's rows, or a part of them. Sums of squares are for errors that are likely.
struct Sums {
  Matrix value, magnitude, error, variance, squares;
  FloatMatrix plain;

  Sums(Eigen::Index rows, Eigen::Index cols)
      : value(Matrix::Zero(rows, cols)),
        magnitude(value),
        error(value),
        variance(value),
        squares(value),
        plain(FloatMatrix::Zero(rows, cols)) {}

  /// Row `to` += row r of others.
  void add_row(Eigen::Index to, const Sums& others, Eigen::Index r) {
    for (Matrix Sums::*m : {&Sums::value, &Sums::magnitude, &Sums::error, &Sums::variance, &Sums::squares})
      (this->*m).row(to) += (others.*m).row(r);
    plain.row(to) += others.plain.row(r);
  }
};

/// A gradient as it is collected.
class Collected {
 public:
  Collected(GradientReference& to, const MutableTensorView& t, double eps, bool has_plain) : to_(to), dtype_(t.dtype) {
    if (!t) return;
    const auto size = static_cast<std::size_t>(
        std::accumulate(t.shape.begin(), t.shape.begin() + t.ndim, std::int64_t{1}, std::multiplies<>()));
    to.value.assign(size, 0);
    for (auto* values : {&to.magnitude, &to.bound, &to.spread}) values->assign(size, 0);
    to.computed.assign(size, 0);
    to.eps = eps;
    to.plain_error = has_plain ? 0 : kInfinity;
  }
  explicit operator bool() const { return !to_.value.empty(); }

  /// Row r of `sums`, of `terms` terms each, as elements [first, first + cols).
  void put(std::size_t first, const Sums& sums, Eigen::Index r, double terms) {
    for (Eigen::Index c = 0; c < sums.value.cols(); ++c) {
      const std::size_t at = first + static_cast<std::size_t>(c);
      to_.value[at] = sums.value(r, c);
      to_.magnitude[at] = sums.magnitude(r, c);
      to_.bound[at] = sums.error(r, c);
      to_.spread[at] = sums.variance(r, c) + (std::pow(kLikelySum, 2) + std::pow(to_.eps, 2)) * sums.squares(r, c);
      finish(at, terms);
      if (to_.eps == 0 || !std::isfinite(to_.value[at])) continue;
      const double plain = rounded(sums.plain(r, c), dtype_);
      const double error = std::abs(plain - to_.value[at]);
      to_.plain_error = std::max(to_.plain_error, std::isnan(error) ? kInfinity : error);
      to_.rounding_error = std::max(to_.rounding_error, unit_of(dtype_) * std::abs(to_.value[at]) + to_.bound[at] +
                                                            4 * to_.eps * std::sqrt(sums.squares(r, c)));
    }
  }
  /// One more term of an element.
  void add(std::size_t at, double term, double error, double variance) {
    to_.value[at] += term;
    to_.magnitude[at] += std::abs(term);
    to_.bound[at] += error;
    to_.spread[at] += variance + std::pow(kLikelySum * term, 2);
    ++count(at);
  }
  void vary(std::size_t at, double variance) { to_.spread[at] += variance; }
  /// After the last add().
  void finish_all() {
    for (std::size_t at = 0; at < to_.value.size(); ++at) finish(at, static_cast<double>(count(at)));
  }
  /// Elements that no row sees are 0, and computed.
  void rest_is_zero() { std::fill(to_.computed.begin(), to_.computed.end(), char{1}); }

 private:
  std::int64_t& count(std::size_t at) {
    counts_.resize(to_.value.size());
    return counts_[at];
  }
  void finish(std::size_t at, double terms) {
    to_.bound[at] += (24 + terms / 64) * kUnit * to_.magnitude[at] + kTiny;
    to_.spread[at] = std::sqrt(to_.spread[at]);
    to_.computed[at] = 1;
  }

  GradientReference& to_;
  DType dtype_;
  std::vector<std::int64_t> counts_;
};

}  // namespace rapt::testing::gradients
