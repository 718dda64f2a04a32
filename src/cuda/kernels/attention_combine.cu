// attention_combine: rows from their partial results over splits of their keys, in a kernel of its own.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/hopper/combine_row.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 32 * kCombineWarps;

// On a multiprocessor.
template <int kMaxSize>
constexpr int kBlocks = kMaxSize > kDecodeMaxHeadSize ? 2 : 4;

// The sequence that has a row of those that lie end to end.
__device__ std::int64_t sequence_of_row(const AttentionParams& p, std::int64_t row) {
  std::int64_t low = 0, high = p.b;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (clamp_to(p.q_begin[middle], 0, p.total_q) * p.group <= row ? low : high) = middle;
  }
  return low;
}

// A block does kCombineWarps rows, with a warp for each, or one.
template <int kMaxSize, int kWarps>
__global__ void __launch_bounds__(kThreads, kBlocks<kMaxSize>)
    combine(const __grid_constant__ AttentionParams p, const Partials partials) {
  using Sums = RowSums<kMaxSize, kWarps>;
  constexpr int kBlockRows = kCombineWarps / kWarps;
  __shared__ Sums of_rows[kBlockRows];
  const unsigned own = threadIdx.x / (32 * kWarps), number = blockIdx.x * kBlockRows + own;
  const auto rows = static_cast<unsigned>(partials.rows), hk = number / rows, in_head = number % rows;
  wait_for_previous();
  if (hk >= p.hk) return;

  const auto each = static_cast<unsigned>(partials.sequence_rows);
  const Head head(p, each > 0 ? partials.first + in_head / each : sequence_of_row(p, in_head), hk);
  const std::int64_t row = each > 0 ? in_head % each : in_head - head.q_first * p.group;
  if (row >= 0 && row < split_rows(head)) combine_row(p, partials, head, static_cast<int>(row), of_rows[own]);
}

template <int kMaxSize>
cudaError_t combine_rows(const AttentionParams& p, const Partials& partials, cudaStream_t stream) {
  const auto all = static_cast<unsigned>(p.hk * partials.rows);
  if (partials.splits > kCombineWarps)
    return launch_kernel(true, combine<kMaxSize, kCombineWarps>, all, kThreads, 0, stream, p, partials);
  return launch_kernel(true, combine<kMaxSize, 1>, (all + kCombineWarps - 1) / kCombineWarps, kThreads, 0, stream, p,
                       partials);
}

}  // namespace

std::int64_t decode_items(const AttentionParams& p) {
  const Partials partials = partials_of(p, nullptr);
  return p.hk * std::max(partials.sequences * partials.splits, partials.rows);
}
std::size_t decode_workspace(const AttentionParams& p) {
  return bytes_of(p, partials_of(p, nullptr));
}

bool decode_finishes_at_once(const AttentionParams& p) {
  return finishes_at_once(p, partials_of(p, nullptr));
}

cudaError_t attention_combine(const AttentionParams& p, const Partials& partials, cudaStream_t stream) {
  return p.dv <= kDecodeMaxHeadSize ? combine_rows<kDecodeMaxHeadSize>(p, partials, stream)
                                    : combine_rows<kLatentMaxValueHeadSize>(p, partials, stream);
}

}  // namespace rapt::cuda
