// What the oracles of attention and of its gradients have in common: reading arguments in float64, and a score.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "operations/attention/case_modifiers.hpp"
#include "operations/attention/layouts.hpp"
#include "rapt/attention.hpp"
#include "support/tensor.hpp"

namespace rapt::testing::inputs {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using FloatMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowArray = Eigen::Array<double, 1, Eigen::Dynamic>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kUnit = 0x1p-24;

/// a * b. A function, for Eigen's products take seconds to compile, each pair of kinds of operands for itself.
Matrix times(const Matrix& a, const Matrix& b);
FloatMatrix times_fp32(const FloatMatrix& a, const FloatMatrix& b);

/// The part of `bound` that `error` makes use of. A bound that is not a number is no permission.
inline double share_of(double error, double bound) {
  const double share = error == 0 ? 0 : error / bound;
  return std::isnan(share) ? kInfinity : share;
}

/// Unit roundoff beyond fp32's own.
inline double unit_of(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0;
}

inline double read_float(const TensorView& t, std::initializer_list<std::int64_t> index) {
  return read_element(t.data, t.dtype, offset_of(t, index));
}

/// Offset of (n, h, i, j) in a tensor of 1 to 4 dimensions that broadcasts: sizes of 1, and missing ones in front.
inline std::int64_t broadcast_offset(const TensorView& t, std::initializer_list<std::int64_t> index) {
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
inline Range rows_of(const TensorView& cu_seqlens, std::int64_t n, std::int64_t dense) {
  if (!cu_seqlens) return {0, dense};
  const std::int64_t begin = read_index(cu_seqlens, n);
  return {begin, read_index(cu_seqlens, n + 1) - begin};
}

/// Number i of the row at `row` that lies `i` strides of `inner` on; two of i4x2 share a byte.
inline double read_code(const TensorView& t, std::int64_t row, std::int64_t inner, std::int64_t i) {
  if (t.dtype != DType::i4x2) return read_element(t.data, t.dtype, row + i * inner);
  const int byte = static_cast<const unsigned char*>(t.data)[row + i / 2 * inner];
  const int code = i % 2 ? byte / 16 : byte % 16;
  return code < 8 ? code : code - 16;
}

/// Offset of a head's row; sizes of 1 broadcast: those of scales and zeros, while of rows only the first is ever asked
/// for.
inline std::int64_t row_offset(const TensorView& t, Slot slot, std::int64_t h) {
  const std::int64_t entry = t.shape[0] == 1 ? 0 : slot.entry * t.strides[0];
  const std::int64_t row = t.ndim == 3 || t.shape[2] == 1 ? 0 : slot.row * t.strides[2];
  return entry + h * t.strides[1] + row;
}

/// Keys of a head as they count, and the magnitudes that roundings are relative to.
struct Keys {
  Matrix value, magnitude;

  /// Keys [first, first + count) of sequence n.
  Keys(const KvSource& kv, bool of_v, std::int64_t n, std::int64_t h, std::int64_t first, std::int64_t count)
      : Keys(kv, of_v, h, slots_of(kv, n, first, count)) {}

  /// Those that lie there.
  Keys(const KvSource& kv, bool of_v, std::int64_t h, const std::vector<Slot>& slots) {
    const auto count = static_cast<std::int64_t>(slots.size());
    const TensorView &t = of_v ? kv.v : kv.k, &scale = of_v ? kv.v_scale : kv.k_scale,
                     &zero = of_v ? kv.v_zero : kv.k_zero;
    const auto last = static_cast<std::size_t>(t.ndim - 1);
    const std::int64_t width = t.shape[last] * (t.dtype == DType::i4x2 ? 2 : 1);
    const TensorView tail = of_v ? TensorView() : kv.k_tail;
    const std::int64_t all = width + (tail ? tail.shape[last] : 0);
    value.resize(count, all), magnitude.resize(count, all);
    for (std::int64_t j = 0; j < count; ++j) {
      const Slot slot = slots[static_cast<std::size_t>(j)];
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
      for (std::int64_t i = width; i < all; ++i) {
        value(j, i) = read_element(tail.data, tail.dtype, row_offset(tail, slot, h) + (i - width) * tail.strides[last]);
        magnitude(j, i) = std::abs(value(j, i));
      }
    }
  }

 private:
  static std::vector<Slot> slots_of(const KvSource& kv, std::int64_t n, std::int64_t first, std::int64_t count) {
    std::vector<Slot> slots;
    for (std::int64_t j = first; j < first + count; ++j) slots.push_back(slot_of(kv, n, j));
    return slots;
  }
};

/// Rows [first, first + count) of one head as doubles.
inline Matrix rows(const TensorView& t, bool ragged, std::int64_t n, std::int64_t h, std::int64_t first,
                   std::int64_t count) {
  const std::int64_t width = t.shape[static_cast<std::size_t>(t.ndim - 1)];
  Matrix m(count, width);
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t c = 0; c < width; ++c) {
      m(i, c) = ragged ? read_float(t, {first + i, h, c}) : read_float(t, {n, h, first + i, c});
    }
  }
  return m;
}

