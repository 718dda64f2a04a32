#include "operations/delta_rule_backward/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "operations/delta_rule/oracle_inputs.hpp"

namespace rapt::testing {
namespace {

using namespace inputs;
using std::int64_t;
using Column = Eigen::VectorXd;
using Gradient = DeltaRuleGradient;

constexpr int64_t kBlock = 64;       // tokens whose states are kept at a time
constexpr int64_t kRunningSum = 24;  // tokens

Eigen::Map<const Column> column(const Row& row) {
  return {row.data(), static_cast<Eigen::Index>(row.size())};
}
Column squared(const Column& x) {
  return x.cwiseAbs2();
}
/// m of sums that are `sum` and whose squared terms add up to `squares`.
Column magnitude(const Column& squares, const Column& sum) {
  return squares.cwiseSqrt() + sum.cwiseAbs();
}

/// Of a token and state head, before norms, gate and sigmoid.
struct TokenGradient {
  std::vector<Column> dq;  // of each reader
  Column dk, dv, dg;       // dg: [d]
  Column g_terms;          // m of what dg differs by from the next token's: for each decay, squared
  double dbeta = 0;
};

/// The largest m of a state head in a sequence.
struct Largest {
  double q = 0, k = 0, v = 0, beta = 0, state = 0, g_start = 0;

  static void take(double& largest, const Column& m) { largest = std::max(largest, m.size() ? m.maxCoeff() : 0); }
};

class Oracle {
 public:
  explicit Oracle(const DeltaRuleBackwardArgs& args) : args_(args), in_(args.forward) {}

  DeltaRuleBackwardReference run(int64_t step) {
    const auto size = [](Gradient& gradient, const TensorView& of) {
      int64_t n = of ? 1 : 0;
      for (int dim = 0; dim < of.ndim; ++dim) n *= of.shape[static_cast<std::size_t>(dim)];
      gradient.value.resize(static_cast<std::size_t>(n)), gradient.sigma = gradient.value;
      gradient.computed.resize(gradient.value.size());
    };
    const DeltaRuleArgs& f = in_.args;
    size(r_.dq, f.q), size(r_.dk, f.k), size(r_.dv, f.v), size(r_.dg, f.g), size(r_.dbeta, f.beta);
    size(r_.dinitial_state, f.initial_state), size(r_.da_log, f.a_log), size(r_.ddt_bias, f.dt_bias);
    if (in_.h == 0) return std::move(r_);
    // State heads that no others share anything with: a multiple of how many share one of q, of k, and of v.
    const int64_t own = std::lcm(std::lcm(in_.h / std::min(in_.hq, in_.h), in_.h / in_.hk), in_.h / in_.hv);
    const int64_t sets = in_.b * in_.h / own;
    for (int64_t set = 0; set < sets; ++set)
      for (int64_t i = 0; i < own && (set % step == 0 || set + 1 == sets); ++i)
        run_head((set * own + i) / in_.h, (set * own + i) % in_.h);
    for (Gradient* sum : {&r_.da_log, &r_.ddt_bias, f.g.ndim == 1 ? &r_.dg : nullptr})
      for (std::size_t i = 0; sum && i < sum->value.size(); ++i)
        sum->computed[i] = in_.b == 0 || seen_[i / (sum->value.size() / static_cast<std::size_t>(in_.h))] == in_.b;
    return std::move(r_);
  }

