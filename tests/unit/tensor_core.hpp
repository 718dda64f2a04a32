// Attention of f8e4m3 as Hopper's tensor cores compute it, for a judge of such results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "oracle/oracle.hpp"
#include "support/case.hpp"

namespace rapt::testing {

/// `sum` and n products, 32 of them at a time: addends are aligned to the largest one's exponent, and cut behind 13
/// bits.
inline double tensor_core_sum(const double* a, const double* b, std::int64_t n, double sum = 0) {
  for (std::int64_t first = 0; first < n; first += 32) {
    const std::int64_t end = std::min(first + 32, n);
    double largest = std::abs(sum);
    for (std::int64_t i = first; i < end; ++i) largest = std::max(largest, std::abs(a[i] * b[i]));
    if (largest == 0) continue;
    const double unit = std::ldexp(1, std::ilogb(largest) - 13), inverse = 1 / unit;
    const auto cut = [&](double x) { return std::trunc(x * inverse) * unit; };
    sum = cut(sum);
    for (std::int64_t i = first; i < end; ++i) sum += cut(a[i] * b[i]);
  }
  return sum;
}

/// Attention of a dense case whose scales, if any, are those of heads, as an entry with arithmetic of f8e4m3 does it:
/// exponents and weights of fp16, which then are rounded to f8e4m3.
struct OnTensorCores {
  CodeProducts products = {};
  double top = 6;                                                ///< log2 of what the largest weight becomes
  std::int64_t keys = std::numeric_limits<std::int64_t>::max();  ///< as many as it sees

  /// Writes the results of `from` to the outputs of `to`.
  void run(const Case& from, Case& to) const {
    const AttentionProblem& p = from.problem;
    for (std::int64_t n = 0; n < p.b; ++n)
      for (std::int64_t h = 0; h < p.hk; ++h) {
        const std::int64_t at = (n * p.hk + h) * p.sk;
        const std::vector<double> k = numbers(from.k, at * p.d, p.sk * p.d), v = columns(from.v, at * p.dv, p.sk, p.dv);
        for (std::int64_t r = 0; r < p.hq / p.hk * p.sq; ++r)
          run_row(from, n, h * (p.hq / p.hk) + r / p.sq, r % p.sq, k, v, to);
      }
  }
  void run(Case& c) const { run(c, c); }

 private:
  static std::vector<double> numbers(const Tensor& t, std::int64_t first, std::int64_t count) {
    std::vector<double> result;
    for (std::int64_t i = first; i < first + count; ++i) result.push_back(t.flat(i));
    return result;
  }
  static std::vector<double> columns(const Tensor& t, std::int64_t first, std::int64_t rows, std::int64_t width) {
    std::vector<double> result;
    for (std::int64_t c = 0; c < width; ++c)
      for (std::int64_t j = 0; j < rows; ++j) result.push_back(t.flat(first + j * width + c));
    return result;
  }
  static double scale_of(const Tensor& scale, std::int64_t n, std::int64_t h, std::int64_t i) {
    if (!scale) return 1;
    const auto& shape = scale.layout().shape;
    return scale.at({shape[0] == 1 ? 0 : n, h, shape[2] == 1 ? 0 : i, 0});
  }
  static double half(double x) { return rounded(static_cast<float>(x), DType::f16); }

  /// Of weights and one column of values, in parts.
  double sum_of(const std::vector<double>& weights, const double* values) const {
    double total = 0;
    const auto seen = static_cast<std::int64_t>(weights.size());
    for (std::int64_t j = 0; j < seen; j += products.part)
      total += tensor_core_sum(weights.data() + j, values + j, std::min(products.part, seen - j));
    return total;
  }

  void run_row(const Case& c, std::int64_t n, std::int64_t h, std::int64_t i, const std::vector<double>& k,
               const std::vector<double>& v, Case& to) const {
    const AttentionProblem& p = c.problem;
    const std::int64_t of_k = h / (p.hq / p.hk);
    const std::int64_t seen = std::min(p.causal ? i + p.sk - p.sq + 1 : p.sk, keys);
    const std::vector<double> q = numbers(c.q, ((n * p.hq + h) * p.sq + i) * p.d, p.d);
    const double scale = (p.has_scale ? static_cast<double>(p.scale) : 1 / std::sqrt(static_cast<double>(p.d))) *
                         scale_of(c.q_scale, n, h, i) * scale_of(c.k_scale, n, of_k, 0);
    std::vector<double> weights;
    for (std::int64_t j = 0; j < seen; ++j)
      weights.push_back(scale / std::log(2) * tensor_core_sum(q.data(), k.data() + j * p.d, p.d));
    const double shift = *std::max_element(weights.begin(), weights.end()) - top;
    double sum = 0;
    for (double& w : weights) {
      w = half(std::exp2(half(w - shift)));
      sum += w;
      w = rounded(static_cast<float>(w), DType::f8e4m3);
    }
    if (products.rounded_sums) sum = sum_of(weights, std::vector<double>(weights.size(), 1).data());
    for (std::int64_t e = 0; e < p.dv; ++e)
      to.out.at({n, h, i, e}) =
          static_cast<float>(sum_of(weights, v.data() + e * p.sk) / sum * scale_of(c.v_scale, n, of_k, 0));
    if (to.lse) to.lse.at({n, h, i}) = static_cast<float>(std::log(sum) + shift * std::log(2));
  }
};

}  // namespace rapt::testing
