#include "oracle/oracle.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>

#include "support/tensor.hpp"

namespace rapt::testing {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using FloatMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowArray = Eigen::Array<double, 1, Eigen::Dynamic>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kUnit = 0x1p-24;
constexpr std::int64_t kRowBlock = 64;

/// Unit roundoff beyond fp32's own.
double unit_of(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0;
}

/// The types of a call, as far as they bound errors.
struct Types {
  DType inputs, out;  ///< the coarser of q and kv; quantised kv count as f32, which they are dequantised to
  double input_eps, out_eps;

  explicit Types(const AttentionArgs& args)
      : inputs(unit_of(args.kv.k.dtype) > unit_of(args.q.dtype) ? args.kv.k.dtype : args.q.dtype),
        out(args.out.dtype),
        input_eps(unit_of(inputs)),
        out_eps(unit_of(out)) {}

  double eps() const { return std::max(input_eps, out_eps); }
  /// Of an element, beyond fp32's: the contract's term, and the last place of tiny numbers.
  double rounding(double magnitude) const { return 8 * eps() * magnitude + (out == DType::f16 ? 0x1p-24 : 0); }
  /// The smallest number that rounds to Inf.
  double overflow() const {
    return out == DType::f16 ? 65520 : std::ldexp(1 - (out == DType::bf16 ? 0x1p-9 : 0x1p-25), 128);
  }
};

std::int64_t offset_of(const Layout& layout, std::initializer_list<std::int64_t> index) {
  std::int64_t offset = 0;
  int dim = 0;
  for (std::int64_t i : index) offset += i * layout.strides[static_cast<std::size_t>(dim++)];
  return offset;
}

double read_float(const TensorView& t, std::initializer_list<std::int64_t> index) {
  return read_element(t.data, t.dtype, offset_of(t, index));
}

std::int64_t read_index(const TensorView& t, std::int64_t i) {
  const std::int64_t at = offset_of(t, {i});
  return t.dtype == DType::i64 ? static_cast<const std::int64_t*>(t.data)[at]
                               : static_cast<const std::int32_t*>(t.data)[at];
}

/// Offset of (n, h, i, j) in a tensor of 1 to 4 dimensions that broadcasts over the first three.
std::int64_t broadcast_offset(const TensorView& t, std::initializer_list<std::int64_t> index) {
  const int missing = 4 - t.ndim;
  std::int64_t offset = 0;
  int dim = 0;
  for (std::int64_t i : index) {
    const int own = dim++ - missing;
    if (own < 0) continue;
    const auto at = static_cast<std::size_t>(own);
    if (t.shape[at] != 1) offset += i * t.strides[at];
  }
  return offset;
}

struct Range {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

/// The rows of sequence n: a slice of a ragged tensor, or all of a dense one.
Range rows_of(const TensorView& cu_seqlens, std::int64_t n, std::int64_t dense) {
  if (!cu_seqlens) return {0, dense};
  const std::int64_t begin = read_index(cu_seqlens, n);
  return {begin, read_index(cu_seqlens, n + 1) - begin};
}

/// Number i of the row at `row` that lies `i` strides of `inner` on; two of i4x2 share a byte.
double read_code(const TensorView& t, std::int64_t row, std::int64_t inner, std::int64_t i) {
  if (t.dtype != DType::i4x2) return read_element(t.data, t.dtype, row + i * inner);
  const int byte = static_cast<const unsigned char*>(t.data)[row + i / 2 * inner];
  const int code = i % 2 ? byte / 16 : byte % 16;
  return code < 8 ? code : code - 16;
}

/// Where a row of keys or values lies: an index of the tensor's first dimension, and one of its rows if it has such.
struct Slot {
  std::int64_t entry, row;
};

Slot slot_of(const KvSource& kv, std::int64_t n, std::int64_t j) {
  switch (kv.kind) {
    case KvSource::Kind::strided:
      return {n, j};
    case KvSource::Kind::ragged:
      return {read_index(kv.cu_seqlens, n) + j, 0};
    case KvSource::Kind::ring:
      return {n, j % kv.k.shape[2]};
    case KvSource::Kind::paged:
      break;
  }
  const std::int64_t page_size = kv.k.shape[2];
  const std::int64_t at = n * kv.block_table.strides[0] + j / page_size * kv.block_table.strides[1];
  return {kv.block_table.dtype == DType::i64 ? static_cast<const std::int64_t*>(kv.block_table.data)[at]
                                             : static_cast<const std::int32_t*>(kv.block_table.data)[at],
          j % page_size};
}

/// Offset of a head's row; sizes of 1 broadcast: those of scales and zeros, while of rows only the first is ever asked
/// for.
std::int64_t row_offset(const TensorView& t, Slot slot, std::int64_t h) {
  const std::int64_t entry = t.shape[0] == 1 ? 0 : slot.entry * t.strides[0];
  const std::int64_t row = t.ndim == 3 || t.shape[2] == 1 ? 0 : slot.row * t.strides[2];
  return entry + h * t.strides[1] + row;
}

/// Keys [first, first + count) of a head as they count, and the magnitudes that roundings are relative to.
struct Keys {
  Matrix value, magnitude;

