#include "operations/attention/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "operations/attention/oracle_inputs.hpp"
#include "support/parallel.hpp"

namespace rapt::testing {
namespace {

using namespace inputs;

constexpr std::int64_t kRowBlock = 64;
constexpr double kMaxOperandBytes = 0x1p31;  // of all groups that are computed at the same time

/// Arithmetic of f8e4m3, as Reference has it. Products that the tensor cores add to a sum at a time, and what they cut
/// of each of these addends, as a share of the largest; keys whose products with values are one such sum.
constexpr std::int64_t kStep = 32, kPart = 256;
constexpr double kCut = 0x1p-13;
/// Sums of scores are fp16 after each step. No score is past the largest one: queries are divided for that, and have
/// denormals.
constexpr double kHalf = 0x1p-11, kLargestScore = 65000, kLargestCode = 448, kMinNormalCode = 0x1p-6,
                 kHalfDenormalCode = 0x1p-10;
/// What a score is multiplied by is fp16, relative to a reference this many powers of two off the largest, at most; one
/// of them stands for what has only denormals.
constexpr double kOctavesOffTop = 4;
/// Codes are linear in scores and rounded: weights are 0.9576 to 1.1085 of what they should be, 1.033 but for 7.4 %.
/// What is below the least code becomes 0: up to 2^-6.9, where a row's largest weight is at least 2^4.
constexpr double kCodeRounding = 0.074, kMinWeight = 0x1.13p-11;
/// log(1.0331) - 0.02: of the sum of such weights, with what lse is corrected by.
constexpr double kSumExcess = 0.0126;

/// The types of a call, as far as they bound errors.
struct Types {
  DType inputs, out;  ///< the coarser of q and kv; quantised kv count as f32, which they are dequantised to
  double input_eps, out_eps;
  double overflow;  ///< the smallest number that rounds to Inf

  explicit Types(const AttentionArgs& args)
      : inputs(unit_of(args.kv.k.dtype) > unit_of(args.q.dtype) ? args.kv.k.dtype : args.q.dtype),
        out(args.out.dtype),
        input_eps(unit_of(inputs)),
        out_eps(unit_of(out)),
        overflow(out == DType::f16 ? 65520 : std::ldexp(1 - (out == DType::bf16 ? 0x1p-9 : 0x1p-25), 128)) {}

  double eps() const { return std::max(input_eps, out_eps); }
  /// Of an element, beyond fp32's: the contract's term, and the last place of tiny numbers.
  double rounding(double magnitude) const { return 8 * eps() * magnitude + denormal(); }
  /// The same where out is all that is rounded to its type.
  double rounding_once(double x) const { return out_eps * x + denormal(); }
  double denormal() const { return out == DType::f16 ? 0x1p-24 : 0; }
};

/// Turns the scores of one row into weights. Returns lse and its bound.
struct RowWeights {
  double lse = -kInfinity;
  double lse_bound = 0;
  bool broken = false;  ///< an attended score is NaN or +inf
};

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

/// The plain three steps in the precision of the inputs, on final scores: [rows, dv].
FloatMatrix plain_three_steps(const std::vector<std::vector<Score>>& scores, double sink, const FloatMatrix& factor,
                              const FloatMatrix& v, const Types& types) {
  FloatMatrix p(static_cast<Eigen::Index>(scores.size()), v.rows());
  for (Eigen::Index r = 0; r < p.rows(); ++r) {
    const std::vector<Score>& row = scores[static_cast<std::size_t>(r)];
    for (Eigen::Index j = 0; j < p.cols(); ++j)
      p(r, j) = rounded(static_cast<float>(row[static_cast<std::size_t>(j)].x), types.inputs);
    const float top = std::max(p.cols() ? p.row(r).maxCoeff() : static_cast<float>(sink), static_cast<float>(sink));
    if (top == -static_cast<float>(kInfinity)) {
      p.row(r).setZero();
      continue;
    }
    float sum = std::exp(static_cast<float>(sink) - top);
    for (Eigen::Index j = 0; j < p.cols(); ++j) sum += p(r, j) = std::exp(p(r, j) - top);
    for (Eigen::Index j = 0; j < p.cols(); ++j) p(r, j) = rounded(p(r, j) / sum, types.inputs);
  }
  FloatMatrix out = times_fp32(p.cwiseProduct(factor), v);
  return out.unaryExpr([&](float x) { return rounded(x, types.out); });
}

/// Reference::plain_error and rounding_error of the elements that were added.
struct PlainErrors {
  double plain = 0, rounding = 0;

