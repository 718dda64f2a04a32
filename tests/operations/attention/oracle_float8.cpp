#include "operations/attention/oracle_float8.hpp"

#include <algorithm>
#include <cmath>

#include "operations/attention/case_modifiers.hpp"

namespace rapt::testing::attention_rows {
namespace {

/// Arithmetic of f8e4m3, as Reference has it. Products that the tensor cores add to a sum at a time, and what they cut
/// of each of these addends, as a share of the largest; keys whose products with values are one such sum.
constexpr std::int64_t kStep = 32, kPart = 256;
constexpr double kCut = 0x1p-13;
/// Sums of scores are fp16 after each step. No score is past the largest one: queries are divided for that, and have
/// denormals.
constexpr double kLargestScore = 65000, kLargestCode = 448, kMinNormalCode = 0x1p-6, kHalfDenormalCode = 0x1p-10;
/// Codes are linear in scores and rounded: weights are 0.9576 to 1.1085 of what they should be, 1.033 but for 7.4 %.
/// What is below the least code becomes 0: up to 2^-6.9, where a row's largest weight is at least 2^4.
constexpr double kCodeRounding = 0.074, kMinWeight = 0x1.13p-11;
/// log(1.0331) - 0.02: of the sum of such weights, with what lse is corrected by.
constexpr double kSumExcess = 0.0126;

/// What the division of a row of queries by a power of two may change of each, `scale` being that of the row's codes.
RowArray lost_of_queries(const RowArray& q, double scale) {
  const auto size = static_cast<double>(q.size());
  const double limit = kLargestScore / (kLargestCode * std::sqrt(size)) * std::abs(scale);
  const double length = std::sqrt(q.square().sum());
  if (!(length > limit) || !(limit > 0) || std::isinf(length)) return RowArray::Zero(q.size());
  const double unit = std::exp2(std::ceil(std::log2(length / limit) + 1e-6)) * std::abs(scale);
  return (q.abs() < kMinNormalCode * unit).select(q.abs().min(kHalfDenormalCode * unit), 0);
}

/// What tensor cores lose of a sum of products of n codes, of which a have been changed by up to `off`.
Lost lost_of_score(const double* a, const double* off, const double* b, std::int64_t n) {
  double sum = 0, sum_of_largest = 0, sum_of_squares = 0, changed = 0, changed_squares = 0;
  for (std::int64_t i = 0; i < n; i += kStep) {
    double largest = std::abs(sum);
    for (std::int64_t c = i; c < std::min(i + kStep, n); ++c) {
      const double product = a[c] * b[c], change = off[c] * std::abs(b[c]);
      largest = std::max(largest, std::abs(product));
      sum += product, changed += change, changed_squares += change * change;
    }
    largest = std::max(largest, std::abs(sum));
    sum_of_largest += largest, sum_of_squares += largest * largest;
  }
  constexpr double kAddends = kStep + 1, kSquares = kAddends * kCut * kCut + kHalf * kHalf;
  return {(kAddends * kCut + kHalf) * sum_of_largest + changed,
          std::sqrt((kSquares * sum_of_squares + changed_squares) / 3)};
}

/// What becoming codes of f8e4m3 may change of weights up to `largest`, all of them times 1.033.
RowArray code_roundings(const RowArray& weights, double largest) {
  return (kCodeRounding * weights).max(weights.min(kMinWeight * largest));
}

/// The squares of what that is likely to change: [1, dv]. `center` is what values count relative to. Codes are relative
/// to the largest weight of a block of keys, until a later block has one that codes have no room for.
RowArray rounded_to_codes(const RowArray& p, const Matrix& v, const RowArray& center) {
  constexpr Eigen::Index kBlock = 128;
  constexpr double kTop = 104, kMaxCode = 125;
  const double largest = p.size() ? p.maxCoeff() : 0;
  const RowArray off = code_roundings(p, largest);
  RowArray squares = RowArray::Zero(v.cols());
  Array changes = Array::Zero(128, v.cols());
  double reference = 0;
  for (Eigen::Index first = 0; first < v.rows(); first += kBlock) {
    const Eigen::Index count = std::min(kBlock, v.rows() - first);
    const double top = p.segment(first, count).maxCoeff();
    if (top > reference * std::exp2((kMaxCode - kTop) / 8)) {
      squares += changes.square().colwise().sum();
      changes.setZero(), reference = top;
    }
    for (Eigen::Index j = first; j < first + count; ++j) {
      if (!(p[j] > 0)) continue;
      const double code = std::clamp(std::round(kTop + 8 * std::log2(p[j] / reference)), 0.0, kMaxCode);
      changes.row(static_cast<Eigen::Index>(code)) += off[j] * (v.row(j).array() - center);
    }
  }
  return squares + changes.square().colwise().sum();
}

/// What p . v is likely to lose on tensor cores: [1, dv]. Each product has `bits` bits.
RowArray lost_of_values(const RowArray& p, const Matrix& v, int bits) {
  RowArray lost = RowArray::Zero(v.cols());
  for (Eigen::Index first = 0; first < v.rows(); first += kPart) {
    const Eigen::Index end = std::min<Eigen::Index>(first + kPart, v.rows());
    RowArray sum = RowArray::Zero(v.cols()), squares = sum;
    for (Eigen::Index j = first; j < end; ++j) {
      if (p[j] > 0) sum += p[j] * v.row(j).array(), squares += (p[j] * v.row(j).array()).square();
    }
    const RowArray unit = kCut * (sum.abs() + squares.sqrt()), exact = std::ldexp(1, bits) * unit;
    for (Eigen::Index j = first; j < end; ++j) {
      for (Eigen::Index c = 0; p[j] > 0 && c < v.cols(); ++c) {
        const double product = p[j] * v(j, c), magnitude = std::abs(product);
        if (magnitude <= unit[c]) lost[c] += product;
        else if (magnitude < exact[c]) lost[c] += std::copysign(0.375 * unit[c], product);
      }
    }
  }
  return lost.abs();
}

}  // namespace

bool multiplies_codes(const AttentionArgs& args) {
  const ScoreSpec& s = args.score;
  return args.q.ndim == 4 && args.q.dtype == DType::f8e4m3 && args.kv.k.dtype == DType::f8e4m3 &&
         args.kv.v.dtype == DType::f8e4m3 && !Modifiers::any_given(s);
}

void bound_codes(const Head& head, const Operands& operands, const Matrix& q, std::int64_t first, Rows& rows,
                 Reference& result, const std::function<std::int64_t(std::int64_t)>& flat) {
  const Matrix& v = operands.v;
  const std::int64_t len_k = v.rows(), dv = v.cols();
  Array seen(q.rows(), len_k);
  for (std::int64_t r = 0; r < q.rows(); ++r)
    for (std::int64_t j = 0; j < len_k; ++j) seen(r, j) = rows.sees(r, j);
  Array changed(q.rows(), q.cols());
  const TensorView& scale = head.args.q_scale;
  for (std::int64_t r = 0; r < q.rows(); ++r)
    changed.row(r) = lost_of_queries(
        q.row(r).array(),
        scale ? read_element(scale.data, scale.dtype, row_offset(scale, {head.n, first + r}, head.h)) : 1);
  rows.attend(head, first, true, [&](std::int64_t r, std::int64_t j) {
    if (seen(r, j) == 0) return Lost();
    return lost_of_score(q.row(r).data(), changed.row(r).data(), head.keys.value.row(j).data(), q.cols());
  });
  const RowArray largest = operands.largest.row(0).array();
  for (std::int64_t r = 0; r < q.rows(); ++r) {
    const auto row = static_cast<std::size_t>(flat(first + r));
    const RowArray p = rows.p.row(r), grown_weights = (p + rows.growth.row(r)).min(1.0);
    const double top = len_k ? grown_weights.maxCoeff() : 0;
    const RowArray off = code_roundings(grown_weights, top);
    const double steps = std::min(seen.row(r).sum() / kStep + 1, static_cast<double>(kPart) / kStep);
    const double rho = off.sum(), lambda = (kStep + 1) * kCut * steps;
    const Eigen::Index at = static_cast<Eigen::Index>(row) * dv;
    const RowArray out = Eigen::Map<const RowArray>(result.out.data() + at, dv).unaryExpr(&finite_or_0);
    const auto of_keys = [&](const RowArray& weights, const Matrix& values) {
      return RowArray(times(weights.matrix(), values).row(0).array());
    };
    const RowArray cap = largest + out.abs();
    const RowArray grown = of_keys(rows.growth.row(r), operands.v_abs).min(cap);
    const RowArray all = of_keys(grown_weights, operands.v_abs).min(largest);
    const RowArray rounded = of_keys(off, operands.v_abs).min(all);
    const RowArray cut = lambda * (all + rounded);
    const double p_max = len_k ? p.maxCoeff() : 1;
    const RowArray turned = of_keys(off, (v.rowwise() - out.matrix()).cwiseAbs());
    const double left = std::max(1 - rho, 0.0) * (1 - lambda);
    const RowArray most = cap / (1 - lambda);
    const RowArray bound =
        left > 0 ? (grown + (turned + rho * grown + cut + lambda * (out.abs() + grown)) / left).min(most) : most;
    // The largest weight of all is left at least.
    const double lse =
        len_k ? kSumExcess - std::log1p(-lambda) +
                    std::min(-std::log1p(-std::min(rho, 1.0)), 2 * kCodeRounding - std::log(std::max(p_max, 1e-300)))
              : 0;
    const RowArray lost = lost_of_values(p, v, 8).max(lost_of_values(p, Matrix::Ones(len_k, 1), 4)[0] * out.abs());
    const double lost_weight = (code_roundings(p, p_max) - kCodeRounding * p).sum();
    const double kept = std::max(1 - lost_weight, p_max);
    const RowArray likely = rounded_to_codes(p, v, out) / (kept * kept) +
                            of_keys(rows.expected.row(r), operands.v_squares).min(cap.square()) + lost.square();
    result.f8e4m3.lse_bound[row] = rows.weights[static_cast<std::size_t>(r)].lse_bound + lse;
    Eigen::Map<RowArray>(result.f8e4m3.bound.data() + at, dv) =
        bound + Eigen::Map<const RowArray>(result.bound.data() + at, dv);
    Eigen::Map<RowArray>(result.f8e4m3.spread.data() + at, dv) = likely.sqrt();
  }
}

}  // namespace rapt::testing::attention_rows
