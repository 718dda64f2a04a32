// attention_wgmma_f8: which calls it takes, and for now a slow kernel of its arithmetic, a warp to a row.
#include <cuda_runtime.h>

#include "cuda/hopper/host.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/fallback_rows.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kBlockOfKeys = 256;  // transposed values have room for whole ones

__device__ float rounded_to_code(float x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3), __NV_E4M3)));
}

// Weights are 2^(x - shift) with a shift below the row's maximum by kTop, so that they are up to 2^kTop.
constexpr float kTop = 6;

__global__ void attend(const __grid_constant__ AttentionParams p) {
  const std::int64_t rows = p.sq * p.group, index = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (index >= p.b * p.hk * rows) return;
  const int lane = threadIdx.x % 32;
  const Head head(p, index / rows / p.hk, index / rows % p.hk);
  const Row row(head, index % rows);
  const auto* const q = static_cast<const std::uint8_t*>(p.q) + row_at(p.q_stride, head, row);
  const float scale = score_scale(head, row);
  float max = -kInfinity;
  const auto score_of = [&](std::int64_t key) {
    const KvRow k = KvRow::of_key(head, key);
    float dot = 0;
    for (int i = 0; i < p.d; ++i) dot = fmaf(code_of_byte(q[i], DType::f8e4m3), k[i], dot);
    return dot * scale;
  };
  for (std::int64_t key = row.first + lane; key < row.last; key += 32) max = fmaxf(max, score_of(key));
  const float shift = shift_of(over_lanes(max, Max())) - kTop;
  float sum = 0, o[kWgmmaF8MaxHeadSize / 32] = {};
  for (std::int64_t block = row.first; block < row.last; block += 32) {
    const bool exists = block + lane < row.last;
    const float weight = exists ? rounded_to_code(exp2_approx(score_of(block + lane) - shift)) : 0;
    sum += over_lanes(weight, Sum());
    for (int n = 0; n < 32 && block + n < row.last; ++n) {
      const float of_key = __shfl_sync(~0u, weight, n);
      const KvRow v = KvRow::of_value(head, block + n);
      for (int i = 0; lane + 32 * i < p.dv; ++i) o[i] = fmaf(of_key, v[lane + 32 * i], o[i]);
    }
  }
  const std::int64_t out = row_at(p.out_stride, head, row);
  bool bad = !is_finite(sum) || !is_finite(shift);
  for (int i = 0; lane + 32 * i < p.dv; ++i) {
    const float x = sum == 0 ? 0 : o[i] / sum;
    bad = bad || !is_finite(x);
    store(p.out, p.out_type, out + (lane + 32 * i) * p.out_stride.d, x);
  }
  if (p.lse && lane == 0) p.lse[row_at(p.lse_stride, head, row)] = lse_of(shift, sum, 0);
  if (__any_sync(~0u, bad))
    attend_rows<void, kWgmmaF8MaxHeadSize, false>(p, static_cast<int>(head.b), static_cast<int>(head.hk),
                                                  static_cast<int>(index % rows), 1);
}

// Whether TMA can load all rows, and a head's queries have one scale.
bool takes(const AttentionParams& p) {
  return p.sk > 0 && is_vector(p.q, p.q_stride, 1) && is_vector(p.k, p.k_stride, 1) && is_vector(p.v, p.v_stride, 1) &&
         (!p.q_scale || p.q_scale_stride.s == 0);
}

}  // namespace

std::size_t wgmma_f8_workspace(const AttentionParams& p) {
  return static_cast<std::size_t>(p.b * p.hk * p.dv * ceil_div(p.sk, kBlockOfKeys) * kBlockOfKeys);
}

cudaError_t attention_wgmma_f8(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  if (!takes(p)) return attention_wgmma(p, workspace, stream);
  const std::int64_t rows = p.b * p.hk * p.group * p.sq;
  return launch_kernel(false, attend, static_cast<unsigned>(ceil_div(rows, kThreads / 32)), kThreads, 0, stream, p);
}

}  // namespace rapt::cuda
