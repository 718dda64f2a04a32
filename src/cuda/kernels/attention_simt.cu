// Attention in fp32 on the ordinary cores of any GPU, whatever the types, strides and head sizes: FlashAttention-2's
// schedule in shared memory. A block does a tile of 64 rows, and its threads, 16 side by side, each 8 x 4 of
// everything (4 x 4 where V is wide): of the 64 x 64 scores, and of each 64 columns of the output.
#include <algorithm>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {
namespace {

constexpr int kRows = kSimtRows, kKeys = kSimtKeys, kColumns = 64;
constexpr int kDepth = 32;  // of the head size, at a time
constexpr int kSide = 16;   // threads that share rows, all of one warp
using Tiles = Tiling<kRows>;

// Matrices in shared memory are stored by rows, with 16 bytes between them, so that neighbouring rows meet different
// banks, and read 4 elements at a time.
template <int kWidth>
struct Matrix {
  static constexpr int kPitch = kWidth + 4;
  float* data;

  __device__ float4& four(int row, int column) const {
    return *reinterpret_cast<float4*>(data + row * kPitch + column);
  }
};

// Four neighbours in memory, as they are and in fp32.
__device__ float4 widen(const float4& x, DType) {
  return x;
}
__device__ float4 widen(const uint2& x, DType type) {
  const std::uint32_t bits[2] = {x.x, x.y};
  float2 pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i] = type == DType::f16 ? __half22float2(reinterpret_cast<const __half2&>(bits[i]))
                                 : make_float2(__uint_as_float(bits[i] << 16), __uint_as_float(bits[i] & 0xffff0000u));
  }
  return make_float4(pair[0].x, pair[0].y, pair[1].x, pair[1].y);
}

// Rows of q, k or v in global memory.
struct Source {
  const void* data;
  DType type;
  std::int64_t stride, size;

  // Whether fours of a row are whole, and neighbours aligned to their size.
  __device__ bool vector(const Strides& s) const {
    return s.d == 1 && (size | s.b | s.h | s.s) % 4 == 0 &&
           reinterpret_cast<std::uintptr_t>(data) % (type == DType::f32 ? 16 : 8) == 0;
  }
};

// Columns [column, column + kWidth) of kHas rows that lie `at`, negative for none; put(row, column of them, four
// elements) stores them.
template <int kWidth, int kThreads, int kHas = 64>
struct Fetch {
  static constexpr int kFours = kWidth / 4, kAtOnce = kThreads / kFours, kTimes = kHas / kAtOnce;
  const Source& x;
  const std::int64_t* at;
  std::int64_t column;
  int row, own;

  __device__ Fetch(const Source& x, const std::int64_t* at, std::int64_t column) : x(x), at(at), column(column) {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // or addresses are worked out long before, and wait in registers
    row = thread / kFours, own = thread % kFours * 4;
  }

  template <class Put>
  __device__ void operator()(bool vector, Put put) const {
    if (!vector) one_by_one(put);
    else if (x.type == DType::f32) at_once<float4>(put);
    else at_once<uint2>(put);
  }
  template <class Four, class Put>
  __device__ void at_once(Put put) const {
    const auto* const from = static_cast<const char*>(x.data) + (column + own) * (sizeof(Four) / 4);
    const bool there = column + own < x.size;
    Four e[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const std::int64_t of_row = at[row + i * kAtOnce];
      e[i] = there && of_row >= 0 ? *reinterpret_cast<const Four*>(from + of_row * (sizeof(Four) / 4)) : Four{};
    }
#pragma unroll
    for (int i = 0; i < kTimes; ++i) put(row + i * kAtOnce, own, widen(e[i], x.type));
  }
  template <class Put>
  __device__ void one_by_one(Put put) const {
#pragma unroll 1
    for (int i = row; i < kHas; i += kAtOnce) {
      const std::int64_t n = at[i] < 0 ? 0 : x.size - column - own;
      put(i, own, load4(x.data, x.type, at[i] + (column + own) * x.stride, x.stride, n));
    }
  }
};

