// gathered_lists: lists of gathered keys -> lists without the entries that stand for no key, and their lengths.
//
// AttentionEntry calls it before attention's kernels, which then read pages of one row. One warp per list. It reads
// and writes a list once. scatter_lse comes after these kernels where the call's lse has no stride from token to token.
#include "cuda/kernels/gathered_lists.hpp"
#include "cuda/tile/element.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 128, kLists = kThreads / 32;
constexpr int kAtOnce = 8;  // neighbouring entries of a lane: their loads overlap

template <class T>
__global__ void gathered_lists(const __grid_constant__ AttentionParams p, const GatheredLists to) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kLists + threadIdx.x / 32;
  if (token >= p.b) return;
  const std::int64_t entry = token / p.tokens, in_entry = token % p.tokens;
  std::int64_t count = p.page_count > 0 ? p.sk : 0;
  if (p.counts && count > 0)
    count = clamp_to(p.counts.element(entry * p.counts_stride_b + in_entry * p.counts.stride), 0, count);
  const T* const from =
      static_cast<const T*>(p.pages.data) + entry * p.pages_stride_b + in_entry * p.pages_stride_token;
  T* const rows = static_cast<T*>(to.rows) + token * p.sk;
  const int lane = threadIdx.x % 32;
  std::int64_t kept = 0;
  for (std::int64_t first = 0; first < count; first += 32 * kAtOnce) {
    T row[kAtOnce];
    int valid = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t j = first + lane * kAtOnce + i;
      row[i] = j < count ? from[j * p.pages.stride] : -1;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) valid += row[i] >= 0;
    int up_to = valid;  // valid entries of this lane and those before it
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
      const int before = __shfl_up_sync(~0u, up_to, n);
      if (lane >= n) up_to += before;
    }
    std::int64_t at = kept + up_to - valid;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (row[i] >= 0) rows[at++] = static_cast<T>(min(std::int64_t{row[i]}, p.page_count - 1) + entry * to.rows_apart);
    kept += __shfl_sync(~0u, up_to, 31);
  }
  if (lane == 0) to.lengths[token] = static_cast<std::int32_t>(kept);
}

__global__ void scatter_lse(const __grid_constant__ AttentionParams p, const float* lse) {
  const std::int64_t heads = p.hk * p.group, i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.b * heads) return;
  const std::int64_t token = i / heads;
  const Strides& s = p.lse_stride;
  p.lse[token / p.tokens * s.b + i % heads * s.h + token % p.tokens * s.s] = lse[i];
}

}  // namespace

cudaError_t launch_gathered_lists(const AttentionParams& p, const GatheredLists& lists, cudaStream_t stream) {
  const auto kernel = p.pages.is_int64 ? gathered_lists<std::int64_t> : gathered_lists<std::int32_t>;
  return launch_kernel(false, kernel, static_cast<unsigned>(ceil_div(p.b, kLists)), kThreads, 0, stream, p, lists);
}

cudaError_t launch_scatter_lse(const AttentionParams& p, const float* lse, cudaStream_t stream) {
  const std::int64_t blocks = ceil_div(p.b * p.hk * p.group, kThreads);
  return launch_kernel(false, scatter_lse, static_cast<unsigned>(blocks), kThreads, 0, stream, p, lse);
}

}  // namespace rapt::cuda