/// Queries, likewise, as they count.
inline Matrix queries(const AttentionArgs& args, std::int64_t n, std::int64_t h, std::int64_t first,
                      std::int64_t count) {
  const bool ragged = args.q.ndim == 3;
  Matrix m = rows(args.q, ragged, n, h, first, count);
  for (std::int64_t i = 0; args.q_scale && i < count; ++i) {
    const Slot slot = ragged ? Slot{first + i, 0} : Slot{n, first + i};
    m.row(i) *= static_cast<double>(static_cast<const float*>(args.q_scale.data)[row_offset(args.q_scale, slot, h)]);
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

/// What the sum of a score's products is off by beyond fp32's roundings, at most and usually.
struct Lost {
  double bound = 0, sigma = 0;
};

/// A score after everything; -inf when masked.
inline Score final_score(const Head& head, std::int64_t i, std::int64_t j, double dot, double dot_abs,
                         double dot_squares, Lost lost = {}) {
  const ScoreSpec& spec = head.args.score;
  const Score masked{-kInfinity, 0, 0, 0, 0};
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
  const double x = scale * dot;
  const double dequantised = unit_of(head.args.kv.k.dtype) == 0 && head.args.kv.k.dtype != DType::f32 ? 2 : 0;
  const double rounded = head.args.q_scale ? 1 : 0;
  const double delta = std::abs(scale) * ((std::sqrt(d) + 6 + dequantised + rounded) * kUnit * dot_abs + lost.bound);
  const double sigma =
      std::abs(scale) * (std::sqrt(d / 3) * kUnit * (std::sqrt(dot_squares) + 2 * std::abs(dot)) + lost.sigma);
  const Score s = Modifiers::transformed(spec, {x, delta, sigma}, kUnit);
  const double operands = std::abs(s.x) + std::abs(bias) + std::abs(alibi);
  return {s.x + bias - alibi, s.delta + 8 * kUnit * operands, s.sigma + 4 * kUnit * operands, s.slope, s.slope_error};
}

/// The keys [begin, begin + length) that lengths, a ring's capacity and windows leave the rows of a sequence together:
/// what lies outside, table entries included, is nobody's to read.
inline Range seen_keys(const AttentionArgs& args, std::int64_t len_q, std::int64_t len_k, std::int64_t offset) {
  const ScoreSpec& spec = args.score;
  double begin = static_cast<double>(first_key(args.kv, len_k)), end = static_cast<double>(len_k);
  const double first_row = static_cast<double>(offset), last_row = first_row + static_cast<double>(len_q) - 1;
  if (spec.causal) end = std::min(end, last_row + 1);
  if (spec.window && spec.window->right >= 0)
    end = std::min(end, last_row + static_cast<double>(spec.window->right) + 1);
  if (spec.window && spec.window->left >= 0)
    begin = std::max(begin, first_row - static_cast<double>(spec.window->left));
  if (len_q == 0 || !(begin < end)) return {};
  return {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end - begin)};
}

inline std::int64_t key_offset(const AttentionArgs& args, std::int64_t len_q, std::int64_t len_k) {
  if (!args.score.align || args.score.align->kind == Align::Kind::top_left) return 0;
  return args.score.align->kind == Align::Kind::bottom_right ? len_k - len_q : args.score.align->value;
}

}  // namespace rapt::testing::inputs
