#include "oracle/oracle_delta_rule.hpp"

#include <algorithm>
#include <cmath>

#include "oracle/inputs.hpp"

namespace rapt::testing {
namespace {

using namespace inputs;
using std::int64_t;
using Row = std::vector<double>;

constexpr double kTiny = 1e-36;  // kernels take denormal numbers for 0

double square(double x) {
  return x * x;
}
/// Of a sum of n rounded products.
double sum_sigma(int64_t n, double squares, double sum) {
  return kUnit * std::sqrt(static_cast<double>(n) / 3 + 1) * (std::sqrt(squares) + 2 * std::abs(sum));
}
double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

/// What a token says to one state head, beside v.
struct Token {
  Row k, decay, decay_error;  // [d]; the last is relative
  std::vector<Row> q;         // of each query head that reads the state
  double beta, beta_error;
};

class Oracle {
 public:
  Oracle(const DeltaRuleArgs& args, const TensorView& initial, const DeltaRuleSubset& subset)
      : args_(args),
        initial_(initial),
        subset_(subset),
        ragged_(args.cu_seqlens),
        heads_(ragged_ ? 1 : 2),
        hq_(args.q.shape[heads_]),
        hk_(args.k.shape[heads_]),
        hv_(args.v.shape[heads_]),
        d_(args.q.shape[heads_ + 1]),
        dv_(args.v.shape[heads_ + 1]),
        h_(std::max(hk_, hv_)),
        b_(ragged_ ? args.cu_seqlens.shape[0] - 1 : args.q.shape[0]),
        steps_(args.state_slots.ndim == 2 ? args.state_slots.shape[1] : 0),
        reads_(h_ > 0 ? std::max<int64_t>(hq_ / h_, 1) : 1),
        has_delta_(args.rule == UpdateRule::delta || args.rule == UpdateRule::gated_delta),
        scale_(args.scale ? static_cast<double>(*args.scale) : 1 / std::sqrt(static_cast<double>(d_))) {}

  DeltaRuleReference run() {
    const int64_t rows = ragged_ ? args_.q.shape[0] : b_ * args_.q.shape[1];
    for (Row* of_out : {&r_.out, &r_.out_sigma, &r_.out_drift})
      of_out->resize(static_cast<std::size_t>(rows * std::max(hq_, h_) * dv_));
    r_.computed.resize(r_.out.size());
    for (Row* of_state : {&r_.state, &r_.state_sigma, &r_.state_drift})
      of_state->resize(static_cast<std::size_t>(b_ * std::max<int64_t>(steps_, 1) * h_ * d_ * dv_));
    r_.state_computed.resize(r_.state.size());
    for (int64_t head = 0; head < b_ * h_; ++head)
      if (head % subset_.heads == 0 || head + 1 == b_ * h_) run_head(head / h_, head % h_);
    return std::move(r_);
  }

 private:
  /// An element of a tensor whose rows belong to token `t` of sequence n.
  double read(const TensorView& tensor, int64_t n, int64_t t, int64_t h) const {
    return ragged_ ? read_float(tensor, {t, h}) : read_float(tensor, {n, t, h});
  }
  double read(const TensorView& tensor, int64_t n, int64_t t, int64_t h, int64_t c) const {
    return ragged_ ? read_float(tensor, {t, h, c}) : read_float(tensor, {n, t, h, c});
  }
  Row read_row(const TensorView& tensor, int64_t n, int64_t t, int64_t h) const {
    Row row(static_cast<std::size_t>(d_));
    for (int64_t c = 0; c < d_; ++c) row[static_cast<std::size_t>(c)] = read(tensor, n, t, h, c);
    if (!args_.l2norm_qk) return row;
    double sum = 1e-6;
    for (const double x : row) sum += x * x;
    for (double& x : row) x /= std::sqrt(sum);
    return row;
  }
  int64_t slot(int64_t n, int64_t step) const {
    const TensorView& slots = args_.state_slots;
    if (!slots) return n;
    const int64_t at = n * slots.strides[0] + (slots.ndim == 2 ? step * slots.strides[1] : 0);
    return slots.dtype == DType::i64 ? static_cast<const int64_t*>(slots.data)[at]
                                     : static_cast<const std::int32_t*>(slots.data)[at];
  }

