// What the tests of the guides' examples share: inputs and the answer in double.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "support/catch.hpp"

namespace rapt::testing {

inline constexpr std::int64_t b = 2, hq = 4, hk = 2, d = 8;

inline std::vector<float> random_floats(std::int64_t count, int seed) {
  std::srand(static_cast<unsigned>(seed));
  std::vector<float> values(static_cast<std::size_t>(count));
  Eigen::Map<Eigen::VectorXf>(values.data(), count).setRandom();
  return values;
}

/// Softmax of one query row over the keys that `attended` picks, times the values, in double.
template <class Attended>
std::vector<double> one_row(const float* q, const float* k, const float* v, std::int64_t keys, std::int64_t stride,
                            Attended attended) {
  std::vector<double> out(d, 0.0);
  double sum = 0;
  for (std::int64_t j = 0; j < keys; ++j) {
    if (!attended(j)) continue;
    double x = 0;
    for (std::int64_t c = 0; c < d; ++c) x += double(q[c]) * k[j * stride + c];
    const double p = std::exp(x / std::sqrt(double(d)));
    sum += p;
    for (std::int64_t c = 0; c < d; ++c) out[static_cast<std::size_t>(c)] += p * v[j * stride + c];
  }
  for (double& value : out) value /= sum;
  return out;
}

inline void check_row(const float* got, const std::vector<double>& expected) {
  for (std::size_t c = 0; c < expected.size(); ++c) REQUIRE(std::abs(got[c] - expected[c]) <= 2e-6);
}

}  // namespace rapt::testing