 private:
  void run_head(int64_t n, int64_t h) {
    const Range tokens = in_.tokens(n);
    std::vector<DeltaRuleToken> all;
    std::vector<Column> v;
    for (int64_t t = 0; t < tokens.length; ++t) {
      all.push_back(in_.token(n, tokens.begin + t, h));
      v.emplace_back(in_.dv);
      for (int64_t j = 0; j < in_.dv; ++j) v.back()[j] = in_.read(in_.args.v, n, tokens.begin + t, in_.v_head(h), j);
    }
    const auto write = [&](int64_t t, const Matrix& s) -> Matrix {
      const DeltaRuleToken& token = all[static_cast<std::size_t>(t)];
      const Matrix decayed = column(token.decay).asDiagonal() * s;
      Column u = v[static_cast<std::size_t>(t)];
      if (in_.has_delta) u = token.beta * (u - decayed.transpose() * column(token.k));
      return decayed + column(token.k) * u.transpose();
    };
    std::vector<Matrix> starts;  // of blocks
    Matrix s = state(in_.args.initial_state, n, h);
    for (int64_t t = 0; t < tokens.length; ++t) {
      if (t % kBlock == 0) starts.push_back(s);
      s = write(t, s);
    }
    Matrix g = state(args_.dfinal_state, n, h);
    Largest m;
    m.state = g.size() ? g.cwiseAbs().maxCoeff() : 0;
    add_start(m, g.cwiseProduct(s));
    std::vector<TokenGradient> gradients(all.size());
    for (int64_t block = static_cast<int64_t>(starts.size()) - 1; block >= 0; --block) {
      const int64_t first = block * kBlock, end = std::min(first + kBlock, tokens.length);
      std::vector<Matrix> states = {starts[static_cast<std::size_t>(block)]};
      for (int64_t t = first; t < end; ++t) states.push_back(write(t, states.back()));
      for (int64_t t = end - 1; t >= first; --t) {
        const auto i = static_cast<std::size_t>(t), at = static_cast<std::size_t>(t - first);
        gradients[i] = step_back(n, h, tokens.begin + t, all[i], v[i], states[at], states[at + 1], g, m);
      }
    }
    const double length = static_cast<double>(tokens.length), d = static_cast<double>(in_.d);
    const double roundings =
        1 + (in_.args.l2norm_qk ? 2 : 0) + (in_.args.gate ? 4 : 0) + (in_.args.beta_sigmoid ? 1 : 0);
    const double dots = (d + static_cast<double>(in_.dv)) / 12;
    double sigma = std::sqrt(dots + roundings * length);
    if (in_.args.g && in_.args.g.ndim == 1) sigma += 1.5 * length / 8 + (in_.args.gate ? 4 : 0);
    sigma *= kUnit;
    for (std::size_t i = 0; i < all.size(); ++i) put_rows(n, h, tokens.begin, i, all[i], gradients[i], m, sigma);
    put_decay(n, h, tokens.begin, all, gradients, sigma * m.g_start, kUnit * std::sqrt(dots + roundings));
    if (in_.args.initial_state)
      for (int64_t c = 0; c < in_.d; ++c)
        for (int64_t j = 0; j < in_.dv; ++j)
          put(r_.dinitial_state, ((n * in_.h + h) * in_.d + c) * in_.dv + j, g(c, j), sigma * m.state);
    seen_.resize(static_cast<std::size_t>(in_.h)), ++seen_[static_cast<std::size_t>(h)];
  }

  Matrix state(const TensorView& states, int64_t n, int64_t h) const {
    Matrix s = Matrix::Zero(in_.d, in_.dv);
    for (int64_t c = 0; states && c < in_.d; ++c)
      for (int64_t j = 0; j < in_.dv; ++j) s(c, j) = read_float(states, {n, h, c, j});
    return s;
  }

  /// Terms [d][dv] of what sums of dg may start from.
  void add_start(Largest& m, const Matrix& terms) const {
    Largest::take(m.g_start, of_decay(magnitude(terms.cwiseAbs2().rowwise().sum(), terms.rowwise().sum())));
  }
  /// m of [d] as dg has it: for each channel, or of their sum.
  Column of_decay(const Column& channels) const {
    if (in_.args.g && in_.args.g.ndim == static_cast<int>(in_.dims) + 2) return channels;
    return Column::Constant(1, channels.norm());
  }

