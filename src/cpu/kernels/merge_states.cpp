// merge_states: rows of attention over disjoint sets of keys -> rows over all of them,
//   lse = log(sum e^lse_i),  out = sum e^(lse_i - lse) out_i.
// Weights are float64, since lse_i - lse cancels; sums are fp32, in the order of the states.
#include "cpu/kernels/merge_states_table.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/dtype.hpp"
#include "cpu/tile/head.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Computes weight[i] = e^(lse_i - lse) and returns lse. Weights are valid only if lse is finite.
float weigh(const MergeStatesParams& p, const RowPosition& at, double* weight) {
  float largest = -kInfinity;
  for (std::int64_t i = 0; i < p.count; ++i) {
    const float lse = p.states[i].lse[row_index(p.states[i].lse_stride, at)];
    weight[i] = static_cast<double>(lse);
    if (!(lse <= largest)) largest = lse;  // also takes a NaN, which then stays
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

struct MergeStatesScratch {
  double* weight;  // [count]
  float* sum;      // [dv]

  MergeStatesScratch(BumpAllocator& allocator, std::int64_t count, std::int64_t dv) {
    weight = allocator.take<double>(count);
    sum = allocator.take<float>(round_up(dv, kLanes));
  }
};

// sum += weight * row. The weight is not 0, but as a float it may be; then infinities of the row still count.
template <class T>
void add_row(const T* row, std::int64_t inner, std::int64_t n, float weight, float* sum) {
  const auto add = [&](std::int64_t c, vec x) __attribute__((always_inline)) {
    const vec weighted = vec(weight) * x;
    store(sum + c, load(sum + c) + xsimd::select(xsimd::abs(x) == vec(kInfinity), x, weighted));
  };
  std::int64_t c = 0;
  for (; inner == 1 && c + kLanes <= n; c += kLanes) add(c, load_any(row + c));
  for (; c < n; c += kLanes) add(c, load_strided(row + c * inner, inner, min(kLanes, n - c)));
}

void merge(const MergeStatesParams& p, std::int64_t row, const MergeStatesScratch& w) {
  const RowPosition at = position_of(p, row);
  const float lse = weigh(p, at, w.weight);
  const bool finite = abs_of(lse) < kInfinity;
  const vec nothing(lse < kInfinity ? 0.f : __builtin_nanf(""));
  for (std::int64_t c = 0; c < p.dv; c += kLanes) store(w.sum + c, nothing);
  for (std::int64_t i = 0; finite && i < p.count; ++i) {
    const AttentionState& state = p.states[i];
    if (state.lse[row_index(state.lse_stride, at)] == -kInfinity) continue;  // its output may hold anything
    with_float_type(state.out_type, [&](auto element) {
      const auto* from = static_cast<const decltype(element)*>(state.out) + row_index(state.out_stride, at);
      add_row(from, state.out_stride.d, p.dv, static_cast<float>(w.weight[i]), w.sum);
    });
  }
  with_float_type(p.out_type, [&](auto element) {
    auto* const out = static_cast<decltype(element)*>(p.out) + row_index(p.out_stride, at);
    const std::int64_t inner = p.out_stride.d;
    for (std::int64_t c = 0; c < p.dv; c += kLanes)
      store_strided(out + c * inner, inner, min(kLanes, p.dv - c), load(w.sum + c));
  });
  if (p.lse) p.lse[row_index(p.lse_stride, at)] = lse;
}

void run(const MergeStatesParams& p, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  BumpAllocator allocator(scratch);
  const MergeStatesScratch w(allocator, p.count, p.dv);
  for (std::int64_t row = begin; row < end; ++row) merge(p, row, w);
}

}  // namespace

const MergeStatesKernel kMergeStates = {
    .facts = {.operation = Operation::merge_states, .phase = Phase::all, .arithmetic = "f32", .dtypes = kFloatTypes},
    .scratch_bytes = bytes_of<MergeStatesScratch>,
    .run = run};

}  // namespace rapt::cpu::RAPT_ISA
