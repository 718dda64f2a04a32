// attention_combine: rows from their partial results over splits of their keys,
//   m = max m_i,  l = sum 2^(m_i - m) l_i,  out = sum 2^(m_i - m) o_i / l.
//
// Partial results know hidden keys by weights of 0, but 0 times NaN is NaN, and scores of 2^20 and more have lost
// digits: rows whose results are not finite, or which had such scores, are computed once more, key by key. Where keys
// are not split, the kernel before stores results itself, and such rows are all that is left to do.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "cuda/hopper/splits.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/divisor.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {
namespace {

constexpr float kHugeScore = 0x1p20f;
constexpr int kBlockWarps = 8, kThreads = 32 * kBlockWarps;
static_assert(kMaxSplits <= kThreads, "a thread for each split");

// The sums of a row of up to kMaxSize columns, by kWarps warps of a block (all, or one where splits are no more than
// that: then the bits are the same): of O those of each warp, which relate to `top`, as `l` does.
template <int kMaxSize, int kWarps>
struct RowSums {
  alignas(16) float o[kWarps][kMaxSize];
  float of_warp[kWarps], factor[kWarps * 32];

  __device__ static int thread() { return threadIdx.x % (32 * kWarps); }
  __device__ static void sync() {
    if constexpr (kWarps == 1) __syncwarp();
    else __syncthreads();
  }
  __device__ static bool any(bool x) {
    if constexpr (kWarps == 1) return __any_sync(~0u, x);
    else return __syncthreads_or(x);
  }

  // Over all of the row's threads, the same for each.
  template <class Combine>
  __device__ float over_row(float x, Combine combine) {
    for (int bit = 16; bit > 0; bit /= 2) x = combine(x, __shfl_xor_sync(~0u, x, bit));
    sync();
    if (thread() % 32 == 0) of_warp[thread() / 32] = x;
    sync();
    x = of_warp[0];
    for (int warp = 1; warp < kWarps; ++warp) x = combine(x, of_warp[warp]);
    return x;
  }

  // From partial results. Each warp sums so many in their order; one warp alone, too, those that several would.
  __device__ void add_splits(const AttentionParams& p, const Partials& partials, const float* partial, int count,
                             float& top, float& l) {
    const int warp = thread() / 32, each = (count + kBlockWarps - 1) / kBlockWarps;
    const bool exists = thread() < count;
    const float* const own = partial + thread() * partials.floats + Partials::m_at(p);
    const float m = exists ? own[0] : -kInfinity;
    l = exists ? own[1] : 0;
    top = over_row(m, Max());
    factor[thread()] = exp2_approx(m - shift_of(top));
    l = over_row(l * factor[thread()], Sum());
    for (int column = 4 * (thread() % 32); column < p.dv; column += 128) {
      float4 sum = make_float4(0, 0, 0, 0);
      const auto add = [&](int i, auto combine) {
        const float4 x = *reinterpret_cast<const float4*>(partial + i * partials.floats + column);
        const float f = factor[i];
        sum =
            make_float4(combine(f, x.x, sum.x), combine(f, x.y, sum.y), combine(f, x.z, sum.z), combine(f, x.w, sum.w));
      };
      if constexpr (kWarps == 1) {
#pragma unroll 8
        for (int i = 0; i < count; ++i)
          add(i, [](float f, float x, float sum) { return __fadd_rn(sum, __fmul_rn(f, x)); });
      } else {
#pragma unroll 8
        for (int i = warp * each; i < min(count, (warp + 1) * each); ++i) add(i, fmaf);
      }
      *reinterpret_cast<float4*>(&o[warp][column]) = sum;
    }
    sync();
  }

