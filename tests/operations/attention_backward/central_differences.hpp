// Derivatives of a float64 oracle by central differences, where inputs are fp32.
#pragma once

#include <cmath>

#include "support/tensor.hpp"

namespace rapt::testing {

/// Rounds to multiples of step / 16, so that a few steps more or less are exact.
inline void coarsen(Tensor& t, float step) {
  for (std::int64_t i = 0; i < t.size(); ++i)
    if (std::isfinite(t.flat(i))) t.flat(i) = std::nearbyint(t.flat(i) * 16 / step) * step / 16;
}

/// d loss / d x: its error is of the order of step^4, and of the rounding of float64 over step.
template <class Case>
double slope(double (*loss)(Case&), Case& c, Element x, float step) {
  const float at = x;
  const auto difference = [&](float by) {
    x = at + by;
    const double above = loss(c);
    x = at - by;
    return (above - loss(c)) / (2 * static_cast<double>(by));
  };
  const double fine = difference(step), coarse = difference(2 * step);
  x = at;
  return (4 * fine - coarse) / 3;
}

}  // namespace rapt::testing
