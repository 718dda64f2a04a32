// Gradients beside those of the oracle.
#include <algorithm>
#include <array>
#include <cmath>

#include "operations/attention/oracle_inputs.hpp"
#include "operations/attention_backward/oracle.hpp"

namespace rapt::testing {

using namespace inputs;

Errors compare(const TensorView& gradient, const GradientReference& reference) {
  const double own_eps = unit_of(gradient.dtype), denormal = gradient.dtype == DType::f16 ? 0x1p-24 : 0;
  const double overflow =
      gradient.dtype == DType::f16 ? 65520 : std::ldexp(1 - (gradient.dtype == DType::bf16 ? 0x1p-9 : 0x1p-25), 128);
  Errors errors;
  double error_squares = 0, squares = 0, spread_squares = 0, elements = 0;
  std::array<std::int64_t, kMaxDims> index{};
  for (std::size_t at = 0; at < reference.value.size(); ++at) {
    std::int64_t offset = 0, rest = static_cast<std::int64_t>(at);
    for (auto dim = static_cast<std::size_t>(gradient.ndim); dim-- > 0;) {
      index[dim] = rest % gradient.shape[dim], rest /= gradient.shape[dim];
      offset += index[dim] * gradient.strides[dim];
    }
    if (!reference.computed[at]) continue;
    const double got = read_element(gradient.data, gradient.dtype, offset), want = reference.value[at];
    const double computed = reference.bound[at] + 8 * reference.eps * reference.magnitude[at];
    const double allowed = computed + own_eps * (std::abs(want) + computed) + denormal;
    if (!std::isfinite(got) || !std::isfinite(want)) {
      const bool overflows = std::abs(want) + allowed >= overflow && got == std::copysign(kInfinity, want);
      if (std::isfinite(want) ? !overflows : std::isfinite(got)) errors.nonfinite_agree = false;
      continue;
    }
    const double error = std::abs(got - want);
    errors.max_abs = std::max(errors.max_abs, error);
    errors.max_bound = std::max(errors.max_bound, share_of(error, allowed));
    elements += 1;
    error_squares += error * error;
    squares += want * want;
    spread_squares += std::pow(reference.spread[at], 2) + std::pow(own_eps * want, 2) + std::pow(denormal / 2, 2);
  }
  errors.max_abs_limit =
      reference.eps > 0 ? std::max(3 * reference.plain_error, reference.rounding_error) + 1e-5 : kInfinity;
  if (squares > 0) {
    errors.rel_frobenius = std::sqrt(error_squares / squares);
    const double likely = (std::sqrt(spread_squares) + 1e-37 * std::sqrt(elements)) / std::sqrt(squares);
    // Of few elements a norm may well be twice what is likely.
    errors.frobenius_limit = 5e-7 + likely * (1 + 3 / std::sqrt(elements));
  }
  return errors;
}

}  // namespace rapt::testing