  // From the keys themselves, one after another: those that are hidden count for nothing, whatever their values.
  __device__ __noinline__ void add_keys(const Head& head, const Row& row, float& top, float& l) {
    const AttentionParams& p = head.p;
    const bool modified = has_modifiers(p.score);
    const int warp = thread() / 32, lane = thread() % 32;
    const std::int64_t q = row_at(p.q_stride, head, row);
    double sums[kMaxSize / 32] = {}, weights = 0;
    float m = -kInfinity;
    for (std::int64_t j = row.first + warp; j < row.last; j += kWarps) {
      const KvRow k = KvRow::of_key(head, j), v = KvRow::of_value(head, j);
      float dot = 0;
      for (int i = lane; i < p.d; i += 32) dot = fmaf(load(p.q, p.q_type, q + i * p.q_stride.d), k[i], dot);
      for (int bit = 16; bit > 0; bit /= 2) dot += __shfl_xor_sync(~0u, dot, bit);
      float score = dot * p.score.scale_log2;
      if (modified) score = finish_score(head, row, j, score);
      if (score == -kInfinity) continue;
      const float before = m;
      m = fmaxf(m, score);
      const double rescale = exp2_approx(before - shift_of(m)), weight = exp2_approx(score - shift_of(m));
      weights = weights * rescale + weight;
#pragma unroll
      for (int i = 0; i < kMaxSize / 32; ++i) {
        const int column = lane + 32 * i;
        if (column >= p.dv) continue;
        const double x = v[column];
        sums[i] = (isfinite(sums[i]) ? sums[i] * rescale : sums[i]) + weight * x;  // inf times 0 is no NaN
      }
    }
    top = over_row(lane == 0 ? m : -kInfinity, Max());
    const float factor = exp2_approx(m - shift_of(top));
    l = over_row(lane == 0 ? static_cast<float>(weights) * factor : 0.f, Sum());
#pragma unroll
    for (int i = 0; i < kMaxSize / 32; ++i) {
      const auto x = static_cast<float>(sums[i]);
      o[warp][lane + 32 * i] = is_finite(x) ? x * factor : x;
    }
    sync();
  }

