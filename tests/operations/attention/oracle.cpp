#include "operations/attention/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "operations/attention/oracle_float8.hpp"
#include "operations/attention/oracle_rows.hpp"
#include "support/parallel.hpp"

namespace rapt::testing {
namespace {

using namespace attention_rows;

constexpr std::int64_t kRowBlock = 64;
constexpr double kMaxOperandBytes = 0x1p31;  // of all groups that are computed at the same time

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

}  // namespace rapt::testing
