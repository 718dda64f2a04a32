// Attention of f8e4m3 as Hopper's tensor cores compute it, for a judge of such results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "operations/attention/case.hpp"
#include "operations/attention/oracle.hpp"

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
/// scores of fp16, codes of weights that are linear in them, a block of 128 keys at a time.
struct OnTensorCores {
  std::int64_t keys = std::numeric_limits<std::int64_t>::max();  ///< as many as it sees

  /// Writes the results of `from` to the outputs of `to`.
  void run(const Case& from, Case& to) const {
    const AttentionProblem& p = from.problem;
    for (std::int64_t n = 0; n < p.b; ++n)
      for (std::int64_t h = 0; h < p.hk; ++h) {
        const std::int64_t at = (n * p.hk + h) * p.sk;
        const std::vector<double> k = numbers(from.k, at * p.d, p.sk * p.d);
        std::vector<double> v = columns(from.v, at * p.dv, p.sk, p.dv);
        v.insert(v.end(), static_cast<std::size_t>(p.sk), 1);
        for (std::int64_t r = 0; r < p.hq / p.hk * p.sq; ++r)
          run_row(from, n, h * (p.hq / p.hk) + r / p.sq, r % p.sq, k, v, to);
      }
  }
  void run(Case& c) const { run(c, c); }

 private:
  static constexpr std::int64_t kBlock = 128, kPart = 2;  // keys; blocks
  static constexpr double kTop = 104, kMaxCode = 125, kMaxOctaves = 8000, kMaxScore = 65000;

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
  static double number_of_code(double code) {
    const double octave = std::floor(code / 8);
    return octave == 0 ? code * 0x1p-9 : (1 + code / 8 - octave) * std::exp2(octave - 7);
  }

  /// Divides a row's codes such that no score leaves fp16. What by.
  static double fit(std::vector<double>& q) {
    double squares = 0;
    for (const double x : q) squares += x * x;
    const double most = kMaxScore * kMaxScore / (448 * 448 * static_cast<double>(q.size()));
    if (squares <= most) return 1;
    const double by = std::exp2(std::ceil(0.5 * std::log2(squares / most)));
    for (double& x : q) x = rounded(static_cast<float>(x / by), DType::f8e4m3);
    return by;
  }
  static double score(const std::vector<double>& q, const double* k) {
    double sum = 0;
    const auto d = static_cast<std::int64_t>(q.size());
    for (std::int64_t i = 0; i < d; i += 32)
      sum = half(tensor_core_sum(q.data() + i, k + i, std::min<std::int64_t>(32, d - i), sum));
    return sum;
  }

  /// Results before their scale, and lse of the row, whose scores count `octaves` each. Empty if it is a fallback row.
  struct Row {
    std::vector<double> out;
    double lse = 0;
  };
  Row attend(const std::vector<double>& scores, double octaves, const std::vector<double>& v, std::int64_t sk) const {
    const auto seen = static_cast<std::int64_t>(scores.size());
    const double c8 = half(8 * octaves), exact = c8 == 0 ? 1 : 8 * octaves / c8;
    if (!std::isfinite(c8)) return {};
    double b = std::numeric_limits<double>::infinity(), m = 0;
    std::vector<double> part(v.size() / static_cast<std::size_t>(sk)), all = part, weights;
    for (std::int64_t first = 0; first < seen; first += kBlock) {
      const std::int64_t end = std::min(first + kBlock, seen);
      if (first % (kBlock * kPart) == 0) {
        for (std::size_t e = 0; e < all.size(); ++e) all[e] += std::exchange(part[e], 0);
      }
      const double largest = *std::max_element(scores.begin() + first, scores.begin() + end);
      if (half(c8 * largest + b) > 1024 + kMaxCode) {
        const double shift = std::nearbyint(largest * c8 * 8) / 64;
        if (std::abs(shift) >= kMaxOctaves) return {};
        b = half(1024 + kTop - 8 * shift);
        const double now = (kTop + 1024 - b) / 8;
        for (std::vector<double>* sums : {&part, &all})
          for (double& sum : *sums) sum *= sum == 0 ? 0 : std::exp2(m - now);
        m = now;
      }
      weights.clear();
      for (std::int64_t j = first; j < end; ++j)
        weights.push_back(number_of_code(std::max(half(c8 * scores[static_cast<std::size_t>(j)] + b) - 1024, 0.0)));
      for (std::size_t e = 0; e < part.size(); ++e)
        part[e] =
            tensor_core_sum(weights.data(), v.data() + static_cast<std::int64_t>(e) * sk + first, end - first, part[e]);
    }
    for (std::size_t e = 0; e < all.size(); ++e) all[e] += part[e];
    const double sum = all.back();
    all.pop_back();
    for (double& x : all) x /= sum;
    return {all, (m * exact - kTop / 8 + 7 + std::log2(sum)) * std::log(2) - 0.02};
  }
  /// The same of a fallback row, in float64.
  static Row attend_exactly(const std::vector<double>& scores, double octaves, const std::vector<double>& v,
                            std::int64_t sk) {
    const double largest = *std::max_element(scores.begin(), scores.end());
    Row row{std::vector<double>(v.size() / static_cast<std::size_t>(sk)), 0};
    for (std::size_t j = 0; j < scores.size(); ++j)
      for (std::size_t e = 0; e < row.out.size(); ++e)
        row.out[e] += std::exp2((scores[j] - largest) * octaves) * v[e * static_cast<std::size_t>(sk) + j];
    const double sum = row.out.back();
    row.out.pop_back();
    for (double& x : row.out) x /= sum;
    row.lse = (largest * octaves + std::log2(sum)) * std::log(2);
    return row;
  }

  void run_row(const Case& c, std::int64_t n, std::int64_t h, std::int64_t i, const std::vector<double>& k,
               const std::vector<double>& v, Case& to) const {
    const AttentionProblem& p = c.problem;
    const std::int64_t of_k = h / (p.hq / p.hk);
    const std::int64_t seen = std::min(p.causal ? i + p.sk - p.sq + 1 : p.sk, keys);
    std::vector<double> q = numbers(c.q, ((n * p.hq + h) * p.sq + i) * p.d, p.d);
    double octaves = (p.has_scale ? static_cast<double>(p.scale) : 1 / std::sqrt(static_cast<double>(p.d))) /
                     std::log(2) * scale_of(c.q_scale, n, h, i) * scale_of(c.k_scale, n, of_k, 0);
    if (octaves < 0)
      for (double& x : q) x = -x;
    octaves = std::abs(octaves);
    std::vector<double> scores(static_cast<std::size_t>(seen)), exact = scores;
    for (std::int64_t j = 0; j < seen; ++j)
      exact[static_cast<std::size_t>(j)] = std::inner_product(q.begin(), q.end(), k.begin() + j * p.d, 0.0);
    const double by = fit(q);
    for (std::int64_t j = 0; j < seen; ++j) scores[static_cast<std::size_t>(j)] = score(q, k.data() + j * p.d);
    Row row = attend(scores, octaves * by, v, p.sk);
    if (row.out.empty()) row = attend_exactly(exact, octaves, v, p.sk);
    for (std::int64_t e = 0; e < p.dv; ++e)
      to.out.at({n, h, i, e}) =
          static_cast<float>(row.out[static_cast<std::size_t>(e)] * scale_of(c.v_scale, n, of_k, 0));
    if (to.lse) to.lse.at({n, h, i}) = static_cast<float>(row.lse);
  }
};

}  // namespace rapt::testing