__device__ __forceinline__ float part(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Over the threads that share rows: their lanes differ in these bits.
template <class Combine>
__device__ float over_row(float x, Combine combine) {
  for (const int bit : {16, 8, 4, 1}) x = combine(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

// Of a kernel for so many times kColumns columns of V: rows of a thread, for what registers hold; threads; and blocks
// that are to fit on a multiprocessor.
template <int kChunks>
struct Shape {
  static constexpr int kEach = kChunks <= 4 ? 8 : 4, kThreads = kRows / kEach * kSide;
  static constexpr int kBlocks = kChunks <= 2 ? 3 : kChunks <= 4 ? 2 : 1;
};

// How a thread block does rows of a tile, kEach by each of its threads.
template <int kThreads, int kEach_, int kDepth_>
struct Part {
  static constexpr int kEach = kEach_, kApart = kThreads / kSide;  // of the rows of a thread
  static constexpr int kHas = kEach * kApart, kDepth = kDepth_;    // rows; and columns of the head size at a time
  static constexpr int kOperands = std::max(kKeys * kColumns, (kHas + kKeys) * Matrix<kDepth>::kPitch);
};
template <int kChunks>
using All = Part<Shape<kChunks>::kThreads, Shape<kChunks>::kEach, kDepth>;
// Where few rows are wanted, each thread has one, and time goes to waiting: for fewer and larger fetches here.
template <int kChunks>
using Few = Part<Shape<kChunks>::kThreads, 1, 2 * kDepth>;
template <int kChunks>
constexpr int kOperandsOfBoth = std::max(All<kChunks>::kOperands, Few<kChunks>::kOperands);

template <int kOperands>
struct Shared {
  alignas(16) float operands[kOperands];  // of q and k; or kColumns columns of v
  alignas(16) float weights[kRows * Matrix<kKeys>::kPitch];
  Row rows[kRows];
  std::int64_t q_at[kRows], out_at[kRows], lse_at[kRows], k_at[kKeys], v_at[kKeys];
  float maxima[kRows], scales[kRows];  // of scores so far; and what it makes of earlier weights
  int2 seen[kRows];                    // of the block's keys, the first and the end of those that a row sees
};

// The rows of a tile whose bits are set in `wanted`. In kChunks of kColumns columns of V, at most. A row's bits are the
// same whatever the part.
template <int kChunks, class C, int kOperands>
__device__ __forceinline__ void attend(const AttentionParams& p, unsigned number, std::uint64_t wanted,
                                       Shared<kOperands>& shared) {
  constexpr int kEach = C::kEach, kThreads = Shape<kChunks>::kThreads, kHas = C::kHas, kDepth = C::kDepth;
  constexpr int kUnroll = kEach == 1 ? 2 : 1;
  auto& [operands, weights_data, rows, q_at, out_at, lse_at, k_at, v_at, maxima, scales, seen] = shared;
  const Matrix<kDepth> q = {operands}, k = {operands + kHas * Matrix<kDepth>::kPitch};
  const Matrix<kColumns - 4> v = {operands};  // a row at a time is read: it needs nothing between them
  const Matrix<kKeys> weights = {weights_data};
  static_assert(kOperands >= C::kOperands && (kHas == kRows || kEach == 1) && kRows == kKeys);

  const auto tiles = static_cast<unsigned>(Tiles::tiles(p));
  const Tiles::Tile tile = Tiles::find(p, static_cast<int>(number / tiles), static_cast<int>(number % tiles));
  const Head head(p, tile.b, tile.hk);
  const std::int64_t all_rows = head.len_q * p.group;
  if (tile.row >= all_rows) return;
  const bool modifiers = has_modifiers(p.score);
  const Source from_q = {p.q, p.q_type, p.q_stride.d, p.d}, from_k = {p.k, p.kv_type, p.k_stride.d, p.d},
               from_v = {p.v, p.kv_type, p.v_stride.d, p.dv};
  const bool vector = from_q.vector(p.q_stride) && from_k.vector(p.k_stride) && from_v.vector(p.v_stride);
  // A warp is 16 threads wide and 2 high. Shared memory serves half a warp's 16 bytes each at once only if lanes that
  // differ in bit 0, or those in bit 1, read the same: the former do of rows, the latter of keys and columns.
  const int lane = threadIdx.x % 32, tx = (lane & 1) | (lane >> 1 & 14), ty = threadIdx.x / 32 * 2 + (lane >> 1 & 1);
  const auto row_of = [&](int i) { return ty + i * C::kApart; };

  if (threadIdx.x < kHas) {
    std::int64_t r = tile.row + threadIdx.x;
    bool is_wanted = wanted >> threadIdx.x & 1;
    if constexpr (kHas < kRows) {  // the wanted ones, then the first of them for nothing
      std::uint64_t left = wanted;
      for (unsigned i = 0; i < threadIdx.x; ++i) left &= left - 1;
      is_wanted = left != 0;
      r = tile.row + __ffsll(static_cast<long long>(is_wanted ? left : wanted)) - 1;
    }
    const Row row = rows[threadIdx.x] = Row(head, min(r, all_rows - 1));
    q_at[threadIdx.x] = row_at(p.q_stride, head, row);
    out_at[threadIdx.x] = r < all_rows && is_wanted ? row_at(p.out_stride, head, row) : -1;
    lse_at[threadIdx.x] = row_at(p.lse_stride, head, row);
  }
  __syncthreads();
  // Keys that any of the rows sees, and those that all see.
  std::int64_t begin = head.len_k, end = 0, all_begin = 0, all_end = head.len_k;
#pragma unroll 4
  for (int i = 0; i < kHas; ++i) {
    begin = min(begin, rows[i].first), end = max(end, rows[i].last);
    all_begin = max(all_begin, rows[i].first), all_end = min(all_end, rows[i].last);
  }

  float o[kChunks][kEach][4] = {}, l[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (tx == 0) maxima[row_of(i)] = -kInfinity;
    l[i] = 0;  // a share of the sum: threads of a row add theirs in the end
  }

  // From a multiple of the block on, so that a row's keys are cut alike whatever rows are beside it.
  for (std::int64_t block = begin / kKeys * kKeys; block < end; block += kKeys) {
    if (threadIdx.x < kKeys) {
      const std::int64_t j = block + threadIdx.x;
      const bool there = j >= begin && j < end;
      k_at[threadIdx.x] = there ? head.key_at(p.k_stride, j) : -1;
      v_at[threadIdx.x] = there ? head.key_at(p.v_stride, j) : -1;
      const Row& row = rows[threadIdx.x % kHas];
      seen[threadIdx.x] = make_int2(static_cast<int>(clamp_to(row.first - block, 0, kKeys)),
                                    static_cast<int>(clamp_to(row.last - block, 0, kKeys)));
    }
    float s[kEach][4] = {};
    for (std::int64_t depth = 0; depth < p.d; depth += kDepth) {
      __syncthreads();
      Fetch<kDepth, kThreads, kHas>(from_q, q_at, depth)(
          vector, [&](int row, int column, float4 e) { q.four(row, column) = e; });
      // Key 4 i + j is in row i + 16 j: a thread's four are neighbours, but what it reads beside others' is too.
      Fetch<kDepth, kThreads>(from_k, k_at, depth)(
          vector, [&](int row, int column, float4 e) { k.four(row % 4 * kSide + row / 4, column) = e; });
      __syncthreads();
#pragma unroll kUnroll
      for (int at = 0; at < kDepth; at += 4) {
        float4 right[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) right[j] = k.four(tx + j * kSide, at);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const float4 left = q.four(row_of(i), at);
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) s[i][j] = fmaf(part(left, n), part(right[j], n), s[i][j]);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i][j] *= p.score.scale_log2;

    // By way of shared memory, in a loop: code for each element of `s` would take registers from the rest.
    if (modifiers) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) weights.four(row_of(i), 4 * tx) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
#pragma unroll 1
      for (int n = 0; n < kEach * 4; ++n) {
        const int row = row_of(n / 4), key = 4 * tx + n % 4;
        float& x = weights.data[row * weights.kPitch + key];
        if (key >= seen[row].x && key < seen[row].y) x = finish_score(head, rows[row], block + key, x);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] = part(weights.four(row_of(i), 4 * tx), j);
    }
    if (block < all_begin || block + kKeys > all_end) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int2 sees = seen[row_of(i)];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (4 * tx + j < sees.x || 4 * tx + j >= sees.y) s[i][j] = -kInfinity;
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float before = maxima[row_of(i)];
      float top = before;
#pragma unroll
      for (int j = 0; j < 4; ++j) top = fmaxf(top, s[i][j]);
      top = over_row(top, Max());
      const float r = reference(top);
      const float scale = exp2_approx(before - r);
      __syncwarp();  // all have read the maximum before
      if (tx == 0) maxima[row_of(i)] = top, scales[row_of(i)] = scale;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][j] = weight_of(s[i][j], r);
        sum += s[i][j];
      }
      l[i] = fmaf(l[i], scale, sum);
      weights.four(row_of(i), 4 * tx) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
    }