  /// `got` is what the plain three steps give for an element.
  void add(const Types& types, double out, float got, double root_of_squares, double bound, double magnitude) {
    // What overflows is not an error.
    if (!(std::abs(out) + types.rounding(magnitude) < types.overflow)) return;
    const double error = std::abs(static_cast<double>(got) - out);
    plain = std::max(plain, std::isnan(error) ? kInfinity : error);
    rounding = std::max(rounding, types.out_eps * std::abs(out) + 4 * types.input_eps * root_of_squares + bound);
  }
  void join(Reference& result) const {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    result.plain_error = std::max(result.plain_error, plain);
    result.rounding_error = std::max(result.rounding_error, rounding);
  }
};

double finite_or_0(double x) {
  return std::isfinite(x) ? x : 0;
}

/// What rows are multiplied by, made once for all rows and heads that share keys and values.
struct Operands {
  Matrix k, k_magnitude, k_squares;  ///< [d, seen]
  /// [seen, dv]. A value that is not finite must reach the rows that attend it and no other, so it stays out of the
  /// products.
  Matrix v, v_abs, v_squares, v_magnitude;
  FloatMatrix v_fp32;
  Matrix largest;                        ///< [1, dv]: of v_abs
  std::vector<std::int64_t> not_finite;  ///< keys of values with something that is not

  Operands(const Keys& keys, const Keys& values)
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
};

/// Whether kernels may multiply in bf16 what is no number of bf16 by its type: codes all through.
bool may_be_widened(const AttentionArgs& args) {
  return args.q.dtype == DType::f8e4m3 && args.kv.k.dtype != DType::f32 && unit_of(args.kv.k.dtype) == 0;
}

/// The squares of what roundings of one row's weights to bf16 are likely to change: [1, dv].
RowArray rounded_weights(const Eigen::Ref<const RowArray>& p, const Matrix& v) {
  RowArray squares = RowArray::Zero(v.cols()), alike = squares;
  std::vector<std::pair<float, Eigen::Index>> keys;
  const double largest = p.size() ? p.maxCoeff() : 0;
  for (Eigen::Index j = 0; j < p.size(); ++j)
    if (p[j] > 0) keys.emplace_back(rounded(static_cast<float>(p[j] / largest), DType::bf16), j);
  std::sort(keys.begin(), keys.end());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    alike += 0x1p-8 * p[keys[i].second] * v.row(keys[i].second).array();
    if (i + 1 < keys.size() && keys[i + 1].first == keys[i].first) continue;
    squares += alike.square();
    alike.setZero();
  }
  return squares;
}

using Array = Eigen::Array<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// What rows [first, first + q.rows()) of a head make of the keys: [rows, seen].
struct Rows {
  Matrix dot, dot_abs, dot_squares;
  std::vector<std::vector<Score>> scores;
  std::vector<RowWeights> weights;
  Array p, growth, expected;

  Rows(const Head& head, const Operands& operands, const Matrix& q, std::int64_t first)
      : dot(times(q, operands.k)),
        dot_abs(times(q.cwiseAbs(), operands.k_magnitude)),
        dot_squares(times(q.cwiseAbs2(), operands.k_squares)) {
    attend(head, first, false, [](std::int64_t, std::int64_t) { return Lost(); });
  }