  Token token_of(int64_t n, int64_t t, int64_t h) const {
    Token token;
    token.k = read_row(args_.k, n, t, h * hk_ / h_);
    for (int64_t r = 0; r < reads_; ++r)
      token.q.push_back(read_row(args_.q, n, t, hq_ >= h_ ? h * reads_ + r : h * hq_ / h_));
    for (int64_t c = 0; c < d_; ++c) {
      double g = 0, relative = 0;
      if (args_.g) {
        const int rank = args_.g.ndim - static_cast<int>(heads_);
        g = args_.g.ndim == 1 ? read_float(args_.g, {h})
            : rank == 2       ? read(args_.g, n, t, h, c)
                              : read(args_.g, n, t, h);
        if (args_.gate) {
          if (args_.dt_bias)
            g += args_.dt_bias.ndim == 2 ? read_float(args_.dt_bias, {h, c}) : read_float(args_.dt_bias, {h});
          const double rate = std::exp(args_.a_log ? read_float(args_.a_log, {h}) : 0);
          if (args_.gate_lower_bound) {
            relative = 4 + 3 * std::abs(rate * g);
            g = static_cast<double>(*args_.gate_lower_bound) * sigmoid(rate * g);
          } else {
            relative = 4 + std::abs(g);
            g = -rate * softplus(g);
          }
        }
      }
      token.decay.push_back(std::exp(g));
      token.decay_error.push_back(g == 0 ? 0 : kUnit * (1.5 + relative * std::min(std::abs(g), 1e3)));
    }
    token.beta = args_.beta ? read(args_.beta, n, t, h) : 1;
    if (args_.beta_sigmoid) token.beta = sigmoid(token.beta);
    if (args_.beta_double) token.beta *= 2;
    token.beta_error = args_.beta_sigmoid ? 4 * kUnit : 0;
    return token;
  }

  void run_head(int64_t n, int64_t h) {
    const Range tokens = rows_of(args_.cu_seqlens, n, args_.q.shape[1]);
    std::vector<Token> all;
    for (int64_t t = 0; t < tokens.length; ++t) all.push_back(token_of(n, tokens.begin + t, h));
    for (int64_t j = 0; j < dv_; ++j)
      if (j % subset_.columns == 0 || j + 1 == dv_) run_column(n, h, j, tokens, all);
  }

  void run_column(int64_t n, int64_t h, int64_t j, const Range& tokens, const std::vector<Token>& all) {
    const auto d = static_cast<std::size_t>(d_);
    // Of q and k, when they are normalised: each element's own, and what the norm is off by.
    const double row_error = args_.l2norm_qk ? kUnit * (3 + std::sqrt(static_cast<double>(d_)) / 4) : kUnit;
    const bool drifts = args_.g && args_.g.ndim == 1;
    Row s(d), variance(d), drift(d), before(d);
    const int64_t accepted = args_.accepted ? read_index(args_.accepted, n) : 1, from = slot(n, accepted - 1);
    if (initial_ && from >= 0)
      for (std::size_t c = 0; c < d; ++c) s[c] = read_float(initial_, {from, h, static_cast<int64_t>(c), j});
    for (int64_t t = 0; t < tokens.length; ++t) {
      const Token& token = all[static_cast<std::size_t>(t)];
      double x = 0, squares = 0, of_k = 0, drift_of_k = 0;
      for (std::size_t c = 0; c < d; ++c) {
        const double decay = token.decay[c], k = token.k[c];
        s[c] *= decay;
        variance[c] = decay * decay * variance[c] + square(token.decay_error[c] * s[c]);
        drift[c] = decay * drift[c] + (drifts ? s[c] : 0);
        before[c] = s[c];
        if (!has_delta_) continue;
        x += k * s[c], squares += square(k * s[c]), of_k += k * k * variance[c], drift_of_k += k * drift[c];
      }
      const double v = read(args_.v, n, tokens.begin + t, h * hv_ / h_, j), beta = has_delta_ ? token.beta : 0;
      const double u = has_delta_ ? beta * (v - x) : v;
      const double own = square(beta) * (square(sum_sigma(d_, squares, x)) + square(row_error * x) +
                                         square(kUnit) * (square(v) + square(x))) +
                         square((2 * kUnit + token.beta_error) * u);
      for (std::size_t c = 0; c < d; ++c) {
        const double k = token.k[c], kept = square(1 - beta * k * k), write = k * u;
        s[c] += write;
        variance[c] = kept * variance[c] + square(beta * k) * std::max(of_k - k * k * variance[c], 0.0) + k * k * own +
                      square(2 * kUnit * before[c]) + square(kUnit * s[c]) + square((kUnit + row_error) * write);
        drift[c] -= beta * k * drift_of_k;
      }
      for (int64_t r = 0; r < reads_; ++r)
        read_out(n, h, r, j, tokens.begin + t, token, s, variance, drift, before, u, row_error);
      if (steps_ > 0) put_state(n * steps_ + t, h, j, s, variance, drift);
    }
    if (steps_ == 0) put_state(n, h, j, s, variance, drift);
  }

