// Results beside those of the oracle.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "operations/attention/oracle.hpp"
#include "operations/attention/oracle_rows.hpp"

namespace rapt::testing {

using namespace attention_rows;

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