  Keys(const KvSource& kv, bool of_v, std::int64_t n, std::int64_t h, std::int64_t first, std::int64_t count) {
    const TensorView &t = of_v ? kv.v : kv.k, &scale = of_v ? kv.v_scale : kv.k_scale,
                     &zero = of_v ? kv.v_zero : kv.k_zero;
    const auto last = static_cast<std::size_t>(t.ndim - 1);
    const std::int64_t width = t.shape[last] * (t.dtype == DType::i4x2 ? 2 : 1);
    value.resize(count, width), magnitude.resize(count, width);
    for (std::int64_t j = 0; j < count; ++j) {
      const Slot slot = slot_of(kv, n, first + j);
      const std::int64_t row = row_offset(t, slot, h);
      for (std::int64_t i = 0; i < width; ++i) {
        const double code = read_code(t, row, t.strides[last], i);
        double s = 1, z = 0;
        const auto of_group = [&](const TensorView& own) {
          const std::int64_t group = width / own.shape[last];
          return static_cast<double>(
              static_cast<const float*>(own.data)[row_offset(own, slot, h) + i / group * own.strides[last]]);
        };
        if (scale) s = of_group(scale);
        if (zero) z = of_group(zero);
        value(j, i) = (code - z) * s;
        magnitude(j, i) = (std::abs(code) + std::abs(z)) * std::abs(s);
      }
    }
  }
};

/// Rows [first, first + count) of one head as doubles.
Matrix rows(const TensorView& t, bool ragged, std::int64_t n, std::int64_t h, std::int64_t first, std::int64_t count) {
  const std::int64_t width = t.shape[static_cast<std::size_t>(t.ndim - 1)];
  Matrix m(count, width);
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t c = 0; c < width; ++c) {
      m(i, c) = ragged ? read_float(t, {first + i, h, c}) : read_float(t, {n, h, first + i, c});
    }
  }
  return m;
}

/// One head of one sequence.
struct Head {
  const AttentionArgs& args;
  std::int64_t n, h;
  std::int64_t offset;        ///< row i sits at key position i + offset
  std::int64_t first;         ///< key of row 0 of k and v
  const Keys &keys, &values;  ///< [seen, d], [seen, dv]
};

/// A score after everything, its permitted error and its expected error; -inf when masked.
struct Score {
  double x, delta, sigma;
};

