#include "operations/delta_rule/oracle.hpp"

#include <algorithm>
#include <cmath>

#include "operations/delta_rule/oracle_inputs.hpp"

namespace rapt::testing {
namespace {

using namespace inputs;
using std::int64_t;

constexpr double kTiny = 1e-36;     // kernels take denormal numbers for 0
constexpr std::size_t kBlock = 64;  // tokens that give to each other by products of their rows

class Oracle {
 public:
  Oracle(const DeltaRuleArgs& args, const TensorView& initial, const DeltaRuleSubset& subset, DType operands)
      : in_(args),
        initial_(initial),
        subset_(subset),
        steps_(args.state_slots.ndim == 2 ? args.state_slots.shape[1] : 0),
        operand_(unit_of(operands)) {}

  DeltaRuleReference run() {
    for (Row* of_out : {&r_.out, &r_.out_sigma, &r_.out_drift})
      of_out->resize(static_cast<std::size_t>(in_.rows * std::max(in_.hq, in_.h) * in_.dv));
    r_.computed.resize(r_.out.size());
    for (Row* of_state : {&r_.state, &r_.state_sigma, &r_.state_drift})
      of_state->resize(static_cast<std::size_t>(in_.b * std::max<int64_t>(steps_, 1) * in_.h * in_.d * in_.dv));
    r_.state_computed.resize(r_.state.size());
    for (int64_t head = 0; head < in_.b * in_.h; ++head)
      if (head % subset_.heads == 0 || head + 1 == in_.b * in_.h) run_head(head / in_.h, head % in_.h);
    return std::move(r_);
  }

 private:
  int64_t slot(int64_t n, int64_t step) const {
    const TensorView& slots = in_.args.state_slots;
    if (!slots) return n;
    const int64_t at = n * slots.strides[0] + (slots.ndim == 2 ? step * slots.strides[1] : 0);
    return slots.dtype == DType::i64 ? static_cast<const int64_t*>(slots.data)[at]
                                     : static_cast<const std::int32_t*>(slots.data)[at];
  }

  void run_head(int64_t n, int64_t h) {
    const Range tokens = in_.tokens(n);
    std::vector<DeltaRuleToken> all;
    for (int64_t t = 0; t < tokens.length; ++t) all.push_back(in_.token(n, tokens.begin + t, h));
    if (operand_ > 0) {
      of_keys_.clear();
      of_queries_.assign(static_cast<std::size_t>(in_.reads), {});
      for (std::size_t i = 0; i < all.size(); ++i) {
        of_keys_.push_back(pairs(all, i, all[i].k));
        for (std::size_t r = 0; r < of_queries_.size(); ++r) of_queries_[r].push_back(pairs(all, i, all[i].q[r]));
      }
    }
    for (int64_t j = 0; j < in_.dv; ++j)
      if (j % subset_.columns == 0 || j + 1 == in_.dv) run_column(n, h, j, tokens, all);
  }

  // What rounding operands may change, in squares: of the product of a row of token i and the key of each token of its
  // block up to i, the latest first, both the product's and its terms'.
  static Row pairs(const std::vector<DeltaRuleToken>& all, std::size_t i, const Row& row) {
    Row result, decayed = row;
    for (std::size_t back = 0; back < std::min(kBlock, i + 1); ++back) {
      double product = 0, squares = 0;
      for (std::size_t c = 0; c < row.size(); ++c) {
        if (back > 0) decayed[c] *= all[i - back + 1].decay[c];
        const double term = decayed[c] * all[i - back].k[c];
        product += term, squares += square(term);
      }
      result.push_back(2 * square(product) + 2 * squares);
    }
    return result;
  }
  // Of what is read by these products from what tokens wrote, `written`, and from the state before them: the largest of
  // the latest states, as squares.
  double operand_variance(const Row& row, const Row& largest, const Row& pairs, const Row& written,
                          std::size_t token) const {
    double sum = 0;
    for (std::size_t c = 0; c < row.size(); ++c) sum += 2 * square(row[c]) * largest[c];
    for (std::size_t back = 0; back < pairs.size(); ++back)
      if (token - back < written.size()) sum += pairs[back] * square(written[token - back]);
    return square(operand_) * sum;
  }