  /// With what each score has lost.
  template <class LostOf>
  void attend(const Head& head, std::int64_t first, bool in_halves, LostOf lost_of) {
    const TensorView& sinks = head.args.score.sinks;
    const double sink = sinks ? read_float(sinks, {head.h}) : -kInfinity;
    scores.assign(static_cast<std::size_t>(dot.rows()), std::vector<Score>(static_cast<std::size_t>(dot.cols())));
    weights.resize(scores.size());
    for (Array* a : {&p, &growth, &expected}) a->resize(dot.rows(), dot.cols());
    for (std::int64_t r = 0; r < dot.rows(); ++r) {
      std::vector<Score>& row = scores[static_cast<std::size_t>(r)];
      for (std::int64_t j = 0; j < dot.cols(); ++j)
        row[static_cast<std::size_t>(j)] =
            final_score(head, first + r, head.first + j, dot(r, j), dot_abs(r, j), dot_squares(r, j), lost_of(r, j));
      weights[static_cast<std::size_t>(r)] = softmax(row, sink, in_halves, p.row(r), growth.row(r), expected.row(r));
    }
  }
  bool sees(std::int64_t r, std::int64_t j) const {
    return scores[static_cast<std::size_t>(r)][static_cast<std::size_t>(j)].x != -kInfinity;
  }
};

/// Whether an entry may multiply codes of f8e4m3.
bool multiplies_codes(const AttentionArgs& args) {
  const ScoreSpec& s = args.score;
  return args.q.ndim == 4 && args.q.dtype == DType::f8e4m3 && args.kv.k.dtype == DType::f8e4m3 &&
         args.kv.v.dtype == DType::f8e4m3 && !Modifiers::any_given(s);
}

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

/// The bounds of entries that multiply codes of f8e4m3, beside those of fp32, which `result` has. Takes `rows` apart.
template <class Flat>
void bound_codes(const Head& head, const Operands& operands, const Matrix& q, std::int64_t first, Rows& rows,
                 Reference& result, Flat flat) {
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

/// The results of rows [first, first + count) of a head, written to `flat(row)`.
template <class Flat>
void run_block(const Head& head, const Operands& operands, const Matrix& q, std::int64_t first, Reference& result,
               Flat flat) {
  const Matrix& v = head.values.value;
  const std::int64_t count = q.rows(), len_k = v.rows(), dv = v.cols();
  Rows rows(head, operands, q, first);
  Array &p = rows.p, &growth = rows.growth, &expected = rows.expected;
  const TensorView& sinks = head.args.score.sinks;
  const double sink = sinks ? read_float(sinks, {head.h}) : -kInfinity;
  const std::optional<Dropout>& dropout = head.args.score.dropout;
  Matrix factor = Matrix::Ones(count, len_k);
  for (std::int64_t r = 0; dropout && r < count; ++r) {
    for (std::int64_t j = 0; j < len_k; ++j) {
      factor(r, j) = dropout_factor(*dropout, head.args.q.shape[1], head.n, head.h, first + r, head.first + j);
      p(r, j) *= factor(r, j), growth(r, j) *= factor(r, j), expected(r, j) *= factor(r, j) * factor(r, j);
    }
  }
  Matrix out = times(p.matrix(), operands.v);
  const Matrix magnitude = times(p.matrix(), operands.v_abs);
  const bool quantized = unit_of(head.args.kv.v.dtype) == 0 && head.args.kv.v.dtype != DType::f32;
  const Matrix summed = quantized ? Matrix(times(p.matrix(), operands.v_magnitude) * 1.25) : magnitude;
  const Matrix grown = times(growth.matrix(), operands.v_abs);
  const Matrix spread = times(expected.matrix(), operands.v_squares).cwiseSqrt();
  for (const std::int64_t j : operands.not_finite) {
    for (std::int64_t r = 0; r < count; ++r) {
      if (!rows.sees(r, j) || factor(r, j) == 0) continue;
      for (std::int64_t c = 0; c < dv; ++c) {
        if (!std::isfinite(v(j, c))) out(r, c) += p(r, j) * v(j, c);
      }
    }
  }
  const Types types(head.args);
  const bool halves = types.eps() > 0;
  const FloatMatrix plain =
      halves ? plain_three_steps(rows.scores, sink, factor.cast<float>(), operands.v_fp32, types) : FloatMatrix();
  const Matrix root_of_squares =
      halves ? Matrix(times(p.matrix().cwiseAbs2(), operands.v_squares).cwiseSqrt()) : Matrix();
  const double most = len_k ? factor.maxCoeff() : 1;
  PlainErrors plain_errors;
  for (std::int64_t r = 0; r < count; ++r) {
    const RowWeights& w = rows.weights[static_cast<std::size_t>(r)];
    const auto row = static_cast<std::size_t>(flat(first + r));
    result.lse[row] = w.lse;
    result.lse_bound[row] = w.lse_bound;
    result.computed[row] = 1;
    const RowArray of_bf16 = result.bf16_spread.empty() ? RowArray() : rounded_weights(p.row(r), operands.v);
    for (std::int64_t c = 0; c < dv; ++c) {
      const std::size_t at = row * static_cast<std::size_t>(dv) + static_cast<std::size_t>(c);
      result.out[at] = w.broken ? kNaN : out(r, c);
      const double cap = most * operands.largest(0, c) + std::abs(out(r, c));
      result.magnitude[at] = magnitude(r, c);
      result.bound[at] = std::min(grown(r, c), cap) + (dropout ? 18 : 16) * kUnit * summed(r, c) + 1e-37;
      result.spread[at] = std::min(spread(r, c), cap);
      if (of_bf16.size()) result.bf16_spread[at] = std::sqrt(of_bf16[c]);
      if (halves && std::isfinite(result.out[at]))
        plain_errors.add(types, out(r, c), plain(r, c), root_of_squares(r, c), result.bound[at], magnitude(r, c));
    }
  }
  plain_errors.join(result);
  if (!result.f8e4m3.bound.empty()) bound_codes(head, operands, q, first, rows, result, flat);
}

/// Every token by itself, over the keys of its list.
void run_gathered(const AttentionArgs& args, std::int64_t row_step, std::int64_t threads, Reference& result) {
  const std::int64_t b = args.q.shape[0], hq = args.q.shape[1], sq = args.q.shape[2], hk = args.kv.k.shape[1];
  const auto run_token = [&](std::int64_t token) {
    const std::int64_t n = token / sq, i = token % sq;
    if (i % row_step != 0 && i != sq - 1) return;
    const std::vector<Slot> slots = listed_slots(args.kv, n, i);
    std::optional<Keys> keys, values;
    std::optional<Operands> operands;
    for (std::int64_t h = 0; h < hq; ++h) {
      if (h % (hq / hk) == 0) {
        keys.emplace(args.kv, false, h / (hq / hk), slots);
        values.emplace(args.kv, true, h / (hq / hk), slots);
        operands.emplace(*keys, *values);
      }
      run_block({args, n, h, 0, 0, *keys, *values}, *operands, queries(args, n, h, i, 1), i, result,
                [&](std::int64_t row) { return (n * hq + h) * sq + row; });
    }
  };
  parallel_for(b * sq, threads, run_token);
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  const auto product = [](std::uint64_t a, std::uint64_t b) {
    return std::pair(static_cast<std::uint32_t>(a * b / 0x100000000), static_cast<std::uint32_t>(a * b % 0x100000000));
  };
  for (std::uint32_t round = 0; round < 10; ++round) {
    const auto [high_0, low_0] = product(0xD2511F53, counter[0]);
    const auto [high_1, low_1] = product(0xCD9E8D57, counter[2]);
    counter = {high_1 ^ counter[1] ^ (key[0] + round * 0x9E3779B9), low_1,
               high_0 ^ counter[3] ^ (key[1] + round * 0xBB67AE85), low_0};
  }
  return counter;
}

double dropout_factor(const Dropout& dropout, std::int64_t hq, std::int64_t n, std::int64_t h, std::int64_t i,
                      std::int64_t j) {
  if (dropout.p == 0) return 1;
  const auto word = [](auto x) { return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x) % 0x100000000); };
  const auto random = philox4x32({word(j / 8), word(i), word(n * hq + h), word(dropout.offset)},
                                 {word(dropout.seed), word(dropout.seed / 0x100000000 ^ dropout.offset / 0x100000000)});
  const double number = random[static_cast<std::size_t>(j % 8 / 2)] / (j % 2 ? 0x10000 : 1) % 0x10000;
  const double p = static_cast<double>(dropout.p);
  return number < std::round(p * 65536) ? 0 : 1 / (1 - p);
}