Score final_score(const Head& head, std::int64_t i, std::int64_t j, double dot, double dot_abs, double dot_squares) {
  const ScoreSpec& spec = head.args.score;
  const Score masked{-kInfinity, 0, 0};
  // Offsets and windows may be any int64; as doubles their sums do not overflow.
  const double key = static_cast<double>(j);
  const double position = static_cast<double>(i) + static_cast<double>(head.offset);
  if (spec.causal && key > position) return masked;
  if (spec.window) {
    if (spec.window->left >= 0 && key < position - static_cast<double>(spec.window->left)) return masked;
    if (spec.window->right >= 0 && key > position + static_cast<double>(spec.window->right)) return masked;
  }
  if (spec.mask) {
    const auto* mask = static_cast<const unsigned char*>(spec.mask.data);
    if (!mask[broadcast_offset(spec.mask, {head.n, head.h, i, j})]) return masked;
  }
  double bias = 0, alibi = 0;
  if (spec.bias)
    bias = read_element(spec.bias.data, spec.bias.dtype, broadcast_offset(spec.bias, {head.n, head.h, i, j}));
  if (bias == -kInfinity) return masked;
  if (spec.alibi) {
    const double slope =
        spec.alibi.ndim == 2 ? read_float(spec.alibi, {head.n, head.h}) : read_float(spec.alibi, {head.h});
    alibi = slope * std::abs(position - key);
  }
  const double d = static_cast<double>(head.keys.value.cols());
  const double scale = spec.scale ? *spec.scale : 1 / std::sqrt(d);
  double x = scale * dot;
  const double dequantised = unit_of(head.args.kv.k.dtype) == 0 && head.args.kv.k.dtype != DType::f32 ? 2 : 0;
  double delta = (std::sqrt(d) + 6 + dequantised) * kUnit * std::abs(scale) * dot_abs;
  double sigma = std::sqrt(d / 3) * kUnit * std::abs(scale) * (std::sqrt(dot_squares) + 2 * std::abs(dot));
  if (spec.softcap) {
    const double c = *spec.softcap;
    const auto cap = [c](double value) { return c * std::tanh(value / c); };
    delta = cap(x + delta) - cap(x - delta) + 4 * kUnit * c;
    sigma = cap(x + sigma) - cap(x - sigma) + 2 * kUnit * c;
    x = cap(x);
  }
  const double operands = std::abs(x) + std::abs(bias) + std::abs(alibi);
  return {x + bias - alibi, delta + 8 * kUnit * operands, sigma + 4 * kUnit * operands};
}

/// Turns the scores of one row into weights. Returns lse and its bound.
struct RowWeights {
  double lse = -kInfinity;
  double lse_bound = 0;
  bool broken = false;  ///< an attended score is NaN or +inf
};

RowWeights softmax(std::vector<Score>& scores, double sink, Eigen::Ref<RowArray> p, Eigen::Ref<RowArray> growth,
                   Eigen::Ref<RowArray> expected) {
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
  }
  double sum = std::exp(sink - top);
  double grown = sink == -kInfinity ? 0 : std::exp(std::min(sink - top + 8 * kUnit * std::abs(sink), 600.0));
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const double weight = p[static_cast<Eigen::Index>(j)] = std::exp(scores[j].x - top);
    sum += weight;
    grown += weight * std::exp(std::min(scores[j].delta, 600.0));
  }
  const double denominator = std::log(grown / sum);
  // A sink is rounded, too, and all weights with it.
  const double of_sink = sink == -kInfinity ? 0 : 6 * kUnit * std::abs(sink) * std::exp(sink - top) / sum;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const auto at = static_cast<Eigen::Index>(j);
    p[at] /= sum;
    if (p[at] == 0) continue;
    growth[at] = p[at] * std::expm1(std::min(scores[j].delta + denominator, 600.0));
    expected[at] = std::pow(p[at] * std::expm1(std::min(scores[j].sigma + of_sink, 300.0)), 2);
  }
  const double lse = top + std::log(sum);
  return {lse, denominator + 40 * kUnit * (std::abs(lse) + 1), false};
}

