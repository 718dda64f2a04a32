// merge_states: rows of attention over disjoint sets of keys -> rows over all of them,
//   lse = log(sum e^lse_i),  out = sum e^(lse_i - lse) out_i.
// Weights are float64, since lse_i - lse cancels; sums are fp32, in the order of the states.
#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/carver.hpp"
#include "cpu/tile/element.hpp"
#include "cpu/tile/panel.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// weight[i] = e^(lse_i - lse); returns lse. No weight is written unless it is finite.
float weigh(const MergeStatesParams& p, const RowPosition& at, double* weight) {
  float largest = -kInfinity;
  for (std::int64_t i = 0; i < p.count; ++i) {
    const float lse = p.states[i].lse[row_index(p.states[i].lse_stride, at)];
    weight[i] = static_cast<double>(lse);
    if (!(lse <= largest)) largest = lse;  // a NaN too, and it stays
    if (largest != largest) return largest;
  }
  if (is_inf(largest)) return largest;
  const auto top = static_cast<double>(largest);
  double sum = 0;
  for (std::int64_t i = 0; i < p.count; ++i) sum += __builtin_exp(weight[i] - top);
  const double total = top + __builtin_log(sum);
  for (std::int64_t i = 0; i < p.count; ++i) weight[i] = __builtin_exp(weight[i] - total);
  return static_cast<float>(total);
}

void merge(const MergeStatesParams& p, std::int64_t row, double* weight) {
  const RowPosition at = position_of(p, row);
  const float lse = weigh(p, at, weight);
  const bool finite = abs_of(lse) < kInfinity;
  const vec nothing(lse < kInfinity ? 0.f : __builtin_nanf(""));
  with_element(p.out_type, [&](auto element) {
    auto* const out = static_cast<decltype(element)*>(p.out) + row_index(p.out_stride, at);
    for (std::int64_t c = 0; c < p.dv; c += kLanes) {
      const std::int64_t n = min(kLanes, p.dv - c);
      vec sum = nothing;
      for (std::int64_t i = 0; finite && i < p.count; ++i) {
        const AttentionState& state = p.states[i];
        if (state.lse[row_index(state.lse_stride, at)] == -kInfinity) continue;  // whatever its output holds
        const vec x = with_element(state.out_type, [&](auto from) {
          const auto* begin = static_cast<const decltype(from)*>(state.out) + row_index(state.out_stride, at);
          return load_strided(begin + c * state.out_stride.d, state.out_stride.d, n);
        });
        const vec weighted = vec(static_cast<float>(weight[i])) * x;
        // No weight is 0, but it may be too small for a float: it hides no infinity.
        sum = sum + xsimd::select(xsimd::abs(x) == vec(kInfinity), x, weighted);
      }
      store_strided(out + c * p.out_stride.d, p.out_stride.d, n, sum);
    }
  });
  if (p.lse) p.lse[row_index(p.lse_stride, at)] = lse;
}

void run(const MergeStatesParams& p, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  for (std::int64_t row = begin; row < end; ++row) merge(p, row, reinterpret_cast<double*>(scratch));
}

std::size_t scratch_bytes(std::int64_t count, std::int64_t) noexcept {
  Carver carver(nullptr);
  carver.take<double>(count);
  return carver.used();
}

}  // namespace

const MergeStatesKernel kMergeStates = {
    .facts = {.operation = Operation::merge_states, .phase = Phase::all, .arithmetic = "f32", .dtypes = kFloatTypes},
    .scratch_bytes = scratch_bytes,
    .run = run};

}  // namespace rapt::cpu::RAPT_ISA
