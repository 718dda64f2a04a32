// Rows of attention's oracle: their scores and weights, and how far these may be off. Results and bounds are made of
// them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "operations/attention/oracle_inputs.hpp"

namespace rapt::testing::attention_rows {

using namespace inputs;
using Array = Eigen::Array<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr double kHalf = 0x1p-11;  ///< unit roundoff of fp16

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

/// lse of a row, and its bound.
struct RowWeights {
  double lse = -kInfinity;
  double lse_bound = 0;
  bool broken = false;  ///< an attended score is NaN or +inf
};

inline double finite_or_0(double x) {
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

  Operands(const Keys& keys, const Keys& values);
};

/// What rows [first, first + q.rows()) of a head make of the keys: [rows, seen].
struct Rows {
  Matrix dot, dot_abs, dot_squares;
  std::vector<std::vector<Score>> scores;
  std::vector<RowWeights> weights;
  Array p, growth, expected;

  Rows(const Head& head, const Operands& operands, const Matrix& q, std::int64_t first);

  /// With what each score has lost, by row and key. `in_halves`: what scores are multiplied by is fp16.
  void attend(const Head& head, std::int64_t first, bool in_halves = false,
              const std::function<Lost(std::int64_t, std::int64_t)>& lost_of = {});
  bool sees(std::int64_t r, std::int64_t j) const {
    return scores[static_cast<std::size_t>(r)][static_cast<std::size_t>(j)].x != -kInfinity;
  }
};

}  // namespace rapt::testing::attention_rows
