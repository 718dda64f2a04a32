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

// A block has `block_rows` of the rows, at most one to a warp. Those of few splits are done by their warps, and then
// those of more by all of them, one after another.
template <int kMaxSize>
__global__ void __launch_bounds__(kThreads, kBlocks<kMaxSize>)
    combine(const __grid_constant__ AttentionParams p, const Partials partials, const unsigned block_rows) {
  __shared__ union {
    RowSums<kMaxSize, 1> of_rows[kCombineWarps];
    RowSums<kMaxSize, kCombineWarps> of_row;
  } sums;
  __shared__ bool waits[kCombineWarps];
  const unsigned warp = threadIdx.x / 32, first = blockIdx.x * block_rows;
  const auto rows = static_cast<unsigned>(partials.rows), each = static_cast<unsigned>(partials.sequence_rows);
  wait_for_previous();

  // Calls then(head, row) if there is a row of that number.
  const auto with_row = [&](unsigned number, auto then) {
    const unsigned hk = number / rows, in_head = number - hk * rows;
    if (hk >= p.hk) return;
    const Head head(p, each > 0 ? partials.first + in_head / each : sequence_of_row(p, in_head), hk);
    const std::int64_t row = each > 0 ? in_head % each : in_head - head.q_first * p.group;
    if (row >= 0 && row < split_rows(head)) then(head, static_cast<int>(row));
  };
  bool done = true;
  if (warp < block_rows)
    with_row(first + warp, [&](const Head& head, int row) {
      done = SplitKeys(head, partials.rule).count <= kCombineWarps;
      if (done) combine_row(p, partials, head, row, sums.of_rows[warp]);
    });
  if (partials.splits <= kCombineWarps) return;
  if (threadIdx.x % 32 == 0) waits[warp] = !done;
  __syncthreads();
#pragma unroll 1
  for (unsigned i = 0; i < block_rows; ++i) {
    if (!waits[i]) continue;
    with_row(first + i, [&](const Head& head, int row) { combine_row(p, partials, head, row, sums.of_row); });
    __syncthreads();
  }
}

template <int kMaxSize>
cudaError_t combine_rows(const AttentionParams& p, const Partials& partials, cudaStream_t stream) {
  const std::int64_t all = p.hk * partials.rows;
  // Several to a block where there is no room for one in each, or where warps have enough to do.
  const bool alone = partials.splits > kCombineWarps && all <= 2 * kBlocks<kMaxSize> * multiprocessors();
  const unsigned block_rows = alone ? 1 : kCombineWarps;
  return launch_kernel(true, combine<kMaxSize>, static_cast<unsigned>(ceil_div(all, block_rows)), kThreads, 0, stream,
                       p, partials, block_rows);
}

}  // namespace

std::int64_t decode_items(const AttentionParams& p) {
  const Partials partials = partials_of(p, nullptr);
  return p.hk * std::max(partials.sequences * partials.splits, partials.rows);
}
std::size_t decode_workspace(const AttentionParams& p) {
  return bytes_of(p, partials_of(p, nullptr));
}

cudaError_t attention_combine(const AttentionParams& p, const Partials& partials, cudaStream_t stream) {
  return p.dv <= kDecodeMaxHeadSize ? combine_rows<kDecodeMaxHeadSize>(p, partials, stream)
                                    : combine_rows<kLatentMaxValueHeadSize>(p, partials, stream);
}

}  // namespace rapt::cuda