  __device__ float column(int i) const {
    float sum = 0;
    for (const auto& of_warp : o) sum += of_warp[i];
    return sum;
  }
  // Out and lse.
  __device__ void store_row(const Head& head, const Row& row, float top, float l) const {
    const AttentionParams& p = head.p;
    const Finish f = finish_row(top, l, sink_of(head, row), alibi_shift_log2(head, row));
    const float inverse = 1 / f.sum;
    const std::int64_t out = row_at(p.out_stride, head, row);
    for (int i = thread(); i < p.dv; i += 32 * kWarps)
      store(p.out, p.out_type, out + i * p.out_stride.d, f.sum == 0 ? 0.f : column(i) * f.half * f.half * inverse);
    if (p.lse && thread() == 0) p.lse[row_at(p.lse_stride, head, row)] = f.lse;
  }
};

// On a multiprocessor.
template <int kMaxSize>
constexpr int kBlocks = kMaxSize > kDecodeMaxHeadSize ? 2 : 4;

// A block does kBlockWarps rows, with a warp for each, or one. `rows`: of each sequence and kv head.
template <int kMaxSize, int kWarps>
__global__ void __launch_bounds__(kThreads, kBlocks<kMaxSize>)
    combine(const __grid_constant__ AttentionParams p, const Partials partials, const unsigned rows) {
  using Sums = RowSums<kMaxSize, kWarps>;
  constexpr int kBlockRows = kBlockWarps / kWarps;
  __shared__ Sums of_rows[kBlockRows];
  __shared__ RowSums<kMaxSize, kBlockWarps> again;
  __shared__ bool is_bad[kBlockRows];
  const auto head_of = [&](unsigned number) {
    const unsigned index = number / rows, hk = static_cast<unsigned>(p.hk);
    return Head(p, index / hk, index % hk);
  };
  const unsigned first = blockIdx.x * kBlockRows, own = threadIdx.x / (32 * kWarps), number = first + own;
  wait_for_previous();

  bool bad = false;
  if (number < p.b * p.hk * rows) {
    const Head head = head_of(number);
    const int row = static_cast<int>(number % rows), count = SplitKeys(head, partials.rule).count;
    Sums& sums = of_rows[own];
    float top, l;
    sums.add_splits(p, partials, partials.at(head, row, 0), count, top, l);
    bad = (top != -kInfinity && fabsf(top) >= kHugeScore) || !is_finite(l);
    for (int i = Sums::thread(); i < p.dv; i += 32 * kWarps) bad |= !is_finite(sums.column(i));
    bad = Sums::any(bad);
    if (!bad) sums.store_row(head, row_of(head, row), top, l);
  }
  // The whole block for each, so that bits are those of any call.
  if (!__syncthreads_or(bad)) return;
  if (Sums::thread() == 0) is_bad[own] = bad;
  __syncthreads();
  for (unsigned i = 0; i < kBlockRows; ++i) {
    if (!is_bad[i]) continue;
    const Head head = head_of(first + i);
    const Row row = row_of(head, static_cast<int>((first + i) % rows));
    float top, l;
    again.add_keys(head, row, top, l);
    again.store_row(head, row, top, l);
  }
}

// Mostly there is none: each thread looks at another 64 rows, of which a sequence and kv head has `words`.
template <int kMaxSize>
__global__ void __launch_bounds__(kThreads)
    recompute(const __grid_constant__ AttentionParams p, const std::uint64_t* rows, const Divisor words,
              const unsigned all) {
  __shared__ RowSums<kMaxSize, kBlockWarps> sums;
  __shared__ std::uint64_t wanted[kThreads];
  wait_for_previous();
  for (unsigned first = blockIdx.x * kThreads; first < all; first += gridDim.x * kThreads) {
    const unsigned mine = first + threadIdx.x;
    wanted[threadIdx.x] = mine < all ? rows[mine] : 0;
    if (!__syncthreads_or(wanted[threadIdx.x] != 0)) continue;
    for (unsigned i = 0; i < kThreads; ++i)
      for (std::uint64_t left = wanted[i]; left != 0; left &= left - 1) {
        const unsigned index = words.quotient(first + i), hk = static_cast<unsigned>(p.hk);
        const Head head(p, index / hk, index % hk);
        const int word = static_cast<int>(words.remainder(first + i));
        const Row row = row_of(head, 64 * word + __ffsll(static_cast<long long>(left)) - 1);
        float top, l;
        sums.add_keys(head, row, top, l);
        sums.store_row(head, row, top, l);
        __syncthreads();
      }
    __syncthreads();  // all are done with `wanted`
  }
}

template <int kMaxSize>
cudaError_t combine_rows(const AttentionParams& p, const Partials& partials, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.sq * p.group), all = static_cast<unsigned>(p.b * p.hk) * rows;
  if (partials.splits > kBlockWarps)
    return launch_kernel(true, combine<kMaxSize, kBlockWarps>, all, kThreads, 0, stream, p, partials, rows);
  return launch_kernel(true, combine<kMaxSize, 1>, (all + kBlockWarps - 1) / kBlockWarps, kThreads, 0, stream, p,
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

cudaError_t attention_recompute(const AttentionParams& p, const std::uint64_t* rows, cudaStream_t stream) {
  const std::int64_t words = ceil_div(p.sq * p.group, 64);
  const auto all = static_cast<unsigned>(p.b * p.hk * words);
  const unsigned blocks = std::min((all + kThreads - 1) / kThreads, static_cast<unsigned>(multiprocessors()));
  const auto kernel = p.dv <= kDecodeMaxHeadSize ? recompute<kDecodeMaxHeadSize> : recompute<kLatentMaxValueHeadSize>;
  return launch_kernel(true, kernel, blocks, kThreads, 0, stream, p, rows, Divisor(words), all);
}

}  // namespace rapt::cuda
