// index_scores: scale * k_scale[j] * sum over h of w[i, h] * relu(q[i, h] . k[j]) in fp32 on ordinary cores, of any
// types and strides.
//
// A thread block has 4 queries and 64 keys, and goes through the heads 16 at a time. q.k of these 64 rows and 64 keys
// is a product of tiles in shared memory, of which a thread has 4 heads of a query and 4 keys. It adds up its heads;
// at the end four threads' sums are added in the order of the heads.
#include <algorithm>

#include "cuda/kernels/index_scores.hpp"
#include "cuda/tile/element.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

constexpr int kThreads = 256, kQueries = 4, kHeads = 16, kKeys = 64;
constexpr int kRows = kQueries * kHeads, kDepth = 32;  // kDepth: columns of q and k at a time
static_assert(kRows == 64 && kKeys == 64 && kThreads == kRows * kKeys / 16);

struct Shared {
  float q[kDepth][kRows + 4], k[kDepth][kKeys + 4];
  float sums[kRows / 4][kKeys];
  std::int64_t key_at[kKeys];  // offset of a key's row in k; -1: no query sees it
  KeyRange seen[kQueries];
};

// The first n of four numbers, a stride apart; the others are 0 and are not read.
__device__ float4 four_numbers(const void* data, DType type, std::int64_t at, std::int64_t stride, std::int64_t n) {
  if ((set_of(type) & kFloatTypes) != 0) return load4(data, type, at, stride, n);
  const auto* const codes = static_cast<const std::uint8_t*>(data);
  const auto code = [&](int i) { return i < n ? code_of_byte(codes[at + i * stride], type) : 0.f; };
  return make_float4(code(0), code(1), code(2), code(3));
}

// Loads columns [first, first + kDepth) of 64 rows, transposed. at(row): the row's offset; negative: the row is 0.
template <class At>
__device__ void load_rows(float (&to)[kDepth][64 + 4], const void* data, DType type, std::int64_t stride,
                          std::int64_t first, std::int64_t d, At at) {
  for (int i = threadIdx.x; i < 64 * kDepth / 4; i += kThreads) {
    const int row = i / (kDepth / 4), column = i % (kDepth / 4) * 4;
    const std::int64_t start = at(row);
    const float4 x =
        four_numbers(data, type, start + (first + column) * stride, stride, start < 0 ? 0 : d - first - column);
    to[column][row] = x.x, to[column + 1][row] = x.y, to[column + 2][row] = x.z, to[column + 3][row] = x.w;
  }
}

__device__ float at(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Scores of queries [token, token + kQueries) and keys [key, key + kKeys) of sequence b.
__device__ void score_tile(const IndexScoresParams& p, Shared& shared, std::int64_t b, std::int64_t token,
                           std::int64_t token_end, std::int64_t key) {
  const int thread = threadIdx.x;
  const Sequence sequence = sequence_of(p, p, b);
  if (thread < kQueries)
    shared.seen[thread] = token + thread < token_end ? visible_keys(p, b, sequence, token + thread) : KeyRange{0, 0};
  __syncthreads();
  std::int64_t first = key + kKeys, last = key;  // keys of the tile that some query sees
  for (const KeyRange& seen : shared.seen)
    if (seen.first < seen.last) first = min(first, seen.first), last = max(last, seen.last);
  first = max(first, key), last = min(last, key + kKeys);
  if (thread < kKeys) {
    const std::int64_t j = key + thread;
    shared.key_at[thread] = j >= first && j < last ? key_index(p, p.k_stride, b, 0, 0, j) : -1;
  }
  __syncthreads();

  const int row = thread / 16, own_query = row / 4, own_key = thread % 16 * 4;
  float sum[4] = {};
  for (std::int64_t head = 0; first < last && head < p.h; head += kHeads) {
    float x[4][4] = {};  // heads head + row % 4 * 4 + i of own_query; keys own_key + n
    for (std::int64_t column = 0; column < p.d; column += kDepth) {
      load_rows(shared.q, p.q, p.q_type, p.q_stride.d, column, p.d, [&](int r) {
        const std::int64_t query = token + r / kHeads, h = head + r % kHeads;
        return query < token_end && h < p.h ? b * p.q_stride.b + query * p.q_stride.s + h * p.q_stride.h : -1;
      });
      load_rows(shared.k, p.k, p.k_type, p.k_stride.d, column, p.d, [&](int r) { return shared.key_at[r]; });
      __syncthreads();
#pragma unroll 8
      for (int c = 0; c < kDepth; ++c) {
        const float4 q = *reinterpret_cast<const float4*>(&shared.q[c][4 * row]);
        const float4 k = *reinterpret_cast<const float4*>(&shared.k[c][own_key]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int n = 0; n < 4; ++n) x[i][n] = fmaf(at(q, i), at(k, n), x[i][n]);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t h = head + row % 4 * 4 + i, query = token + own_query;
      if (h >= p.h || query >= token_end) continue;  // not even times 0: keys may be infinite
      const float weight =
          p.weights[b * p.weights_stride.b + query * p.weights_stride.s + h * p.weights_stride.h] * p.scale;
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[n] = fmaf(p.relu && x[i][n] < 0 ? 0.f : x[i][n], weight, sum[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) shared.sums[row][own_key + n] = sum[n];
  __syncthreads();

  const int query = thread / kKeys;
  const std::int64_t j = key + thread % kKeys;
  if (token + query < token_end && j < p.sk) {
    float score = -kInfinity;
    if (j >= shared.seen[query].first && j < shared.seen[query].last) {
      score = 0;
      for (int r = 4 * query; r < 4 * query + 4; ++r) score += shared.sums[r][thread % kKeys];
      if (p.k_scale) score *= p.k_scale[key_index(p, p.k_scale_stride, b, 0, 0, j)];
    }
    p.scores[b * p.scores_stride.b + (token + query) * p.scores_stride.s + j * p.scores_stride.d] = score;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    index_scores(const __grid_constant__ IndexScoresParams p, const __grid_constant__ IndexQueries queries) {
  __shared__ Shared shared;
  const std::int64_t blocks = ceil_div(queries.tokens(), kQueries), key_tiles = ceil_div(p.sk, kKeys);
  for (std::int64_t i = blockIdx.x; i < queries.sequences() * blocks * key_tiles; i += gridDim.x) {
    const std::int64_t row = i / key_tiles;
    score_tile(p, shared, queries.b_begin + row / blocks, queries.token_begin + row % blocks * kQueries,
               queries.token_end, i % key_tiles * kKeys);
  }
}

}  // namespace

cudaError_t launch_index_scores(const IndexScoresParams& p, const IndexQueries& queries, cudaStream_t stream) {
  constexpr std::int64_t kMaxBlocks = 1 << 20;
  const std::int64_t rows = queries.sequences() * ceil_div(queries.tokens(), kQueries);
  if (rows == 0 || p.sk == 0) return cudaSuccess;
  const std::int64_t tiles = rows < kMaxBlocks ? rows * ceil_div(p.sk, kKeys) : kMaxBlocks;
  return launch_kernel(false, index_scores, static_cast<unsigned>(std::min(tiles, kMaxBlocks)), kThreads, 0, stream, p,
                       queries);
}

}  // namespace rapt::cuda
