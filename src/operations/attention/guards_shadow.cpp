// Rows of attention and its gradients that are computed again, in float64.
#include <algorithm>
#include <cmath>
#include <limits>

#include "guards/guards.hpp"
#include "operations/attention/guards_row.hpp"

namespace rapt {
namespace {

using std::int64_t;
using Guard = GuardReport::Guard;

// A row of dq, and how far a kernel may be from it.
class AttentionBackwardRow : private AttentionRow {
 public:
  using AttentionRow::heads;
  using AttentionRow::is_bounded;
  using AttentionRow::tokens;

  AttentionBackwardRow(const AttentionBackwardArgs& args, const Call& call);

  void compute(int64_t token, int64_t q_head);
  // As AttentionRow's, of dq.
  std::optional<Result> first_off(double tolerance) const;

 private:
  const AttentionBackwardParams& b_;
  std::vector<double> dq_, dq_bound_;  // [d]
};

AttentionBackwardRow::AttentionBackwardRow(const AttentionBackwardArgs& args, const Call& call)
    : AttentionRow(args.kv, args.score, std::get<AttentionBackwardProblem>(call.problem),
                   std::get<AttentionBackwardParams>(call.params)),
      b_(std::get<AttentionBackwardParams>(call.params)) {}

// dq = scale sum_j P_j (dP_j - delta) f_j k_j, where P_j = e^(x_j - lse), dP_j = dout . v_j and delta = dout . out -
// dlse. Names and bounds are the contract's.
void AttentionBackwardRow::compute(int64_t token, int64_t q_head) {
  begin(token, q_head);
  score_keys();
  const auto number = [&](const void* data, DType type, const Strides& stride, int64_t c) {
    return static_cast<double>(element_of(row_of(data, type, stride), type, stride.d, c));
  };
  const double lse = number(b_.lse, DType::f32, b_.lse_stride, 0);
  const double dlse = b_.dlse ? number(b_.dlse, DType::f32, b_.dlse_stride, 0) : 0;
  const double units_of_dot = static_cast<double>(b_.dv + 6) * kUnit;
  double delta = -dlse, of_delta = 0;  // and the sum of its terms' magnitudes
  std::vector<double> dout(static_cast<std::size_t>(b_.dv));
  for (int64_t c = 0; c < b_.dv; ++c) {
    const double g = dout[static_cast<std::size_t>(c)] = number(b_.dout, b_.dout_type, b_.dout_stride, c);
    const double term = g * number(b_.out, b_.out_type, b_.out_stride, c);
    delta += term, of_delta += std::abs(term);
  }
  const double delta_error = (units_of_dot + eps_of(b_.out_type)) * of_delta;

  const auto d = static_cast<std::size_t>(b_.d);
  const auto n = static_cast<double>(keys_.size());
  const double eps = std::max(input_eps_, eps_of(b_.dout_type));
  dq_.assign(d, 0), dq_bound_.assign(d, 0);
  for (const Key& key : keys_) {
    if (lse == -std::numeric_limits<double>::infinity()) break;  // a row without keys
    double dp = 0, of_dp = 0;
    if (is_kept(key)) {
      read_row(values(), key.j);
      for (std::size_t c = 0; c < dout.size(); ++c) dp += dout[c] * row_[c], of_dp += std::abs(dout[c] * row_[c]);
      dp *= kept(), of_dp *= kept();
    }
    const double x = key.x - shift_, p = std::min(std::exp(x - lse), 1.0);
    const double e =
        std::min(key.delta + 40 * kUnit * (std::abs(lse) + std::abs(shift_) + 1) + 2 * kUnit * (std::abs(x - lse) + 6),
                 kMaxExponent);
    const double ds = p * (dp - delta);
    const double ds_error = p * (std::expm1(e) * std::abs(dp - delta) +
                                 std::exp(e) * (units_of_dot * of_dp + delta_error +
                                                4 * kUnit * (std::abs(dp) + std::abs(delta) + std::abs(dlse)))) +
                            (p < kSmallWeight ? std::abs(ds) : 0);
    const double dx = ds * key.slope, dx_error = ds_error * key.slope + std::abs(ds) * key.slope_delta;
    if (!(of_dp <= kMaxFp32 && of_delta <= kMaxFp32)) is_bounded = false;
    read_row(keys(), key.j);
    for (std::size_t c = 0; c < d; ++c) {
      const double k = scale_ * row_[c];
      dq_[c] += dx * k;
      dq_bound_[c] += dx_error * std::abs(k) + ((200 + n / 64) * kUnit + 8 * eps) * std::abs(dx * k);
    }
  }
  const DType type = b_.grad_q.type;
  for (std::size_t c = 0; c < d; ++c) {
    dq_bound_[c] += std::max(eps_of(type), kUnit) * std::abs(dq_[c]) + tiny_of(type);
    if (!(std::abs(dq_[c]) + dq_bound_[c] <= largest_of(type))) dq_[c] = std::numeric_limits<double>::quiet_NaN();
  }
}

std::optional<AttentionRow::Result> AttentionBackwardRow::first_off(double tolerance) const {
  const Gradient& g = b_.grad_q;
  const void* const row = row_of(g.data, g.type, g.stride);
  for (int64_t c = 0; c < b_.d; ++c) {
    const auto at = static_cast<std::size_t>(c);
    const auto value = static_cast<double>(element_of(row, g.type, g.stride.d, c));
    if (is_off(value, dq_[at], tolerance * dq_bound_[at]))
      return Result{"dq", index(c), value, dq_[at], tolerance * dq_bound_[at]};
  }
  return {};
}

// The n-th of numbers below `count` that lie evenly among them, however many there are.
int64_t spread(std::uint64_t n, int64_t count) {
  constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;  // of 2^64
  const double share = static_cast<double>(n * kGoldenRatio >> 11) * 0x1p-53;
  return std::min(static_cast<int64_t>(share * static_cast<double>(count)), count - 1);
}

template <class Row>
void compare(Row row, int rows, double tolerance, std::uint64_t number, Reports& reports) {
  const int64_t all = row.tokens() * row.heads(), n = std::min<int64_t>(rows, all);
  for (int64_t i = 0; i < n; ++i) {
    const auto sample = number * static_cast<std::uint64_t>(rows) + static_cast<std::uint64_t>(i);
    const int64_t at = n == all ? i : spread(sample, all);
    row.compute(at / row.heads(), at % row.heads());
    if (!row.is_bounded) {
      reports.skip(Guard::shadow, "rows with numbers past the ranges for which the contract has bounds");
    } else if (const auto off = row.first_off(tolerance)) {
      return reports.add(Guard::shadow, {off->tensor, off->index}, off->value, off->wanted, off->bound);
    }
  }
}

}  // namespace

void compare_with_shadow(const WatchedCall<AttentionArgs>& w, int rows, double tolerance, std::uint64_t number,
                         Reports& reports) {
  const AttentionRow row(w.args.kv, w.args.score, std::get<AttentionProblem>(w.call.problem),
                         std::get<AttentionParams>(w.call.params));
  compare(row, rows, tolerance, number, reports);
}

void compare_with_shadow(const WatchedCall<AttentionBackwardArgs>& w, int rows, double tolerance, std::uint64_t number,
                         Reports& reports) {
  if (!w.args.dq) return reports.skip(Guard::shadow, "of gradients, the shadow is of dq alone");
  compare(AttentionBackwardRow(w.args, w.call), rows, tolerance, number, reports);
}

}  // namespace rapt
