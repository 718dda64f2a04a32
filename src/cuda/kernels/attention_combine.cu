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

// A block does kCombineWarps rows, with a warp for each, or one. `rows`: of each sequence and kv head.
template <int kMaxSize, int kWarps>
__global__ void __launch_bounds__(kThreads, kBlocks<kMaxSize>)
    combine(const __grid_constant__ AttentionParams p, const Partials partials, const unsigned rows) {
  using Sums = RowSums<kMaxSize, kWarps>;
  constexpr int kBlockRows = kCombineWarps / kWarps;
  __shared__ Sums of_rows[kBlockRows];
  const auto head_of = [&](unsigned number) {
    const unsigned index = number / rows, hk = static_cast<unsigned>(p.hk);
    return Head(p, index / hk, index % hk);
  };
  const unsigned first = blockIdx.x * kBlockRows, own = threadIdx.x / (32 * kWarps), number = first + own;
  wait_for_previous();

  if (number < p.b * p.hk * rows)
    combine_row(p, partials, head_of(number), static_cast<int>(number % rows), of_rows[own]);
}

template <int kMaxSize>
cudaError_t combine_rows(const AttentionParams& p, const Partials& partials, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.sq * p.group), all = static_cast<unsigned>(p.b * p.hk) * rows;
  if (partials.splits > kCombineWarps)
    return launch_kernel(true, combine<kMaxSize, kCombineWarps>, all, kThreads, 0, stream, p, partials, rows);
  return launch_kernel(true, combine<kMaxSize, 1>, (all + kCombineWarps - 1) / kCombineWarps, kThreads, 0, stream, p,
                       partials, rows);
}

}  // namespace

std::int64_t decode_items(const AttentionParams& p) {
  return p.b * p.hk * std::max<std::int64_t>(partials_of(p, nullptr).splits, p.sq * p.group);
}
std::size_t decode_workspace(const AttentionParams& p) {
  return bytes_of(p, partials_of(p, nullptr));
}

cudaError_t attention_combine(const AttentionParams& p, const Partials& partials, cudaStream_t stream) {
  return p.dv <= kDecodeMaxHeadSize ? combine_rows<kDecodeMaxHeadSize>(p, partials, stream)
                                    : combine_rows<kLatentMaxValueHeadSize>(p, partials, stream);
}

}  // namespace rapt::cuda