Reference oracle(const AttentionArgs& args, std::int64_t row_step) {
  const bool ragged_q = static_cast<bool>(args.cu_seqlens_q);
  const std::int64_t sequences = ragged_q ? args.cu_seqlens_q.shape[0] - 1 : args.q.shape[0];
  const std::int64_t hq = args.q.shape[1], hk = args.kv.k.shape[1];
  const std::int64_t sq = ragged_q ? 0 : args.q.shape[2];
  const std::int64_t all_rows = ragged_q ? args.q.shape[0] * hq : sequences * hq * sq;
  Reference result;
  result.dv = args.out.shape[static_cast<std::size_t>(args.out.ndim - 1)];
  const auto elements = static_cast<std::size_t>(all_rows * result.dv);
  for (auto* values : {&result.out, &result.magnitude, &result.bound, &result.spread}) values->assign(elements, kNaN);
  for (auto* values : {&result.lse, &result.lse_bound}) values->assign(static_cast<std::size_t>(all_rows), kNaN);
  result.computed.assign(static_cast<std::size_t>(all_rows), 0);
  if (may_be_widened(args)) result.bf16_spread.assign(elements, kNaN);
  if (multiplies_codes(args)) {
    for (auto* values : {&result.f8e4m3.bound, &result.f8e4m3.spread}) values->assign(elements, kNaN);
    result.f8e4m3.lse_bound.assign(static_cast<std::size_t>(all_rows), kNaN);
  }

  const std::int64_t threads = elements < 4096 ? 1 : cores();  // starting them takes longer than small problems
  if (!has_positions(args.kv)) {
    run_gathered(args, row_step, threads, result);
    return result;
  }
  // The rows of one sequence that share keys and values.
  const auto run_group = [&](std::int64_t n, std::int64_t kv_head) {
    const Range own_q = rows_of(args.cu_seqlens_q, n, sq);
    const std::int64_t len_k =
        args.kv.seqlens ? read_index(args.kv.seqlens, n) : rows_of(args.kv.cu_seqlens, n, args.kv.k.shape[2]).length;
    const std::int64_t offset = key_offset(args, own_q.length, len_k);
    const Range seen = seen_keys(args, own_q.length, len_k, offset);
    const Keys keys(args.kv, false, n, kv_head, seen.begin, seen.length);
    const Keys values(args.kv, true, n, kv_head, seen.begin, seen.length);
    const Operands operands(keys, values);
    std::vector<Range> blocks;
    const std::int64_t block = row_step > 1 ? 1 : kRowBlock, step = row_step > 1 ? row_step : kRowBlock;
    for (std::int64_t i = 0; i < own_q.length; i += step) blocks.push_back({i, std::min(block, own_q.length - i)});
    if (!blocks.empty() && blocks.back().begin + blocks.back().length < own_q.length)
      blocks.push_back({own_q.length - 1, 1});
    parallel_for(hq / hk * std::ssize(blocks), threads, [&](std::int64_t item) {
      const std::int64_t h = kv_head * (hq / hk) + item / std::ssize(blocks);
      const auto [first, count] = blocks[static_cast<std::size_t>(item % std::ssize(blocks))];
      const auto flat = [&](std::int64_t i) { return ragged_q ? (own_q.begin + i) * hq + h : (n * hq + h) * sq + i; };
      run_block({args, n, h, offset, seen.begin, keys, values}, operands,
                queries(args, n, h, own_q.begin + first, count), first, result, flat);
    });
  };
  // Groups share the cores where there are enough of them and their operands fit memory; else the blocks of each do.
  const TensorView& k = args.kv.k;
  const std::int64_t max_keys = args.kv.block_table  ? args.kv.block_table.shape[1] * k.shape[2]
                                : args.kv.cu_seqlens ? k.shape[0]
                                                     : k.shape[2];
  const auto width = args.q.shape[static_cast<std::size_t>(args.q.ndim - 1)] + result.dv;
  const double operand_bytes = 5 * sizeof(double) * static_cast<double>(max_keys) * static_cast<double>(width);
  const std::int64_t groups = sequences * hk;
  const bool by_groups = groups >= threads && static_cast<double>(threads) * operand_bytes <= kMaxOperandBytes;
  parallel_for(groups, by_groups ? threads : 1, [&](std::int64_t i) { run_group(i / hk, i % hk); });
  return result;
}

