#include "operations/attention/oracle_rows.hpp"

#include <initializer_list>

namespace rapt::testing::attention_rows {
namespace {

/// What a score is multiplied by is fp16, relative to a reference this many powers of two off the largest, at most; one
/// of them stands for what has only denormals.
constexpr double kOctavesOffTop = 4;

/// Turns the scores of one row into weights.
RowWeights softmax(std::vector<Score>& scores, double sink, bool in_halves, Eigen::Ref<RowArray> p,
                   Eigen::Ref<RowArray> growth, Eigen::Ref<RowArray> expected) {
  p.setZero();
  growth.setZero();
  expected.setZero();
  double top = -kInfinity;
  bool broken = std::isnan(sink) || sink == kInfinity;
  for (const Score& s : scores) {
    broken = broken || std::isnan(s.x) || s.x == kInfinity;
    top = std::max(top, s.x);
  }
  if (broken) return {kNaN, kInfinity, true};
  if (top == -kInfinity) return {sink, sink == -kInfinity ? 0 : 40 * kUnit * (std::abs(sink) + 1), false};
  top = std::max(top, sink);
  // Exponents are rounded relative to a reference that lies up to 8 powers of two off the maximum.
  for (Score& s : scores) {
    if (s.x == -kInfinity) continue;
    const double exponent = top - s.x + 8 * std::log(2.0);
    s.delta += 2 * kUnit * exponent;
    s.sigma += kUnit * exponent / std::sqrt(3.0);
    if (!in_halves) continue;
    const double of_half = kHalf * (top - s.x + kOctavesOffTop * std::log(2.0));
    s.delta += of_half, s.sigma += of_half / std::sqrt(3.0);
  }
  double sum = std::exp(sink - top);
  const double grown_sink = sink == -kInfinity ? sink : sink - top + 8 * kUnit * std::abs(sink);
  double most = grown_sink;  // deltas of large scores are past what exp() has
  for (const Score& s : scores)
    if (s.x != -kInfinity) most = std::max(most, s.x - top + s.delta);
  double grown = std::exp(grown_sink - most);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    if (scores[j].x == -kInfinity) continue;
    sum += p[static_cast<Eigen::Index>(j)] = std::exp(scores[j].x - top);
    grown += std::exp(scores[j].x - top + scores[j].delta - most);
  }
  const double denominator = most + std::log(grown / sum);
  // A sink is rounded, too, and all weights with it.
  const double of_sink = sink == -kInfinity ? 0 : 6 * kUnit * std::abs(sink) * std::exp(sink - top) / sum;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const auto at = static_cast<Eigen::Index>(j);
    p[at] /= sum;
    if (scores[j].x == -kInfinity) continue;
    const double off = scores[j].delta + denominator, likely = scores[j].sigma + of_sink;
    if (p[at] > 0) {
      growth[at] = p[at] * std::expm1(std::min(off, 600.0));
      expected[at] = std::pow(p[at] * std::expm1(std::min(likely, 300.0)), 2);
    } else {  // a weight that float64 does not have may still become one
      const double log = scores[j].x - top - std::log(sum);
      growth[at] = std::exp(std::min(log + off, 600.0));
      expected[at] = std::exp(2 * std::min(log + likely, 300.0));
    }
  }
  const double lse = top + std::log(sum);
  return {lse, denominator + 40 * kUnit * (std::abs(lse) + 1), false};
}

}  // namespace

Operands::Operands(const Keys& keys, const Keys& values)
    : k(keys.value.transpose()),
      k_magnitude(keys.magnitude.transpose()),
      k_squares(keys.magnitude.cwiseAbs2().transpose()),
      v(values.value.unaryExpr(&finite_or_0)),
      v_abs(v.cwiseAbs()),
      v_squares(v.cwiseAbs2()),
      v_magnitude(values.magnitude.unaryExpr(&finite_or_0)),
      v_fp32(v.cast<float>()),
      largest(v.rows() ? Matrix(v_abs.colwise().maxCoeff()) : Matrix(Matrix::Zero(1, v.cols()))) {
  for (Eigen::Index j = 0; j < v.rows(); ++j) {
    if (!values.value.row(j).allFinite()) not_finite.push_back(j);
  }
}

Rows::Rows(const Head& head, const Operands& operands, const Matrix& q, std::int64_t first)
    : dot(times(q, operands.k)),
      dot_abs(times(q.cwiseAbs(), operands.k_magnitude)),
      dot_squares(times(q.cwiseAbs2(), operands.k_squares)) {
  attend(head, first);
}

void Rows::attend(const Head& head, std::int64_t first, bool in_halves,
                  const std::function<Lost(std::int64_t, std::int64_t)>& lost_of) {
  const TensorView& sinks = head.args.score.sinks;
  const double sink = sinks ? read_float(sinks, {head.h}) : -kInfinity;
  scores.assign(static_cast<std::size_t>(dot.rows()), std::vector<Score>(static_cast<std::size_t>(dot.cols())));
  weights.resize(scores.size());
  for (Array* a : {&p, &growth, &expected}) a->resize(dot.rows(), dot.cols());
  for (std::int64_t r = 0; r < dot.rows(); ++r) {
    std::vector<Score>& row = scores[static_cast<std::size_t>(r)];
    for (std::int64_t j = 0; j < dot.cols(); ++j)
      row[static_cast<std::size_t>(j)] = final_score(head, first + r, head.first + j, dot(r, j), dot_abs(r, j),
                                                     dot_squares(r, j), lost_of ? lost_of(r, j) : Lost());
    weights[static_cast<std::size_t>(r)] = softmax(row, sink, in_halves, p.row(r), growth.row(r), expected.row(r));
  }
}

}  // namespace rapt::testing::attention_rows
