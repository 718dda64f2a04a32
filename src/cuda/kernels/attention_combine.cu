// attention_combine: adds up the partial results of rows over the splits of their keys (combine_row.cuh has the
// formula).
//
// Launched after attention_decode, attention_decode_m64, attention_decode_f32 and attention_latent, unless a cluster
// combines. It reads dv + 8 floats for each row and split, and writes out and lse.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/hopper/combine_row.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/kernels/split_launches.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 32 * kCombineWarps;

// Thread blocks on a multiprocessor.
template <int kMaxSize>
constexpr int kBlocksPerMultiprocessor = kMaxSize > kDecodeMaxHeadDim ? 2 : 4;

// The sequence that has row `row` of rows that follow each other.
__device__ std::int64_t sequence_of_row(const AttentionParams& p, std::int64_t row) {
  return sequence_at(row, p.b, [&](std::int64_t i) { return clamp_to(p.q_begin[i], 0, p.total_q) * p.group; });
}

// Calls then(head, row) with row `number`, if it exists.
template <class Then>
__device__ void with_row(const AttentionParams& p, const PartialResults& partials, unsigned number, Then then) {
  const auto rows = static_cast<unsigned>(partials.rows), each = static_cast<unsigned>(partials.sequence_rows);
  const unsigned hk = number / rows, in_head = number - hk * rows;
  if (hk >= p.hk) return;
  const Head head(p, each > 0 ? partials.first + in_head / each : sequence_of_row(p, in_head), hk);
  const std::int64_t row = each > 0 ? in_head % each : in_head - head.q_first * p.group;
  if (row >= 0 && row < decode_rows(head)) then(head, static_cast<int>(row));
}

// O of a row over each warp's group of its splits.
template <int kMaxSize>
struct GroupSums {
  alignas(16) float o[kCombineWarps][kMaxSize];
};

// Combines a row by all warps of a block. False: it is a fallback row.
template <int kMaxSize>
__device__ bool combine_row_by_block(const AttentionParams& p, const PartialResults& partials, const Head& head,
                                     int row, int splits, const RowFinalizer& end, GroupSums<kMaxSize>& groups) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = (splits + kCombineWarps - 1) / kCombineWarps, first = warp * each;
  const float* const partial = partials.at(head, row, 0);
  RowSums all;
#pragma unroll 1
  for (int column = 4 * lane; column - 4 * lane < p.dv; column += 128) {
    all = sum_row<4>(p, partials, partial, splits, first, min(first + each, splits), each, column, column < p.dv);
    *reinterpret_cast<float4*>(&groups.o[warp][column]) = all.o;
  }
  __syncthreads();
  bool trusted = true;
  if (const int column = 4 * static_cast<int>(threadIdx.x); column < p.dv) {
    all.o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (const auto& group : groups.o) {
      const float4 x = *reinterpret_cast<const float4*>(&group[column]);
      all.o.x += x.x, all.o.y += x.y, all.o.z += x.z, all.o.w += x.w;
    }
    trusted = end.store(p, all, column, true);
  }
  return __syncthreads_and(trusted);
}

// A thread block does kCombineWarps rows, a warp for each; or (kByBlock) one row of more splits, with all warps.
template <int kMaxSize, bool kByBlock>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor<kMaxSize>)
    attention_combine(const __grid_constant__ AttentionParams p, const PartialResults partials) {
  constexpr int kBlockRows = kByBlock ? 1 : kCombineWarps;
  __shared__ GroupSums<kByBlock ? kMaxSize : 1> groups;
  const unsigned warp = kByBlock ? 0 : threadIdx.x / 32;
  with_row(p, partials, blockIdx.x * kBlockRows + warp, [&](const Head& head, int row) {
    const int splits = SplitKeys(head, partials.rule).count;
    bool trusted;
    if constexpr (kByBlock) {
      const RowFinalizer end = RowFinalizer::of(head, row);
      wait_on_dependent_grids();  // as late as possible
      trusted = combine_row_by_block(p, partials, head, row, splits, end, groups);
    } else {
      wait_on_dependent_grids();
      trusted = combine_row<4>(p, partials, head, row, splits);
    }
    __syncwarp();  // the row has been stored before it is stored again
    if (!trusted && threadIdx.x % (32 * kCombineWarps / kBlockRows) < 32)
      recompute_rows<void, kMaxSize, true>(p, static_cast<int>(head.b), static_cast<int>(head.hk), row, 1);
  });
  wait_on_dependent_grids();  // also without a row, so that a grid that depends on this one also depends on that one
}

