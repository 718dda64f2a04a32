// merge_states: rows of attention over disjoint sets of keys -> rows over all of them,
//   lse = log(sum e^lse_i),  out = sum e^(lse_i - lse) out_i.
// One warp per row. Weights are float64, since lse_i - lse cancels; sums are fp32, in the order of the states.
#include <algorithm>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kBatch = 32;     // states that fit into the parameters of a launch
constexpr int kColumns = 128;  // of a row at a time

struct StateBatch {
  AttentionState states[kBatch];
};

// `to`: [count]
__global__ void write_states(const __grid_constant__ StateBatch batch, AttentionState* to, int count) {
  if (threadIdx.x < count) to[threadIdx.x] = batch.states[threadIdx.x];
}

// The weights of all states for a row; the same in each lane.
struct Weighing {
  float largest;  // largest lse, or NaN
  bool finite;
  double total;  // the merged lse, if that is finite

  template <class LseOf>
  __device__ Weighing(std::int64_t count, LseOf lse_of) {
    const int lane = threadIdx.x % 32;
    bool has_nan = false;
    largest = -kInfinity;
    for (std::int64_t i = lane; i < count; i += 32) {
      const float x = lse_of(i);
      largest = fmaxf(largest, x), has_nan |= x != x;
    }
    largest = over_lanes(largest, Max());
    if (__any_sync(~0u, has_nan)) largest = not_a_number();
    finite = abs_of(largest) < kInfinity;
    const auto top = static_cast<double>(largest);
    double sum = 0;
    for (std::int64_t i = lane; finite && i < count; i += 32) sum += exp(static_cast<double>(lse_of(i)) - top);
    total = top + log(over_lanes(sum, Sum()));
  }
};

// Merges columns [first, first + kColumns) of a row.
template <class LseOf>
__device__ void merge_columns(const MergeStatesParams& p, const AttentionState* states, const RowPosition& at,
                              const Weighing& w, std::int64_t first, LseOf lse_of) {
  const int lane = threadIdx.x % 32;
  float sum[kColumns / 32];
  for (float& x : sum) x = w.largest < kInfinity ? 0 : not_a_number();
  for (std::int64_t base = 0; w.finite && base < p.count; base += 32) {
    const auto count = static_cast<int>(min(p.count - base, std::int64_t{32}));
    const float lane_lse = lane < count ? lse_of(base + lane) : -kInfinity;
    const auto lane_weight = static_cast<float>(exp(static_cast<double>(lane_lse) - w.total));
    for (int i = 0; i < count; ++i) {
      const float weight = __shfl_sync(~0u, lane_weight, i);
      if (__shfl_sync(~0u, lane_lse, i) == -kInfinity)
        continue;  // an empty state counts for nothing, whatever its output holds
      const AttentionState& state = states[base + i];
      const std::int64_t from = row_index(state.out_stride, at);
#pragma unroll
      for (int n = 0; n < kColumns / 32; ++n) {
        const std::int64_t column = first + 32 * n + lane;
        if (column >= p.dv) continue;
        const float x = load(state.out, state.out_type, from + column * state.out_stride.d);
        sum[n] += is_inf(x) ? x : weight * x;  // the exact weight is not 0, but it may be 0 as a float
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns / 32; ++n)
    if (const std::int64_t column = first + 32 * n + lane; column < p.dv)
      store(p.out, p.out_type, row_index(p.out_stride, at) + column * p.out_stride.d, sum[n]);
}

// The states lie in device memory (p.states), or in `batch`.
__global__ void __launch_bounds__(kThreads)
    merge_states(const __grid_constant__ MergeStatesParams p, const __grid_constant__ StateBatch batch) {
  const AttentionState* const states = p.states ? p.states : batch.states;
  const std::int64_t rows = p.b * p.h * p.s, step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += step) {
    const RowPosition at = position_of(p, row);
    const auto lse_of = [&](std::int64_t i) { return states[i].lse[row_index(states[i].lse_stride, at)]; };
    const Weighing w(p.count, lse_of);
    if (p.lse && threadIdx.x % 32 == 0)
      p.lse[row_index(p.lse_stride, at)] = w.finite ? static_cast<float>(w.total) : w.largest;
    for (std::int64_t first = 0; first < p.dv; first += kColumns) merge_columns(p, states, at, w, first, lse_of);
  }
}

}  // namespace

std::size_t merge_states_workspace(std::int64_t count) {
  return count <= kBatch ? 0 : static_cast<std::size_t>(count) * sizeof(AttentionState);
}

cudaError_t launch_merge_states(const MergeStatesParams& params, std::byte* workspace, cudaStream_t stream) {
  MergeStatesParams p = params;
  p.states = params.count <= kBatch ? nullptr : reinterpret_cast<const AttentionState*>(workspace);
  StateBatch batch{};
  for (std::int64_t first = 0; first < p.count; first += kBatch) {
    const auto count = static_cast<int>(std::min<std::int64_t>(p.count - first, kBatch));
    std::copy_n(params.states + first, count, batch.states);
    if (!p.states) break;
    auto* const to = reinterpret_cast<AttentionState*>(workspace) + first;
    const cudaError_t status = launch_kernel(false, write_states, 1, kBatch, 0, stream, batch, to, count);
    if (status != cudaSuccess) return status;
  }
  constexpr std::int64_t kMaxBlocks = 1 << 20;
  const std::int64_t blocks = std::min(ceil_div(p.b * p.h * p.s, kWarps), kMaxBlocks);
  return launch_kernel(false, merge_states, static_cast<unsigned>(blocks), kThreads, 0, stream, p, batch);
}

}  // namespace rapt::cuda
