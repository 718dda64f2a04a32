// attention_naive: out = softmax(q k^T) v in three kernels (scores, softmax, values), with the S x S matrix in the
// workspace: a baseline, and a check of all other kernels.
//
// The entry attention_naive.f32 calls it. One thread block for each row. It writes and reads the matrix twice: 16 b hq
// sq sk bytes.
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kSumKeys = 32;
constexpr std::int64_t kFinishFloats = sizeof(FinalizedRow) / sizeof(float);

// A thread block's row: pairs of query head and token, with ragged sequences one after another.
struct NaiveRow {
  Head head;
  Row row;
  FinalizedRow* finalized;
  float* scores;  // of the keys from head.oldest on

  __device__ static std::int64_t sequence(const AttentionParams& p, std::int64_t row) {
    if (p.total_q < 0) return row / (p.sq * p.hk * p.group);
    return sequence_at(row % p.total_q, p.b, [&](std::int64_t i) { return p.q_begin[i]; });
  }
  __device__ static std::int64_t q_head(const AttentionParams& p, std::int64_t row) {
    return p.total_q >= 0 ? row / p.total_q : row / p.sq % (p.hk * p.group);
  }

  __device__ NaiveRow(const AttentionParams& p, float* workspace)
      : head(p, sequence(p, blockIdx.x), q_head(p, blockIdx.x) / p.group),
        finalized(reinterpret_cast<FinalizedRow*>(workspace) + blockIdx.x),
        scores(workspace + kFinishFloats * gridDim.x + blockIdx.x * p.sk) {
    const std::int64_t r = blockIdx.x, token = p.total_q >= 0 ? r % p.total_q - head.q_first : r % p.sq;
    row = Row(head, token, q_head(p, r));
  }
  // Whether the row exists: sequence starts that decrease lead to rows that do not.
  __device__ bool exists() const { return row.token >= 0 && row.token < head.len_q; }
};

__global__ void attention_naive_scores(const __grid_constant__ AttentionParams p, float* workspace) {
  const NaiveRow r(p, workspace);
  if (!r.exists()) return;
  const std::int64_t q = row_at(p.q_stride, r.head, r.row);
  for (std::int64_t j = r.head.oldest + threadIdx.x; j < r.head.len_k; j += kThreads) {
    float x = -kInfinity;
    if (j >= r.row.first && j < r.row.last) {
      const KvRow k = KvRow::of_key(r.head, j);
      float dot = 0;
      for (std::int64_t i = 0; i < p.d; ++i) dot = fmaf(load_query(p.q, p.q_type, q + i * p.q_stride.d), k[i], dot);
      x = finish_score(r.head, r.row, j, dot * score_scale(r.head, r.row));
    }
    r.scores[j - r.head.oldest] = x;
  }
}

// Reduces over all threads of the block, in a fixed order.
template <class Combine>
__device__ float reduce(float x, Combine combine) {
  __shared__ float parts[kThreads];
  parts[threadIdx.x] = x;
  for (int n = kThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) parts[threadIdx.x] = combine(parts[threadIdx.x], parts[threadIdx.x + n]);
  }
  __syncthreads();
  x = parts[0];
  __syncthreads();
  return x;
}

__global__ void attention_naive_softmax(const __grid_constant__ AttentionParams p, float* workspace) {
  const NaiveRow r(p, workspace);
  if (!r.exists()) return;
  const std::int64_t n = r.head.len_k - r.head.oldest;
  float row_max = -kInfinity;
  for (std::int64_t j = threadIdx.x; j < n; j += kThreads) row_max = fmaxf(row_max, r.scores[j]);
  row_max = reduce(row_max, Max());
  float sum = 0;
  for (std::int64_t j = threadIdx.x; j < n; j += kThreads) {
    const float weight = weight_of(r.scores[j], shift_of(row_max));
    r.scores[j] = weight;
    sum += weight;
  }
  sum = reduce(sum, Sum());
  if (threadIdx.x != 0) return;
  *r.finalized = finalize_row(row_max, sum, sink_of(r.head, r.row), alibi_shift_log2(r.head, r.row));
  if (p.lse) p.lse[row_at(p.lse_stride, r.head, r.row)] = r.finalized->lse;
}

__global__ void attention_naive_values(const __grid_constant__ AttentionParams p, float* workspace) {
  const NaiveRow r(p, workspace);
  if (!r.exists()) return;
  for (std::int64_t i = threadIdx.x; i < p.dv; i += kThreads) {
    // In short sums: the rounding error of a sum grows with its length.
    double out = 0;
    for (std::int64_t block = r.head.oldest; block < r.head.len_k; block += kSumKeys) {
      float sum = 0;
      for (std::int64_t j = block; j < min(block + kSumKeys, r.head.len_k); ++j) {
        const float weight = r.scores[j - r.head.oldest];
        if (is_hidden(weight)) continue;
        sum = fmaf(weight, KvRow::of_value(r.head, j)[i], sum);
      }
      out += static_cast<double>(sum);
    }
    const FinalizedRow f = *r.finalized;
    const float x = f.sum == 0 ? 0.f : static_cast<float>(out) * f.root_scale * f.root_scale / f.sum;
    store(p.out, p.out_type, row_at(p.out_stride, r.head, r.row) + i * p.out_stride.d, x);
  }
}

}  // namespace

std::int64_t naive_rows(const AttentionParams& p) {
  return p.hk * p.group * (p.total_q >= 0 ? p.total_q : p.b * p.sq);
}

std::size_t naive_workspace(const AttentionParams& p) {
  return static_cast<std::size_t>(naive_rows(p)) * static_cast<std::size_t>(p.sk + kFinishFloats) * sizeof(float);
}

cudaError_t launch_attention_naive(const AttentionParams& p, float* workspace, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(naive_rows(p));
  for (const auto step : {attention_naive_scores, attention_naive_softmax, attention_naive_values})
    if (const cudaError_t status = launch_kernel(false, step, rows, kThreads, 0, stream, p, workspace);
        status != cudaSuccess)
      return status;
  return cudaSuccess;
}

}  // namespace rapt::cuda