  /// One token's gradients; `g` becomes that of the state before it. S before and after it.
  TokenGradient step_back(int64_t n, int64_t h, int64_t t, const DeltaRuleToken& token, const Column& v,
                          const Matrix& before, const Matrix& after, Matrix& g, Largest& m) const {
    TokenGradient gradient;
    const Column k = column(token.k);
    Column g_terms = Column::Zero(in_.d);  // squared
    for (int64_t r = 0; r < in_.reads; ++r) {
      const Column q = column(token.q[static_cast<std::size_t>(r)]);
      Column dout = Column::Zero(in_.dv);
      for (int64_t j = 0; args_.dout && j < in_.dv; ++j) dout[j] = in_.read(args_.dout, n, t, in_.out_head(h, r), j);
      gradient.dq.emplace_back(in_.scale * (after * dout));
      const Column of_q = magnitude(square(in_.scale) * (after.cwiseAbs2() * squared(dout)), gradient.dq.back());
      Largest::take(m.q, of_q);
      g_terms += squared(q.cwiseProduct(of_q));
      g += in_.scale * q * dout.transpose();
    }
    const Matrix decayed = column(token.decay).asDiagonal() * before, g_squared = g.cwiseAbs2(),
                 decayed_squared = decayed.cwiseAbs2();
    const Column dd = g.transpose() * k, of_dd = magnitude(g_squared.transpose() * squared(k), dd);
    Column u = v, of_u = v.cwiseAbs(), de = Column::Zero(in_.dv), of_de = de;
    gradient.dv = dd;
    if (in_.has_delta) {
      const Column x = decayed.transpose() * k, e = v - x,
                   of_e = magnitude(squared(v) + decayed_squared.transpose() * squared(k), e);
      gradient.dbeta = dd.dot(e);
      m.beta = std::max(m.beta, of_dd.cwiseProduct(of_e).norm() + std::abs(gradient.dbeta));
      u = token.beta * e, of_u = std::abs(token.beta) * of_e;
      de = gradient.dv = token.beta * dd, of_de = std::abs(token.beta) * of_dd;
    }
    Largest::take(m.v, in_.has_delta ? of_de : of_dd);
    const Column written = g * u, erased = decayed * de;
    gradient.dk = written - erased;
    const Column of_k =
        magnitude(g_squared * squared(of_u) + decayed_squared * squared(of_de), written) + erased.cwiseAbs();
    Largest::take(m.k, of_k);
    g_terms += squared(k.cwiseProduct(of_k));
    gradient.g_terms = squared(of_decay(g_terms.cwiseSqrt()));
    m.state = std::max(m.state, (g.cwiseAbs() + k.cwiseAbs() * of_de.transpose()).maxCoeff());
    g -= k * de.transpose();
    const Matrix terms = g.cwiseProduct(decayed);
    gradient.dg = terms.rowwise().sum();
    add_start(m, terms);
    g = column(token.decay).asDiagonal() * g;
    return gradient;
  }