/// The plain three steps in the precision of the inputs, on final scores: [rows, dv].
FloatMatrix plain_three_steps(const std::vector<std::vector<Score>>& scores, double sink, const FloatMatrix& v,
                              const Types& types) {
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
  FloatMatrix out = p * v;
  return out.unaryExpr([&](float x) { return rounded(x, types.out); });
}

/// Takes note of what a 16-bit computation does to one element: `plain` is what the plain three steps give for it.
void note_plain(Reference& result, const Types& types, double out, float plain, double root_of_squares, double bound,
                double magnitude) {
  // What overflows is not an error.
  if (!(std::abs(out) + types.rounding(magnitude) < types.overflow())) return;
  const double error = std::abs(static_cast<double>(plain) - out);
  result.plain_error = std::max(result.plain_error, std::isnan(error) ? kInfinity : error);
  const double chance = types.out_eps * std::abs(out) + 4 * types.input_eps * root_of_squares + bound;
  result.rounding_error = std::max(result.rounding_error, chance);
}

/// The results of rows [first, first + count) of a head, written to `flat(row)`.
template <class Flat>
void run_block(const Head& head, const Matrix& q, std::int64_t first, Reference& result, Flat flat) {
  const Matrix &k = head.keys.value, &v = head.values.value;
  const std::int64_t count = q.rows(), len_k = k.rows(), dv = v.cols();
  const Matrix dot = q * k.transpose();
  const Matrix dot_abs = q.cwiseAbs() * head.keys.magnitude.transpose();
  const Matrix dot_squares = q.cwiseAbs2() * head.keys.magnitude.cwiseAbs2().transpose();
  // A value that is not finite must reach the rows that attend it and no other, so it stays out of the products.
  const auto finite = [](double x) { return std::isfinite(x) ? x : 0.0; };
  const Matrix finite_v = v.unaryExpr(finite), rounded_v = head.values.magnitude.unaryExpr(finite);
  const TensorView& sinks = head.args.score.sinks;
  const double sink = sinks ? read_float(sinks, {head.h}) : -kInfinity;

  Eigen::Array<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> p(count, len_k), growth(count, len_k),
      expected(count, len_k);
  std::vector<RowWeights> weights(static_cast<std::size_t>(count));
  std::vector<std::vector<Score>> scores(weights.size(), std::vector<Score>(static_cast<std::size_t>(len_k)));
  for (std::int64_t r = 0; r < count; ++r) {
    const auto at = static_cast<std::size_t>(r);
    for (std::int64_t j = 0; j < len_k; ++j) {
      scores[at][static_cast<std::size_t>(j)] =
          final_score(head, first + r, head.first + j, dot(r, j), dot_abs(r, j), dot_squares(r, j));
    }
    weights[at] = softmax(scores[at], sink, p.row(r), growth.row(r), expected.row(r));
  }
  Matrix out = p.matrix() * finite_v;
  const Matrix magnitude = p.matrix() * finite_v.cwiseAbs();
  const bool quantized = unit_of(head.args.kv.v.dtype) == 0 && head.args.kv.v.dtype != DType::f32;
  const Matrix summed = quantized ? Matrix(p.matrix() * rounded_v * 1.25) : magnitude;
  const Matrix grown = growth.matrix() * finite_v.cwiseAbs();
  const Matrix spread = (expected.matrix() * finite_v.cwiseAbs2()).cwiseSqrt();
  for (std::int64_t j = 0; j < len_k; ++j) {
    if (v.row(j).allFinite()) continue;
    for (std::int64_t r = 0; r < count; ++r) {
      if (scores[static_cast<std::size_t>(r)][static_cast<std::size_t>(j)].x == -kInfinity) continue;
      for (std::int64_t c = 0; c < dv; ++c) {
        if (!std::isfinite(v(j, c))) out(r, c) += p(r, j) * v(j, c);
      }
    }
  }
  const Types types(head.args);
  const bool halves = types.eps() > 0;
  const FloatMatrix plain = halves ? plain_three_steps(scores, sink, finite_v.cast<float>(), types) : FloatMatrix();
  const Matrix root_of_squares =
      halves ? Matrix((p.matrix().cwiseAbs2() * finite_v.cwiseAbs2()).cwiseSqrt()) : Matrix();
  const Matrix largest = len_k ? Matrix(finite_v.cwiseAbs().colwise().maxCoeff()) : Matrix(Matrix::Zero(1, dv));
  for (std::int64_t r = 0; r < count; ++r) {
    const RowWeights& w = weights[static_cast<std::size_t>(r)];
    const auto row = static_cast<std::size_t>(flat(first + r));
    result.lse[row] = w.lse;
    result.lse_bound[row] = w.lse_bound;
    result.computed[row] = 1;
    for (std::int64_t c = 0; c < dv; ++c) {
      const std::size_t at = row * static_cast<std::size_t>(dv) + static_cast<std::size_t>(c);
      result.out[at] = w.broken ? kNaN : out(r, c);
      const double cap = largest(0, c) + std::abs(out(r, c));
      result.magnitude[at] = magnitude(r, c);
      result.bound[at] = std::min(grown(r, c), cap) + 16 * kUnit * summed(r, c) + 1e-37;
      result.spread[at] = std::min(spread(r, c), cap);
      if (halves && std::isfinite(result.out[at]))
        note_plain(result, types, out(r, c), plain(r, c), root_of_squares(r, c), result.bound[at], magnitude(r, c));
    }
  }
}

