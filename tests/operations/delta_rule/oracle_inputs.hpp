// What the oracles of the delta rule and of its gradients have in common: sizes, and a token's inputs in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "operations/attention/oracle_inputs.hpp"
#include "rapt/delta_rule.hpp"

namespace rapt::testing::inputs {

using Row = std::vector<double>;

constexpr double kSmallest = 0x1p-126;  // normal number of fp32: kernels may take those below it for 0

inline double square(double x) {
  return x * x;
}
inline double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
inline double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}
/// How far a sum of n rounded products is likely to be off.
inline double sum_sigma(std::int64_t n, double squares, double sum) {
  return kUnit * std::sqrt(static_cast<double>(n) / 3 + 1) * (std::sqrt(squares) + 2 * std::abs(sum));
}

/// What a token says to one state head, beside v: inputs as they count, and their derivatives by what was given.
struct DeltaRuleToken {
  Row k, decay, decay_error;  // [d]; the last is relative
  std::vector<Row> q;         // of each query head that reads the state
  double k_factor;            // what the given k was multiplied by, for a norm of 1
  Row q_factor;               // likewise
  double beta, beta_error, beta_slope;
  Row g_slope, a_slope;              // [d]: of the log decay, by g (or dt_bias) and by a_log
  Row g_slope_error, a_slope_error;  // what rounding may make of them
};

struct DeltaRuleInputs {
  explicit DeltaRuleInputs(const DeltaRuleArgs& arguments)
      : args(arguments),
        ragged(args.cu_seqlens),
        dims(ragged ? 1 : 2),
        hq(args.q.shape[dims]),
        hk(args.k.shape[dims]),
        hv(args.v.shape[dims]),
        d(args.q.shape[dims + 1]),
        dv(args.v.shape[dims + 1]),
        h(std::max(hk, hv)),
        b(ragged ? args.cu_seqlens.shape[0] - 1 : args.q.shape[0]),
        reads(h > 0 ? std::max<std::int64_t>(hq / h, 1) : 1),
        rows(ragged ? args.q.shape[0] : b * args.q.shape[1]),
        has_delta(args.rule == UpdateRule::delta || args.rule == UpdateRule::gated_delta),
        scale(args.scale ? static_cast<double>(*args.scale) : 1 / std::sqrt(static_cast<double>(d))) {}

  Range tokens(std::int64_t n) const { return rows_of(args.cu_seqlens, n, args.q.shape[1]); }
  /// The row of a token of sequence n among those of all.
  std::int64_t row(std::int64_t n, std::int64_t t) const { return ragged ? t : n * args.q.shape[1] + t; }
  /// Heads that serve a state head; q: one of its readers.
  std::int64_t q_head(std::int64_t head, std::int64_t r) const { return hq >= h ? head * reads + r : head * hq / h; }
  std::int64_t k_head(std::int64_t head) const { return head * hk / h; }
  std::int64_t v_head(std::int64_t head) const { return head * hv / h; }
  /// Of out: a query head that several states serve has a result of each.
  std::int64_t out_head(std::int64_t head, std::int64_t r) const { return head * reads + r; }

  /// An element of a tensor whose rows belong to token `t` of sequence n.
  double read(const TensorView& tensor, std::int64_t n, std::int64_t t, std::int64_t head) const {
    return ragged ? read_float(tensor, {t, head}) : read_float(tensor, {n, t, head});
  }
  double read(const TensorView& tensor, std::int64_t n, std::int64_t t, std::int64_t head, std::int64_t c) const {
    return ragged ? read_float(tensor, {t, head, c}) : read_float(tensor, {n, t, head, c});
  }

  DeltaRuleToken token(std::int64_t n, std::int64_t t, std::int64_t head) const {
    DeltaRuleToken token;
    token.k_factor = read_row(args.k, n, t, k_head(head), token.k);
    for (std::int64_t r = 0; r < reads; ++r) {
      token.q.emplace_back();
      token.q_factor.push_back(read_row(args.q, n, t, q_head(head, r), token.q.back()));
    }
    for (std::int64_t c = 0; c < d; ++c) add_decay(token, n, t, head, c);
    token.beta = args.beta ? read(args.beta, n, t, head) : 1;
    token.beta_error = 0, token.beta_slope = 1;
    if (args.beta_sigmoid) {
      token.beta_error = 4 * kUnit;
      token.beta_slope = sigmoid(token.beta) * sigmoid(-token.beta);
      token.beta = sigmoid(token.beta);
    }
    if (args.beta_double) token.beta *= 2, token.beta_slope *= 2;
    return token;
  }

  const DeltaRuleArgs& args;
  const bool ragged;
  const std::size_t dims;  // before the heads
  const std::int64_t hq, hk, hv, d, dv, h, b, reads, rows;
  const bool has_delta;
  const double scale;

 private:
  double read_row(const TensorView& tensor, std::int64_t n, std::int64_t t, std::int64_t head, Row& row) const {
    double sum = 1e-6;
    for (std::int64_t c = 0; c < d; ++c) row.push_back(read(tensor, n, t, head, c)), sum += square(row.back());
    if (!args.l2norm_qk) return 1;
    for (double& x : row) x /= std::sqrt(sum);
    return 1 / std::sqrt(sum);
  }
  void add_decay(DeltaRuleToken& token, std::int64_t n, std::int64_t t, std::int64_t head, std::int64_t c) const {
    double g = 0, relative = 0, g_slope = 1, a_slope = 0, g_slope_error = 0, a_slope_error = 0;
    if (args.g) {
      const int rank = args.g.ndim - static_cast<int>(dims);
      g = args.g.ndim == 1 ? read_float(args.g, {head})
          : rank == 2      ? read(args.g, n, t, head, c)
                           : read(args.g, n, t, head);
      if (args.gate) {
        if (args.dt_bias)
          g += args.dt_bias.ndim == 2 ? read_float(args.dt_bias, {head, c}) : read_float(args.dt_bias, {head});
        const double rate = std::exp(args.a_log ? read_float(args.a_log, {head}) : 0);
        if (args.gate_lower_bound) {
          const double bound = static_cast<double>(*args.gate_lower_bound), x = rate * g, share = sigmoid(x);
          relative = 4 + 3 * std::abs(x);
          g_slope = bound * rate * share * sigmoid(-x);
          g_slope_error = kUnit * relative * std::abs(g_slope) +  // and 1 - share is a multiple of u
                          (4 * std::min(kUnit, sigmoid(-x)) * share + kSmallest) * std::abs(bound * rate);
          a_slope = g_slope * g, a_slope_error = g_slope_error * std::abs(g);
          g = bound * share;
        } else {
          relative = 4 + std::abs(g);
          g_slope = -rate * sigmoid(g), g_slope_error = kUnit * relative * std::abs(g_slope) + kSmallest * rate;
          g = -rate * softplus(g);
          a_slope = g, a_slope_error = kUnit * relative * std::abs(g) + kSmallest * rate;
        }
      }
    }
    token.decay.push_back(std::exp(g));
    token.decay_error.push_back(g == 0 ? 0 : kUnit * (1.5 + relative * std::min(std::abs(g), 1e3)));
    token.g_slope.push_back(g_slope), token.g_slope_error.push_back(g_slope_error);
    token.a_slope.push_back(a_slope), token.a_slope_error.push_back(a_slope_error);
  }
};

}  // namespace rapt::testing::inputs