#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kColumns >= p.dv) break;
      __syncthreads();
      bool bad = false;
      Fetch<kColumns, kThreads>(from_v, v_at, chunk * kColumns)(vector, [&](int row, int column, float4 e) {
        bad |= !is_finite(e.x) || !is_finite(e.y) || !is_finite(e.z) || !is_finite(e.w);
        v.four(row, column) = e;
      });
      // The block's own sum first: the rounding of a sum grows with its terms.
      float sum[kEach][4] = {};
      const auto add = [&](int key, auto skip) {
        float4 right[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) right[n] = v.four(key + n, 4 * tx);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const float4 left = weights.four(row_of(i), key);
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j)
              if (!skip(part(left, n))) sum[i][j] = fmaf(part(left, n), part(right[n], j), sum[i][j]);
        }
      };
      if (__syncthreads_or(bad)) {
        // Hidden keys must not leak: 0 times NaN or Inf is NaN.
#pragma unroll 1
        for (int key = 0; key < kKeys; key += 4) add(key, [](float weight) { return is_hidden(weight); });
      } else {
#pragma unroll kUnroll
        for (int key = 0; key < kKeys; key += 4) add(key, [](float) { return false; });
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float scale = scales[row_of(i)];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = o[chunk][i][j];
          x = is_finite(x) ? fmaf(x, scale, sum[i][j]) : x + sum[i][j];  // inf * 0 is no NaN
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    l[i] = over_row(l[i], Sum());
    const std::int64_t at = out_at[row_of(i)];
    if (at < 0) continue;
    const Row& row = rows[row_of(i)];
    const Finish f = finish_row(maxima[row_of(i)], l[i], sink_of(head, row), alibi_shift_log2(head, row));
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t column = chunk * kColumns + 4 * tx + j;
        if (column < p.dv)
          store(p.out, p.out_type, at + column * p.out_stride.d,
                f.sum == 0 ? 0.f : o[chunk][i][j] * f.half * f.half / f.sum);
      }
    if (p.lse && tx == 0) p.lse[lse_at[row_of(i)]] = f.lse;
  }
}