Errors compare(const AttentionArgs& args, const Reference& reference, Weights weights) {
  const bool ragged = args.out.ndim == 3;
  const TensorView out = args.out, lse = args.lse;
  const std::int64_t hq = out.shape[1], sq = ragged ? 0 : out.shape[2], dv = reference.dv,
                     step = out.strides[static_cast<std::size_t>(out.ndim - 1)];
  Types types(args);
  const bool widened = weights == Weights::bf16 && !reference.bf16_spread.empty();
  const bool codes = weights == Weights::f8e4m3;
  if (codes && reference.f8e4m3.bound.empty()) throw std::logic_error("an entry of f8e4m3 took another problem");
  if (widened) types.input_eps = unit_of(DType::bf16);
  const std::vector<double>& bound = codes ? reference.f8e4m3.bound : reference.bound;
  const std::vector<double>& spread = codes ? reference.f8e4m3.spread : reference.spread;
  Errors errors;
  double error_squares = 0, squares = 0, spread_squares = 0, rounding_squares = 0, elements = 0;
  for (std::size_t row = 0; row < reference.computed.size(); ++row) {
    if (!reference.computed[row]) continue;
    const auto flat = static_cast<std::int64_t>(row);
    const std::int64_t first =
        ragged ? offset_of(out, {flat / hq, flat % hq}) : offset_of(out, {flat / (hq * sq), flat / sq % hq, flat % sq});
    for (std::int64_t c = 0; c < dv; ++c) {
      const std::size_t at = row * static_cast<std::size_t>(dv) + static_cast<std::size_t>(c);
      const double got = read_element(out.data, out.dtype, first + c * step);
      const double want = reference.out[at];
      const double allowed = bound[at] + (codes ? types.rounding_once(std::abs(want) + bound[at])
                                                : types.rounding(reference.magnitude[at]));
      if (!std::isfinite(got) || !std::isfinite(want)) {
        const bool overflows = std::abs(want) + allowed >= types.overflow && got == std::copysign(kInfinity, want);
        if (std::isfinite(want) ? !overflows : std::isfinite(got)) errors.nonfinite_agree = false;
        continue;
      }
      if (std::abs(want) - allowed >= types.overflow) errors.nonfinite_agree = false;
      const double error = std::abs(got - want);
      errors.max_abs = std::max(errors.max_abs, error);
      errors.max_bound = std::max(errors.max_bound, share_of(error, allowed));
      elements += 1;
      error_squares += error * error;
      squares += want * want;
      spread_squares += spread[at] * spread[at];
      if (widened) rounding_squares += std::pow(reference.bf16_spread[at], 2);
      if (widened || codes) rounding_squares += std::pow(types.rounding_once(std::abs(want)), 2);
    }
    if (!lse) continue;
    const double got = ragged ? read_float(lse, {flat / hq, flat % hq})
                              : read_float(lse, {flat / (hq * sq), flat / sq % hq, flat % sq});
    const double want = reference.lse[row];
    if (!std::isfinite(got) || !std::isfinite(want)) {
      const bool agree = want == -kInfinity ? got == want : !std::isfinite(want) && !std::isfinite(got);
      if (!agree) errors.nonfinite_agree = false;
      continue;
    }
    const double error = std::abs(got - want);
    errors.lse_max = std::max(errors.lse_max, error);
    const double scores =
        codes ? reference.f8e4m3.lse_bound[row] : (types.input_eps > 0 ? 4 : 1) * reference.lse_bound[row];
    const double sum = 2 * (codes ? unit_of(DType::bf16) : types.input_eps);
    errors.lse_max_bound = std::max(errors.lse_max_bound, share_of(error, scores + sum));
  }
  const bool halves = types.eps() > 0;
  errors.frobenius_limit = halves && !codes ? kInfinity : 0;
  errors.max_abs_limit =
      halves && !widened && !codes ? std::max(2 * reference.plain_error, reference.rounding_error) + 1e-5 : kInfinity;
  // The bounds' 1e-37 is what tiny results may be off by; of results that are all zero a ratio says nothing.
  if (squares > 0) {
    errors.rel_frobenius = std::sqrt(error_squares / squares);
    double likely = std::sqrt(spread_squares) / 8;
    if (widened || codes) {  // of few elements a norm may well be twice what is likely
      likely = std::sqrt(spread_squares / (codes ? 1 : 64) + rounding_squares) * (1 + 3 / std::sqrt(elements));
    }
    if (widened || codes || !halves)
      errors.frobenius_limit = 1e-6 + (likely + 1e-37 * std::sqrt(elements)) / std::sqrt(squares);
  }
  return errors;
}

}  // namespace rapt::testing
