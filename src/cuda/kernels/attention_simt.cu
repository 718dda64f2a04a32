// Attention in fp32 on the ordinary cores of any GPU, whatever the types, strides and head sizes: FlashAttention-2's
// schedule in shared memory. A block does a tile of 64 rows, and 256 threads in 16 x 16 each 4 x 4 of everything: of
// the 64 x 64 scores, and of each 64 columns of the output. (8 x 4 read less shared memory for a product, but left too
// few threads to hide latencies: 5 to 25 % slower on an H200.)
#include <algorithm>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {
namespace {

constexpr int kRows = kSimtRows, kKeys = kSimtKeys, kColumns = 64;
constexpr int kDepth = 32;  // of the head size, at a time
using Tiles = Tiling<kRows>;
constexpr int kSide = 16, kThreads = kSide * kSide, kEach = kRows / kSide;

// Matrices in shared memory are stored by columns of 64, and read 4 x 16 bytes at a time. Groups of 4 within a column
// are permuted by the column, so that transposing stores meet different banks.
__device__ int at_column(int column, int group, int in_group) {
  return column * 64 + ((group ^ (column / 4 % 16)) * 4) + in_group;
}
__device__ float4 column4(const float* matrix, int column, int group) {
  return *reinterpret_cast<const float4*>(matrix + at_column(column, group, 0));
}

// Columns [depth, depth + kDepth) of 64 rows of `x`, whose first elements are at `rows`, negative for none.
template <class Scale>
__device__ void load_transposed(float* to, const void* x, DType type, const std::int64_t* rows, std::int64_t stride,
                                std::int64_t depth, std::int64_t size, Scale scale) {
  constexpr int kFours = kDepth / 4;
  const int four = threadIdx.x % kFours;
  for (int row = threadIdx.x / kFours; row < 64; row += kThreads / kFours) {
    const std::int64_t column = depth + 4 * four, n = rows[row] < 0 ? 0 : size - column;
    const float4 e = load4(x, type, rows[row] + column * stride, stride, n);
    const float each[4] = {e.x, e.y, e.z, e.w};
    for (int i = 0; i < 4; ++i) to[at_column(4 * four + i, row / 4, row % 4)] = scale(each[i]);
  }
}

__device__ void add_product(float (&sum)[kEach][4], const float4& a, const float4& b) {
  const float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
}

// Over the 16 threads that share rows.
template <class Combine>
__device__ float over_row(float x, Combine combine) {
#pragma unroll
  for (int n = kSide / 2; n > 0; n /= 2) x = combine(x, __shfl_xor_sync(~0u, x, n));
  return x;
}

// The rows of a tile whose bits are set in `wanted`. In kChunks of kColumns columns of V, at most.
template <int kChunks>
__device__ __forceinline__ void attend(const AttentionParams& p, unsigned number, std::uint64_t wanted) {
  __shared__ __align__(16) float operands[2 * kDepth * 64];  // Q^T and K^T of kDepth columns, or kColumns columns of V
  __shared__ __align__(16) float weights[kKeys * kRows];     // by keys
  __shared__ Row rows[kRows];
  __shared__ std::int64_t q_at[kRows], k_at[kKeys], v_at[kKeys];
  float *const q = operands, *const k = operands + kDepth * 64;

  const auto tiles = static_cast<unsigned>(Tiles::tiles(p));
  const Tiles::Tile tile = Tiles::find(p, static_cast<int>(number / tiles), static_cast<int>(number % tiles));
  const Head head(p, tile.b, tile.hk);
  const std::int64_t all_rows = head.len_q * p.group;
  if (tile.row >= all_rows) return;
  const bool terms = has_terms(p.score);
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;

  if (threadIdx.x < kRows) {
    const std::int64_t r = min(tile.row + threadIdx.x, all_rows - 1);
    rows[threadIdx.x] = Row(head, r);
    q_at[threadIdx.x] = row_at(p.q_stride, head, rows[threadIdx.x]);
  }
  __syncthreads();
  std::int64_t begin = head.high, end = 0;  // keys that any row of the tile sees
  for (const Row& row : rows) begin = min(begin, row.first), end = max(end, row.last);

  float o[kChunks][kEach][4] = {}, m[kEach], l[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    m[i] = sink_of(head, rows[kEach * ty + i]);
    l[i] = tx == 0 && m[i] != -infinity() ? 1.f : 0.f;  // a share of the sum: threads of a row add theirs in the end
  }

  // From a multiple of the block on, so that a row's keys are cut alike whatever rows are beside it.
  for (std::int64_t block = begin / kKeys * kKeys; block < end; block += kKeys) {
    if (threadIdx.x < kKeys) {
      const std::int64_t j = block + threadIdx.x;
      const bool there = j >= begin && j < end;
      k_at[threadIdx.x] = there ? head.key_at(p.k_stride, j) : -1;
      v_at[threadIdx.x] = there ? head.key_at(p.v_stride, j) : -1;
    }
    float s[kEach][4] = {};
    for (std::int64_t depth = 0; depth < p.d; depth += kDepth) {
      __syncthreads();
      load_transposed(q, p.q, p.q_type, q_at, p.q_stride.d, depth, p.d,
                      [&](float x) { return x * p.score.scale_log2; });
      load_transposed(k, p.k, p.kv_type, k_at, p.k_stride.d, depth, p.d, [](float x) { return x; });
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < kDepth; ++i) add_product(s, column4(q, i, ty), column4(k, i, tx));
    }

    float scale[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Row& row = rows[kEach * ty + i];
      const auto first = static_cast<int>(clamp(row.first - block, 0, kKeys));
      const auto last = static_cast<int>(clamp(row.last - block, 0, kKeys));
      float top = m[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = 4 * tx + j;
        if (key < first || key >= last) s[i][j] = -infinity();
        else if (terms) s[i][j] = finish_score(head, row, block + key, s[i][j]);
        top = fmaxf(top, s[i][j]);
      }
      top = over_row(top, [](float a, float b) { return fmaxf(a, b); });
      const float r = reference(top);
      scale[i] = exp2_approx(m[i] - r);
      m[i] = top;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][j] = weight_of(s[i][j], r);
        sum += s[i][j];
      }
      l[i] = fmaf(l[i], scale[i], sum);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<float4*>(weights + at_column(4 * tx + j, ty, 0)) =
          make_float4(s[0][j], s[1][j], s[2][j], s[3][j]);

#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kColumns >= p.dv) break;
      __syncthreads();
      bool bad = false;
      for (int key = ty; key < kKeys; key += kSide) {
        const std::int64_t column = chunk * kColumns + 4 * tx, n = v_at[key] < 0 ? 0 : p.dv - column;
        const float4 v = load4(p.v, p.kv_type, v_at[key] + column * p.v_stride.d, p.v_stride.d, n);
        bad |= !is_finite(v.x) || !is_finite(v.y) || !is_finite(v.z) || !is_finite(v.w);
        *reinterpret_cast<float4*>(operands + key * kColumns + 4 * tx) = v;
      }
      // The block's own sum first: the rounding of a sum grows with its terms.
      float sum[kEach][4] = {};
      const auto v4 = [&](int key) { return *reinterpret_cast<const float4*>(operands + key * kColumns + 4 * tx); };
      if (__syncthreads_or(bad)) {
        // Hidden keys must not leak: 0 times NaN or Inf is NaN.
        for (int key = 0; key < kKeys; ++key) {
          const float4 w = column4(weights, key, ty), v = v4(key);
          const float weight[4] = {w.x, w.y, w.z, w.w}, value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int i = 0; i < kEach; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
              if (!is_hidden(weight[i])) sum[i][j] = fmaf(weight[i], value[j], sum[i][j]);
        }
      } else {
#pragma unroll 8
        for (int key = 0; key < kKeys; ++key) add_product(sum, column4(weights, key, ty), v4(key));
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = o[chunk][i][j];
          x = is_finite(x) ? fmaf(x, scale[i], sum[i][j]) : x + sum[i][j];  // inf * 0 is no NaN
        }
    }
  }