// A thread block does block_rows rows, up to kDecodeMaxRows: a warp for each; then (kManySplits) rows of more than
// kCombineWarps splits, with all warps for each.
template <int kMaxSize, bool kManySplits>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor<kMaxSize>)
    attention_combine_several(const __grid_constant__ AttentionParams p, const PartialResults partials,
                              const unsigned block_rows) {
  __shared__ GroupSums<kManySplits ? kMaxSize : 1> groups;
  __shared__ bool has_many_splits[kManySplits ? kDecodeMaxRows : 1];
  const unsigned warp = threadIdx.x / 32, first = blockIdx.x * block_rows;
  unsigned fallback = 0;  // bit i: row warp + i * kCombineWarps falls back
  wait_on_dependent_grids();
#pragma unroll 1
  for (unsigned i = warp; i < block_rows; i += kCombineWarps) {
    bool has_many = false;
    with_row(p, partials, first + i, [&](const Head& head, int row) {
      const int splits = SplitKeys(head, partials.rule).count;
      has_many = kManySplits && splits > kCombineWarps;
      if (!has_many && !combine_row<4>(p, partials, head, row, splits)) fallback |= 1u << i / kCombineWarps;
    });
    if (kManySplits && threadIdx.x % 32 == 0) has_many_splits[i] = has_many;
  }
  if constexpr (kManySplits) {
    __syncthreads();
#pragma unroll 1
    for (unsigned i = 0; i < block_rows; ++i) {
      if (!has_many_splits[i]) continue;
      with_row(p, partials, first + i, [&](const Head& head, int row) {
        const int splits = SplitKeys(head, partials.rule).count;
        if (!combine_row_by_block(p, partials, head, row, splits, RowFinalizer::of(head, row), groups) &&
            i % kCombineWarps == warp)
          fallback |= 1u << i / kCombineWarps;
      });
    }
  }
  __syncwarp();  // the rows have been stored before they are stored again
#pragma unroll 1
  for (unsigned number = first + warp; fallback != 0; fallback >>= 1, number += kCombineWarps)
    if (fallback & 1)
      with_row(p, partials, number, [&](const Head& head, int row) {
        recompute_rows<void, kMaxSize, true>(p, static_cast<int>(head.b), static_cast<int>(head.hk), row, 1);
      });
}

// Whether attention_decode_m64 does the call, which leaves even a single split to attention_combine where scores have
// modifiers.
bool is_by_m64(const AttentionParams& p) {
  return p.q_type != DType::f32 && !is_quantized(p) && !has_few_rows(p);
}

template <int kMaxSize>
cudaError_t combine_rows(const AttentionParams& p, const PartialResults& partials, cudaStream_t stream) {
  const std::int64_t all = p.hk * partials.rows;
  const auto blocks = [&](std::int64_t rows) { return static_cast<unsigned>(ceil_div(all, rows)); };
  const bool has_many_splits = partials.splits > kCombineWarps;
  // With room for kDecodeMaxRows rows of each ragged sequence, most rows do not exist.
  const bool mostly_empty = p.total_q >= 0 && partials.sequence_rows > 0;
  if (!mostly_empty && !has_many_splits)
    return launch_kernel(true, attention_combine<kMaxSize, false>, blocks(kCombineWarps), kThreads, 0, stream, p,
                         partials);
  if (!mostly_empty && all <= 2 * kBlocksPerMultiprocessor<kMaxSize> * multiprocessors())
    return launch_kernel(true, attention_combine<kMaxSize, true>, blocks(1), kThreads, 0, stream, p, partials);
  const unsigned rows = mostly_empty ? kDecodeMaxRows : kCombineWarps;
  return launch_kernel(
      true, has_many_splits ? attention_combine_several<kMaxSize, true> : attention_combine_several<kMaxSize, false>,
      blocks(rows), kThreads, 0, stream, p, partials, rows);
}

}  // namespace

std::int64_t decode_items(const AttentionParams& p) {
  const PartialResults partials = partials_of(p, nullptr);
  return p.hk * std::max(partials.sequences * partials.splits, partials.rows);
}
std::size_t decode_workspace(const AttentionParams& p) {
  const PartialResults partials = partials_of(p, nullptr);
  return partials.splits == 1 && !is_by_m64(p) ? 0 : bytes_of(p, partials);
}

bool decode_writes_output_directly(const AttentionParams& p) {
  const PartialResults partials = partials_of(p, nullptr);
  return is_by_m64(p) ? writes_output_directly(p, partials) : partials.splits == 1;
}

cudaError_t launch_attention_combine(const AttentionParams& p, const PartialResults& partials, cudaStream_t stream) {
  return p.dv <= kDecodeMaxHeadDim ? combine_rows<kDecodeMaxHeadDim>(p, partials, stream)
                                   : combine_rows<kLatentMaxValueHeadDim>(p, partials, stream);
}

}  // namespace rapt::cuda