  static void put(Gradient& gradient, int64_t at, double value, double sigma) {
    const auto i = static_cast<std::size_t>(at);
    gradient.value[i] += value, gradient.sigma[i] += sigma, gradient.computed[i] = 1;
  }
  /// The row of a q or k that was multiplied by `factor` to become x.
  void put_row(Gradient& gradient, int64_t row, const Row& x, double factor, const Column& dx, double sigma) const {
    double along = 0, squares = 0;
    for (std::size_t c = 0; in_.args.l2norm_qk && c < x.size(); ++c) {
      const double term = x[c] * dx[static_cast<int64_t>(c)];
      along += term, squares += square(term);
    }
    const double relative = in_.args.l2norm_qk ? kUnit * (3 + std::sqrt(static_cast<double>(in_.d)) / 4) : 0;
    const double of_along = in_.args.l2norm_qk ? sigma + sum_sigma(in_.d, squares, along) : 0;
    for (std::size_t c = 0; c < x.size(); ++c) {
      const double y = dx[static_cast<int64_t>(c)], off = std::abs(x[c]);
      put(gradient, row * in_.d + static_cast<int64_t>(c), factor * (y - x[c] * along),
          factor * (sigma + off * of_along + relative * (std::abs(y) + 2 * off * std::abs(along))));
    }
  }
  void put_rows(int64_t n, int64_t h, int64_t begin, std::size_t i, const DeltaRuleToken& token,
                const TokenGradient& gradient, const Largest& m, double sigma) {
    const int64_t row = in_.row(n, begin + static_cast<int64_t>(i));
    for (int64_t r = 0; r < in_.reads; ++r) {
      const auto reader = static_cast<std::size_t>(r);
      put_row(r_.dq, row * in_.hq + in_.q_head(h, r), token.q[reader], token.q_factor[reader], gradient.dq[reader],
              sigma * m.q);
    }
    put_row(r_.dk, row * in_.hk + in_.k_head(h), token.k, token.k_factor, gradient.dk, sigma * m.k);
    for (int64_t j = 0; j < in_.dv; ++j)
      put(r_.dv, (row * in_.hv + in_.v_head(h)) * in_.dv + j, gradient.dv[j], sigma * m.v);
    if (in_.args.beta) {
      const double rounded = in_.args.beta_sigmoid ? 8 * kUnit * token.beta * std::abs(gradient.dbeta) : 0;
      put(r_.dbeta, row * in_.h + h, gradient.dbeta * token.beta_slope, sigma * m.beta * token.beta_slope + rounded);
    }
  }

  /// dg and what follows from it: sigma of what sums start from, and of a sum whose terms have an m of 1.
  void put_decay(int64_t n, int64_t h, int64_t begin, const std::vector<DeltaRuleToken>& all,
                 const std::vector<TokenGradient>& gradients, double start_sigma, double term_sigma) {
    const TensorView& g = in_.args.g;
    if (!g) return;
    const int64_t channels = of_decay(Column::Zero(in_.d)).size();
    const auto length = static_cast<int64_t>(all.size());
    const double together = std::sqrt(static_cast<double>(std::min(kRunningSum, length)));
    double da_log = 0, of_a_log = 0, a_squares = 0;
    for (int64_t c = 0; c < channels; ++c) {
      const auto at = static_cast<std::size_t>(c);
      double sum = 0, of_sum = 0, squares = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        const DeltaRuleToken& token = all[i];
        double terms = 0;
        for (std::size_t later = i; later < std::min(all.size(), i + kRunningSum); ++later)
          terms += gradients[later].g_terms[c];
        const double sigma = start_sigma + term_sigma * std::sqrt(terms);
        const double dg = channels > 1 ? gradients[i].dg[c] : gradients[i].dg.sum();
        const double own = std::abs(dg) * (kUnit * std::abs(token.g_slope[at]) + token.g_slope_error[at]);
        if (g.ndim > 1)
          put(r_.dg, (in_.row(n, begin + static_cast<int64_t>(i)) * in_.h + h) * channels + c, dg * token.g_slope[at],
              sigma * std::abs(token.g_slope[at]) + own);
        sum += dg * token.g_slope[at], of_sum += own, squares += square(sigma * token.g_slope[at]);
        da_log += dg * token.a_slope[at], a_squares += square(sigma * token.a_slope[at]);
        of_a_log += std::abs(dg) * (kUnit * std::abs(token.a_slope[at]) + token.a_slope_error[at]);
      }
      of_sum += together * std::sqrt(squares);
      if (g.ndim == 1) put(r_.dg, h, sum, of_sum);
      if (in_.args.dt_bias) put(r_.ddt_bias, h * channels + c, sum, of_sum);
    }
    if (in_.args.a_log) put(r_.da_log, h, da_log, of_a_log + together * std::sqrt(a_squares));
  }

  const DeltaRuleBackwardArgs& args_;
  const DeltaRuleInputs in_;
  std::vector<int64_t> seen_;  // sequences of each head
  DeltaRuleBackwardReference r_;
};

}  // namespace

DeltaRuleBackwardReference oracle_delta_rule_backward(const DeltaRuleBackwardArgs& args, int64_t step) {
  return Oracle(args).run(step);
}

}  // namespace rapt::testing