template <int kChunks>
__global__ void __launch_bounds__(Shape<kChunks>::kThreads, Shape<kChunks>::kBlocks)
    simt(const __grid_constant__ AttentionParams p) {
  __shared__ Shared<All<kChunks>::kOperands> shared;
  // Heads one after another, so that K and V stay cached; the last rows first, since causal makes them the longest.
  const auto tiles = static_cast<unsigned>(Tiles::tiles(p)), in_head = blockIdx.x % tiles;
  attend<kChunks, All<kChunks>>(p, blockIdx.x - in_head + tiles - 1 - in_head, ~std::uint64_t{0}, shared);
}

constexpr int kBlocksAgain = 2;  // of simt_again on a multiprocessor

// Only rows whose bits are set. Mostly none is: each thread looks at another tile.
template <int kChunks>
__global__ void __launch_bounds__(Shape<kChunks>::kThreads, kBlocksAgain)
    simt_again(const __grid_constant__ AttentionParams p, const std::uint64_t* redo, unsigned tiles) {
  constexpr int kThreads = Shape<kChunks>::kThreads;
  __shared__ Shared<kOperandsOfBoth<kChunks>> shared;
  __shared__ std::uint64_t wanted[kThreads];
  __shared__ unsigned of_warp[kThreads / 32];  // a bit for each thread whose tile has such rows
  wait_for_previous();
  for (unsigned first = blockIdx.x; first < tiles; first += kThreads * gridDim.x) {
    const unsigned mine = first + threadIdx.x * gridDim.x;
    const std::uint64_t rows = wanted[threadIdx.x] = mine < tiles ? redo[mine] : 0;
    const unsigned any = __ballot_sync(~0u, rows != 0);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = any;
    if (!__syncthreads_or(rows != 0)) continue;
#pragma unroll 1
    for (int warp = 0; warp < kThreads / 32; ++warp)
#pragma unroll 1
      for (unsigned left = of_warp[warp]; left != 0; left &= left - 1) {
        const int i = warp * 32 + __ffs(static_cast<int>(left)) - 1;
        const unsigned tile = first + i * gridDim.x;
        if (__popcll(wanted[i]) <= Few<kChunks>::kHas) attend<kChunks, Few<kChunks>>(p, tile, wanted[i], shared);
        else attend<kChunks, All<kChunks>>(p, tile, wanted[i], shared);
        __syncthreads();
      }
    __syncthreads();  // all are done with `wanted`
  }
}

template <int kChunks>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream, const std::uint64_t* redo) {
  constexpr int kThreads = Shape<kChunks>::kThreads;
  const auto tiles = static_cast<unsigned>(simt_tiles(p));
  if (!redo) return launch_kernel(false, simt<kChunks>, tiles, kThreads, 0, stream, p);
  if constexpr (kChunks > 4) {
    return cudaErrorInvalidValue;  // rows are left by kernels for values of at most 256
  } else {
    // An odd number of blocks, or tiles that are alike in all heads would be one block's.
    const unsigned blocks = std::min(tiles, static_cast<unsigned>(kBlocksAgain * multiprocessors() / 2 * 2 + 1));
    return launch_kernel(true, simt_again<kChunks>, blocks, kThreads, 0, stream, p, redo, tiles);
  }
}

}  // namespace

std::int64_t simt_tiles(const AttentionParams& p) {
  return Tiles::heads(p) * Tiles::tiles(p);
}

cudaError_t attention_simt(const AttentionParams& p, cudaStream_t stream, const std::uint64_t* redo) {
  if (p.dv <= kColumns) return launch<1>(p, stream, redo);
  if (p.dv <= 2 * kColumns) return launch<2>(p, stream, redo);
  if (p.dv <= 4 * kColumns) return launch<4>(p, stream, redo);
  return launch<kSimtMaxValueHeadSize / kColumns>(p, stream, redo);
}

}  // namespace rapt::cuda