  void run_column(int64_t n, int64_t h, int64_t j, const Range& tokens, const std::vector<DeltaRuleToken>& all) {
    const auto d = static_cast<std::size_t>(in_.d);
    // Of q and k, when they are normalised: each element's own, and what the norm is off by.
    const double row_error = in_.args.l2norm_qk ? kUnit * (3 + std::sqrt(static_cast<double>(in_.d)) / 4) : kUnit;
    const bool drifts = in_.args.g && in_.args.g.ndim == 1;
    Row s(d), variance(d), drift(d), before(d), largest(d), written;
    const int64_t accepted = in_.args.accepted ? read_index(in_.args.accepted, n) : 1, from = slot(n, accepted - 1);
    if (initial_ && from >= 0)
      for (std::size_t c = 0; c < d; ++c) s[c] = read_float(initial_, {from, h, static_cast<int64_t>(c), j});
    for (int64_t t = 0; t < tokens.length; ++t) {
      const auto i = static_cast<std::size_t>(t);
      const DeltaRuleToken& token = all[i];
      double x = 0, squares = 0, of_k = 0, drift_of_k = 0;
      for (std::size_t c = 0; c < d; ++c) {
        const double decay = token.decay[c], k = token.k[c];
        s[c] *= decay;
        variance[c] = decay * decay * variance[c] + square(token.decay_error[c] * s[c]);
        drift[c] = decay * drift[c] + (drifts ? s[c] : 0);
        before[c] = s[c];
        largest[c] = std::max(square(decay) * largest[c], square(s[c]));
        if (!in_.has_delta) continue;
        x += k * s[c], squares += square(k * s[c]), of_k += k * k * variance[c], drift_of_k += k * drift[c];
      }
      const double v = in_.read(in_.args.v, n, tokens.begin + t, in_.v_head(h), j),
                   beta = in_.has_delta ? token.beta : 0;
      const double u = in_.has_delta ? beta * (v - x) : v;
      const double own =
          square(beta) *
              (square(sum_sigma(in_.d, squares, x)) + square(row_error * x) + square(kUnit) * (square(v) + square(x)) +
               (operand_ > 0 && in_.has_delta ? operand_variance(token.k, largest, of_keys_[i], written, i) : 0)) +
          square((2 * kUnit + token.beta_error) * u);
      for (std::size_t c = 0; c < d; ++c) {
        const double k = token.k[c], kept = square(1 - beta * k * k), write = k * u;
        s[c] += write;
        variance[c] = kept * variance[c] + square(beta * k) * std::max(of_k - k * k * variance[c], 0.0) + k * k * own +
                      square(2 * kUnit * before[c]) + square(kUnit * s[c]) + square((kUnit + row_error) * write) +
                      3 * square(operand_ * write);
        drift[c] -= beta * k * drift_of_k;
        largest[c] = std::max(largest[c], square(s[c]));
      }
      written.push_back(u);
      for (int64_t r = 0; r < in_.reads; ++r)
        read_out(n, h, r, j, tokens.begin + t, token, s, variance, drift, before, u, row_error,
                 operand_ > 0 ? operand_variance(token.q[static_cast<std::size_t>(r)], largest,
                                                 of_queries_[static_cast<std::size_t>(r)][i], written, i)
                              : 0);
      if (steps_ > 0) put_state(n * steps_ + t, h, j, s, variance, drift);
    }
    if (steps_ == 0) put_state(n, h, j, s, variance, drift);
  }

  void read_out(int64_t n, int64_t h, int64_t r, int64_t j, int64_t t, const DeltaRuleToken& token, const Row& s,
                const Row& variance, const Row& drift, const Row& before, double u, double row_error,
                double of_operands) {
    double y = 0, of_state = 0, of_write = 0, squares = 0, of_variance = 0, of_drift = 0;
    const Row& q = token.q[static_cast<std::size_t>(r)];
    for (std::size_t c = 0; c < s.size(); ++c) {
      y += q[c] * s[c];
      of_state += q[c] * before[c], of_write += q[c] * token.k[c] * u;
      squares += square(q[c] * before[c]) + square(q[c] * token.k[c] * u);
      of_variance += q[c] * q[c] * variance[c], of_drift += q[c] * drift[c];
    }
    const double sigma =
        std::sqrt(of_variance + square(sum_sigma(in_.d, squares, std::abs(of_state) + std::abs(of_write))) +
                  square((kUnit + row_error) * y) + of_operands);
    const int64_t heads = std::max(in_.hq, in_.h);
    const auto at = static_cast<std::size_t>((in_.row(n, t) * heads + in_.out_head(h, r)) * in_.dv + j);
    r_.out[at] = in_.scale * y, r_.out_sigma[at] = std::abs(in_.scale) * sigma,
    r_.out_drift[at] = std::abs(in_.scale * of_drift);
    r_.computed[at] = 1;
  }
  void put_state(int64_t state, int64_t h, int64_t j, const Row& s, const Row& variance, const Row& drift) {
    for (std::size_t c = 0; c < s.size(); ++c) {
      const auto at = static_cast<std::size_t>(((state * in_.h + h) * in_.d + static_cast<int64_t>(c)) * in_.dv + j);
      r_.state[at] = s[c], r_.state_sigma[at] = std::sqrt(variance[c]), r_.state_drift[at] = std::abs(drift[c]);
      r_.state_computed[at] = 1;
    }
  }

  const DeltaRuleInputs in_;
  const TensorView initial_;
  const DeltaRuleSubset subset_;
  const int64_t steps_;
  const double operand_;                      // what rounding an operand of a product changes it by
  std::vector<Row> of_keys_;                  // [tokens]: pairs() of the head's
  std::vector<std::vector<Row>> of_queries_;  // [reads][tokens]
  DeltaRuleReference r_;
};

}  // namespace

DeltaRuleReference oracle_delta_rule(const DeltaRuleArgs& args, const TensorView& initial,
                                     const DeltaRuleSubset& subset, DType operands) {
  return Oracle(args, initial, subset, operands).run();
}

double delta_rule_bound(double want, double sigma, double drift, DType dtype) {
  const double computed = 8 * sigma + 4 * kUnit * drift + kTiny;
  return computed + std::max(unit_of(dtype), kUnit) * (std::abs(want) + computed) + (dtype == DType::f16 ? 0x1p-24 : 0);
}

}  // namespace rapt::testing