#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    l[i] = over_row(l[i], [](float a, float b) { return a + b; });
    if (tile.row + kEach * ty + i >= all_rows || !(wanted >> (kEach * ty + i) & 1)) continue;
    const Row& row = rows[kEach * ty + i];
    const std::int64_t at = row_at(p.out_stride, head, row);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t column = chunk * kColumns + 4 * tx + j;
        if (column < p.dv)
          store(p.out, p.out_type, at + column * p.out_stride.d, l[i] == 0 ? 0.f : o[chunk][i][j] / l[i]);
      }
    if (p.lse && tx == 0) p.lse[row_at(p.lse_stride, head, row)] = lse_of(m[i], l[i]);
  }
}

template <int kChunks>
__global__ void __launch_bounds__(kThreads, kChunks <= 2 ? 2 : 1) simt(const __grid_constant__ AttentionParams p) {
  // Heads one after another, so that K and V stay cached; the last rows first, since causal makes them the longest.
  const auto tiles = static_cast<unsigned>(Tiles::tiles(p)), in_head = blockIdx.x % tiles;
  attend<kChunks>(p, blockIdx.x - in_head + tiles - 1 - in_head, ~std::uint64_t{0});
}

// Only rows whose bits are set. Mostly none is: each thread looks at another tile.
template <int kChunks>
__global__ void __launch_bounds__(kThreads)
    simt_again(const __grid_constant__ AttentionParams p, const std::uint64_t* redo, unsigned tiles) {
  __shared__ std::uint64_t wanted[kThreads];
  for (unsigned first = blockIdx.x; first < tiles; first += kThreads * gridDim.x) {
    const unsigned mine = first + threadIdx.x * gridDim.x;
    wanted[threadIdx.x] = mine < tiles ? redo[mine] : 0;
    if (!__syncthreads_or(wanted[threadIdx.x] != 0)) continue;
    for (unsigned i = 0; i < kThreads; ++i) {
      if (wanted[i] == 0) continue;
      attend<kChunks>(p, first + i * gridDim.x, wanted[i]);
      __syncthreads();
    }
  }
}

template <int kChunks>
void launch(const AttentionParams& p, cudaStream_t stream, const std::uint64_t* redo) {
  const auto tiles = static_cast<unsigned>(simt_tiles(p));
  if (!redo) {
    simt<kChunks><<<tiles, kThreads, 0, stream>>>(p);
    return;
  }
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  // An odd number of blocks, or tiles that are alike in all heads would be one block's.
  simt_again<kChunks><<<std::min(tiles, static_cast<unsigned>(2 * processors + 1)), kThreads, 0, stream>>>(p, redo, tiles);
}

}  // namespace

std::int64_t simt_tiles(const AttentionParams& p) {
  return Tiles::heads(p) * Tiles::tiles(p);
}

void attention_simt(const AttentionParams& p, cudaStream_t stream, const std::uint64_t* redo) {
  if (p.dv <= kColumns) launch<1>(p, stream, redo);
  else if (p.dv <= 2 * kColumns) launch<2>(p, stream, redo);
  else if (p.dv <= 4 * kColumns) launch<4>(p, stream, redo);
  else launch<kSimtMaxValueSize / kColumns>(p, stream, redo);
}

}  // namespace rapt::cuda