/// The keys [begin, begin + length) that lengths, a ring's capacity and windows leave the rows of a sequence together:
/// what lies outside, table entries included, is nobody's to read.
Range seen_keys(const AttentionArgs& args, std::int64_t len_q, std::int64_t len_k, std::int64_t offset) {
  const ScoreSpec& spec = args.score;
  double begin = 0, end = static_cast<double>(len_k);
  if (args.kv.kind == KvSource::Kind::ring) begin = std::max(0.0, end - static_cast<double>(args.kv.k.shape[2]));
  const double first_row = static_cast<double>(offset), last_row = first_row + static_cast<double>(len_q) - 1;
  if (spec.causal) end = std::min(end, last_row + 1);
  if (spec.window && spec.window->right >= 0)
    end = std::min(end, last_row + static_cast<double>(spec.window->right) + 1);
  if (spec.window && spec.window->left >= 0)
    begin = std::max(begin, first_row - static_cast<double>(spec.window->left));
  if (len_q == 0 || !(begin < end)) return {};
  return {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end - begin)};
}

std::int64_t key_offset(const AttentionArgs& args, std::int64_t len_q, std::int64_t len_k) {
  if (!args.score.align || args.score.align->kind == Align::Kind::top_left) return 0;
  return args.score.align->kind == Align::Kind::bottom_right ? len_k - len_q : args.score.align->value;
}

}  // namespace

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

  for (std::int64_t n = 0; n < sequences; ++n) {
    const Range own_q = rows_of(args.cu_seqlens_q, n, sq);
    const std::int64_t len_k =
        args.kv.seqlens ? read_index(args.kv.seqlens, n) : rows_of(args.kv.cu_seqlens, n, args.kv.k.shape[2]).length;
    const std::int64_t offset = key_offset(args, own_q.length, len_k);
    const Range seen = seen_keys(args, own_q.length, len_k, offset);
    std::optional<Keys> keys, values;
    for (std::int64_t h = 0; h < hq; ++h) {
      if (h % (hq / hk) == 0) {
        keys.emplace(args.kv, false, n, h / (hq / hk), seen.begin, seen.length);
        values.emplace(args.kv, true, n, h / (hq / hk), seen.begin, seen.length);
      }
      const Head head{args, n, h, offset, seen.begin, *keys, *values};
      const auto flat = [&](std::int64_t i) { return ragged_q ? (own_q.begin + i) * hq + h : (n * hq + h) * sq + i; };
      const std::int64_t block = row_step > 1 ? 1 : kRowBlock;
      const std::int64_t step = row_step > 1 ? row_step : kRowBlock;
      for (std::int64_t i = 0; i < own_q.length; i += step) {
        const std::int64_t count = std::min(block, own_q.length - i);
        run_block(head, rows(args.q, ragged_q, n, h, own_q.begin + i, count), i, result, flat);
      }
      if (row_step > 1 && own_q.length > 0) {
        const std::int64_t last = own_q.length - 1;
        run_block(head, rows(args.q, ragged_q, n, h, own_q.begin + last, 1), last, result, flat);
      }
    }
  }
  return result;
}