  void read_out(int64_t n, int64_t h, int64_t r, int64_t j, int64_t t, const Token& token, const Row& s,
                const Row& variance, const Row& drift, const Row& before, double u, double row_error) {
    double y = 0, of_state = 0, of_write = 0, squares = 0, of_variance = 0, of_drift = 0;
    const Row& q = token.q[static_cast<std::size_t>(r)];
    for (std::size_t c = 0; c < s.size(); ++c) {
      y += q[c] * s[c];
      of_state += q[c] * before[c], of_write += q[c] * token.k[c] * u;
      squares += square(q[c] * before[c]) + square(q[c] * token.k[c] * u);
      of_variance += q[c] * q[c] * variance[c], of_drift += q[c] * drift[c];
    }
    const double sigma =
        std::sqrt(of_variance + square(sum_sigma(d_, squares, std::abs(of_state) + std::abs(of_write))) +
                  square((kUnit + row_error) * y));
    const int64_t heads = std::max(hq_, h_), row = ragged_ ? t : n * args_.q.shape[1] + t;
    // A query head that several states serve has a result of each.
    const auto at = static_cast<std::size_t>((row * heads + h * reads_ + r) * dv_ + j);
    r_.out[at] = scale_ * y, r_.out_sigma[at] = std::abs(scale_) * sigma,
    r_.out_drift[at] = std::abs(scale_ * of_drift);
    r_.computed[at] = 1;
  }
  void put_state(int64_t state, int64_t h, int64_t j, const Row& s, const Row& variance, const Row& drift) {
    for (std::size_t c = 0; c < s.size(); ++c) {
      const auto at = static_cast<std::size_t>(((state * h_ + h) * d_ + static_cast<int64_t>(c)) * dv_ + j);
      r_.state[at] = s[c], r_.state_sigma[at] = std::sqrt(variance[c]), r_.state_drift[at] = std::abs(drift[c]);
      r_.state_computed[at] = 1;
    }
  }

  const DeltaRuleArgs& args_;
  const TensorView initial_;
  const DeltaRuleSubset subset_;
  const bool ragged_;
  const std::size_t heads_;
  const int64_t hq_, hk_, hv_, d_, dv_, h_, b_, steps_, reads_;
  const bool has_delta_;
  const double scale_;
  DeltaRuleReference r_;
};

}  // namespace

DeltaRuleReference oracle_delta_rule(const DeltaRuleArgs& args, const TensorView& initial,
                                     const DeltaRuleSubset& subset) {
  return Oracle(args, initial, subset).run();
}

double delta_rule_bound(double want, double sigma, double drift, DType dtype) {
  const double computed = 8 * sigma + 4 * kUnit * drift + kTiny;
  return computed + std::max(unit_of(dtype), kUnit) * (std::abs(want) + computed) + (dtype == DType::f16 ? 0x1p-24 : 0);
}

}  // namespace rapt::testing