namespace {

/// A bound that is not a number is no permission.
double share_of(double error, double bound) {
  const double share = error / bound;
  return std::isnan(share) ? kInfinity : share;
}

}  // namespace

Errors compare(const AttentionArgs& args, const Reference& reference, Tier tier) {
  const bool ragged = args.out.ndim == 3;
  const TensorView out = args.out, lse = args.lse;
  const std::int64_t hq = out.shape[1], sq = ragged ? 0 : out.shape[2], dv = reference.dv;
  const Types types(args);
  const double slack = tier == Tier::f32x3 ? 256 : 1;
  Errors errors;
  double error_squares = 0, squares = 0, spread_squares = 0, elements = 0;
  for (std::size_t row = 0; row < reference.computed.size(); ++row) {
    if (!reference.computed[row]) continue;
    const auto flat = static_cast<std::int64_t>(row);
    for (std::int64_t c = 0; c < dv; ++c) {
      const std::size_t at = row * static_cast<std::size_t>(dv) + static_cast<std::size_t>(c);
      const double got = ragged ? read_float(out, {flat / hq, flat % hq, c})
                                : read_float(out, {flat / (hq * sq), flat / sq % hq, flat % sq, c});
      const double want = reference.out[at];
      const double allowed = slack * reference.bound[at] + types.rounding(reference.magnitude[at]);
      if (!std::isfinite(got) || !std::isfinite(want)) {
        const bool overflows = std::abs(want) + allowed >= types.overflow() && got == std::copysign(kInfinity, want);
        if (std::isfinite(want) ? !overflows : std::isfinite(got)) errors.nonfinite_agree = false;
        continue;
      }
      if (std::abs(want) - allowed >= types.overflow()) errors.nonfinite_agree = false;
      const double error = std::abs(got - want);
      errors.max_abs = std::max(errors.max_abs, error);
      errors.max_bound = std::max(errors.max_bound, share_of(error, allowed));
      elements += 1;
      error_squares += error * error;
      squares += want * want;
      spread_squares += reference.spread[at] * reference.spread[at];
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
    const double scores = (types.input_eps > 0 ? 4 : 1) * slack * reference.lse_bound[row];
    errors.lse_max_bound = std::max(errors.lse_max_bound, share_of(error, scores + 2 * types.input_eps));
  }
  const bool halves = types.eps() > 0;
  errors.frobenius_limit = halves ? kInfinity : 0;
  errors.max_abs_limit =
      halves ? std::max(2 * reference.plain_error, slack * reference.rounding_error) + 1e-5 : kInfinity;
  // The bounds' 1e-37 is what tiny results may be off by; of results that are all zero a ratio says nothing.
  if (squares > 0) {
    errors.rel_frobenius = std::sqrt(error_squares / squares);
    const double likely = (std::sqrt(spread_squares) / 8 + 1e-37 * std::sqrt(elements)) / std::sqrt(squares);
    if (!halves) errors.frobenius_limit = (tier == Tier::f32x3 ? 2e-5 : 1e-6) + slack * likely;
  }
  return errors;
}

}  // namespace rapt::testing
