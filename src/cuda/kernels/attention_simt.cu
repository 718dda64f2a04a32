// attention_simt: out = softmax(q k^T) v in fp32 on the ordinary cores of any GPU, for all types, strides and head
// dimensions; FlashAttention-2's schedule in shared memory.
//
// The entry attention_simt.f32 calls it, and attention_prefill_f32 for its fallback rows. It does 2 b hq sq sk (d + dv)
// flops, and reads K and V once from memory and once from L2 for each tile of rows. A thread block does a tile of 64
// rows. 16 neighbouring threads share rows; each has 8 x 4 (4 x 4 where V is wide) of the 64 x 64 scores, and of every
// 64 columns of the output.
#include <algorithm>
#include <type_traits>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/shared_rows.cuh"

namespace rapt::cuda {
namespace {

constexpr int kRows = kSimtRows, kKeys = kSimtKeys, kColumns = 64;
constexpr int kSide = 16;  // threads that share rows, all of one warp
using Tiles = Tiling<kRows>;

// The shape of a thread block's work: up to kChunks * kColumns columns of V, kRowsPerThread rows for each thread, and
// kDepth columns of Q and K in shared memory at a time.
template <int kChunks_, int kThreads_, int kRowsPerThread_, int kDepth_>
struct Shape {
  static constexpr int kChunks = kChunks_, kThreads = kThreads_, kRowsPerThread = kRowsPerThread_, kDepth = kDepth_;
  static constexpr int kRowStep = kThreads / kSide;            // from one row of a thread to the next
  static constexpr int kTileRows = kRowsPerThread * kRowStep;  // some may not be wanted
  static constexpr int kUnroll = kRowsPerThread == 1 ? 2 : 1;
  static constexpr int kOperands = std::max(kKeys * kColumns, (kTileRows + kKeys) * Matrix<kDepth>::kPitch);
  static_assert((kTileRows == kRows || kRowsPerThread == 1) && kRows == kKeys);
};
// As many rows for a thread as registers hold.
template <int kChunks>
constexpr int kRowsOfThread = kChunks <= 4 ? 8 : 4;
template <int kChunks>
constexpr int kBlockThreads = kRows / kRowsOfThread<kChunks>* kSide;
template <int kChunks>
constexpr int kBlocksPerProcessor = kChunks <= 2   ? 3
                                    : kChunks <= 4 ? 2
                                                   : 1;

template <int kChunks>
using FullTile = Shape<kChunks, kBlockThreads<kChunks>, kRowsOfThread<kChunks>, 32>;
// For few wanted rows: each thread has one row, and latency counts, so fetches are fewer and larger.
template <int kChunks>
using SmallTile = Shape<kChunks, kBlockThreads<kChunks>, 1, 64>;
template <int kChunks>
constexpr int kOperandsOfBoth = std::max(FullTile<kChunks>::kOperands, SmallTile<kChunks>::kOperands);

// kQuantized: keys and values are codes, with scales, zeros and a tail.
template <int kOperands, bool kQuantized>
struct Shared {
  using Place = std::conditional_t<kQuantized, KvPlace, std::int64_t>;
  alignas(16) float operands[kOperands];  // columns of q and k; or of v
  alignas(16) float weights[kRows * Matrix<kKeys>::kPitch];
  Row rows[kRows];
  std::int64_t q_at[kRows], out_at[kRows], lse_at[kRows];
  Place k_at[kKeys], v_at[kKeys];
  float row_max[kRows], rescale[kRows];  // maximum of scores so far; the factor of its last move on earlier weights
  int2 seen[kRows];                      // the keys [x, y) of the block that a row sees
};

// A thread's part of the tile: rows row(i), and four columns or keys from 4 * tx on.
template <class S>
struct ThreadTile {
  int tx, row_0;

  // A warp is 16 threads wide and 2 high. Shared memory serves 16 bytes for half a warp at once only if lanes that
  // differ in bit 0, or those that differ in bit 1, read the same: the former share rows, the latter keys and columns.
  __device__ ThreadTile() {
    const int lane = threadIdx.x % 32;
    tx = (lane & 1) | (lane >> 1 & 14), row_0 = threadIdx.x / 32 * 2 + (lane >> 1 & 1);
  }
  __device__ int row(int i) const { return row_0 + i * S::kRowStep; }
};

// Which of Q, K and V are fetched as vectors of four.
struct Vector {
  bool q, k, v;
};
template <class From, int kWidth, int kThreads, int kFetched>
using FetchOf = std::conditional_t<std::is_same_v<From, KvSide>, FetchCodes<kWidth, kThreads, kFetched>,
                                   Fetch<kWidth, kThreads, kFetched>>;

// Reduces over the threads that share rows: their lanes differ in these bits.
template <class Combine>
__device__ float over_row(float x, Combine combine) {
  for (const int bit : {16, 8, 4, 1}) x = combine(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

// Finds the rows of the tile that begins with row `first`, and their offsets.
template <class S, class Shared>
__device__ __forceinline__ void find_rows(const Head& head, std::int64_t first, std::int64_t end, std::uint64_t wanted,
                                          Shared& shared) {
  if (threadIdx.x >= S::kTileRows) return;
  const AttentionParams& p = head.p;
  std::int64_t r = first + threadIdx.x;
  bool is_wanted = wanted >> threadIdx.x & 1;
  if constexpr (S::kTileRows < kRows) {  // the wanted rows, then repetitions of the first one
    std::uint64_t left = wanted;
    for (unsigned i = 0; i < threadIdx.x; ++i) left &= left - 1;
    is_wanted = left != 0;
    r = first + __ffsll(static_cast<long long>(is_wanted ? left : wanted)) - 1;
  }
  const Row row = shared.rows[threadIdx.x] = Row(head, min(r, end - 1));
  shared.q_at[threadIdx.x] = row_at(p.q_stride, head, row);
  shared.out_at[threadIdx.x] = r < end && is_wanted ? row_at(p.out_stride, head, row) : -1;
  shared.lse_at[threadIdx.x] = row_at(p.lse_stride, head, row);
}

// Keys [begin, end) that any of the rows sees, and [all_begin, all_end) that all see.
struct TileKeys {
  std::int64_t begin, end, all_begin, all_end;
};
template <class S>
__device__ __forceinline__ TileKeys keys_of(const Row* rows, std::int64_t len_k) {
  TileKeys keys{len_k, 0, 0, len_k};
#pragma unroll 4
  for (int i = 0; i < S::kTileRows; ++i) {
    keys.begin = min(keys.begin, rows[i].first), keys.end = max(keys.end, rows[i].last);
    keys.all_begin = max(keys.all_begin, rows[i].first), keys.all_end = min(keys.all_end, rows[i].last);
  }
  return keys;
}

// Finds the keys of a block, and which of them each row sees. Out of line, to leave registers to the inner loops.
template <class S, class Shared>
__device__ __noinline__ void find_keys(const Head& head, const TileKeys& keys, std::int64_t block, Shared& shared) {
  if (threadIdx.x >= kKeys) return;
  const std::int64_t j = block + threadIdx.x;
  const bool exists = j >= keys.begin && j < keys.end;
  if constexpr (std::is_same_v<typename Shared::Place, KvPlace>) {
    constexpr KvPlace kNowhere = {-1, 0, 0, 0};
    shared.k_at[threadIdx.x] = exists ? KvSide::of_keys(head.p).place(head, j) : kNowhere;
    shared.v_at[threadIdx.x] = exists ? KvSide::of_values(head.p).place(head, j) : kNowhere;
  } else {
    shared.k_at[threadIdx.x] = exists ? head.key_at(head.p.k_stride, j) : -1;
    shared.v_at[threadIdx.x] = exists ? head.key_at(head.p.v_stride, j) : -1;
  }
  const Row& row = shared.rows[threadIdx.x % S::kTileRows];
  shared.seen[threadIdx.x] = make_int2(static_cast<int>(clamp_to(row.first - block, 0, kKeys)),
                                       static_cast<int>(clamp_to(row.last - block, 0, kKeys)));
}

// s = Q K^T of a block of keys.
template <class S, class Keys, class Shared>
__device__ __forceinline__ void multiply_keys(const ThreadTile<S>& thread, const Source& from_q, const Keys& from_k,
                                              const Vector& vector, Shared& shared, float (&s)[S::kRowsPerThread][4]) {
  const Matrix<S::kDepth> q = {shared.operands}, k = {shared.operands + S::kTileRows * Matrix<S::kDepth>::kPitch};
  for (std::int64_t depth = 0; depth < from_q.size; depth += S::kDepth) {
    __syncthreads();
    Fetch<S::kDepth, S::kThreads, S::kTileRows>(from_q, shared.q_at, depth)(
        vector.q, [&](int row, int column, float4 e) { q.four(row, column) = e; });
    // Key 4 i + j is stored in row i + 16 j, so that neighbouring threads, whose keys are 4 apart, read neighbouring
    // rows.
    FetchOf<Keys, S::kDepth, S::kThreads, kKeys>(from_k, shared.k_at, depth)(
        vector.k, [&](int row, int column, float4 e) { k.four(row % 4 * kSide + row / 4, column) = e; });
    __syncthreads();
#pragma unroll S::kUnroll
    for (int at = 0; at < S::kDepth; at += 4) {
      float4 right[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) right[j] = k.four(thread.tx + j * kSide, at);
#pragma unroll
      for (int i = 0; i < S::kRowsPerThread; ++i) {
        const float4 left = q.four(thread.row(i), at);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) s[i][j] = fmaf(element(left, n), element(right[j], n), s[i][j]);
      }
    }
  }
}

// Applies softcap, bias, mask and ALiBi. In a loop over scores in shared memory: unrolled code would take registers
// from the inner loops.
template <class S, class Shared>
__device__ __forceinline__ void modify_scores(const ThreadTile<S>& thread, const Head& head, std::int64_t block,
                                              Shared& shared, float (&s)[S::kRowsPerThread][4]) {
  const Matrix<kKeys> scores = {shared.weights};
#pragma unroll
  for (int i = 0; i < S::kRowsPerThread; ++i)
    scores.four(thread.row(i), 4 * thread.tx) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
#pragma unroll 1
  for (int n = 0; n < S::kRowsPerThread * 4; ++n) {
    const int row = thread.row(n / 4), key = 4 * thread.tx + n % 4;
    float& x = scores.data[row * scores.kPitch + key];
    if (key >= shared.seen[row].x && key < shared.seen[row].y) x = finish_score(head, shared.rows[row], block + key, x);
  }
#pragma unroll
  for (int i = 0; i < S::kRowsPerThread; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) s[i][j] = element(scores.four(thread.row(i), 4 * thread.tx), j);
}

// Sets scores of hidden keys to -inf.
template <class S, class Shared>
__device__ __forceinline__ void mask_scores(const ThreadTile<S>& thread, const Shared& shared,
                                            float (&s)[S::kRowsPerThread][4]) {
#pragma unroll
  for (int i = 0; i < S::kRowsPerThread; ++i) {
    const int2 seen = shared.seen[thread.row(i)];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * thread.tx + j < seen.x || 4 * thread.tx + j >= seen.y) s[i][j] = -kInfinity;
  }
}

// Scores to weights, in shared memory. `row_sum`: the thread's share of its rows' sums.
template <class S, class Shared>
__device__ __forceinline__ void softmax(const ThreadTile<S>& thread, Shared& shared, float (&s)[S::kRowsPerThread][4],
                                        float (&l)[S::kRowsPerThread]) {
  const Matrix<kKeys> weights = {shared.weights};
#pragma unroll
  for (int i = 0; i < S::kRowsPerThread; ++i) {
    const int row = thread.row(i);
    const float old_max = shared.row_max[row];
    float top = old_max;
#pragma unroll
    for (int j = 0; j < 4; ++j) top = fmaxf(top, s[i][j]);
    top = over_row(top, Max());
    const float rescale = rescale_factor(old_max, top);
    __syncwarp();  // all lanes have read the old maximum
    if (thread.tx == 0) shared.row_max[row] = top, shared.rescale[row] = rescale;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s[i][j] = weight_of(s[i][j], shift_of(top));
      sum += s[i][j];
    }
    l[i] = fmaf(l[i], rescale, sum);
    weights.four(row, 4 * thread.tx) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
  }
}

// O = O * rescale + P V of a block of keys, for 64 columns of V from `column` on.
template <class S, class Values, class Shared>
__device__ __forceinline__ void add_values(const ThreadTile<S>& thread, const Values& from_v, bool vector,
                                           std::int64_t column, Shared& shared, float (&o)[S::kRowsPerThread][4]) {
  const Matrix<kColumns - 4> v = {shared.operands};  // read a row at a time, so that rows need no padding
  const Matrix<kKeys> weights = {shared.weights};
  __syncthreads();
  bool any_nonfinite = false;
  FetchOf<Values, kColumns, S::kThreads, kKeys>(from_v, shared.v_at, column)(
      vector, [&](int row, int column, float4 e) {
        any_nonfinite |= !is_finite(e.x) || !is_finite(e.y) || !is_finite(e.z) || !is_finite(e.w);
        v.four(row, column) = e;
      });
  // The block's own sum first: the rounding error of a sum grows with its length.
  float sum[S::kRowsPerThread][4] = {};
  const auto add = [&](int key, auto skip) {
    float4 right[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) right[n] = v.four(key + n, 4 * thread.tx);
#pragma unroll
    for (int i = 0; i < S::kRowsPerThread; ++i) {
      const float4 left = weights.four(thread.row(i), key);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (!skip(element(left, n))) sum[i][j] = fmaf(element(left, n), element(right[n], j), sum[i][j]);
    }
  };
  if (__syncthreads_or(any_nonfinite)) {
    // Hidden keys must not leak: 0 times NaN or Inf is NaN.
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 4) add(key, [](float weight) { return is_hidden(weight); });
  } else {
#pragma unroll S::kUnroll
    for (int key = 0; key < kKeys; key += 4) add(key, [](float) { return false; });
  }
#pragma unroll
  for (int i = 0; i < S::kRowsPerThread; ++i) {
    const float rescale = shared.rescale[thread.row(i)];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& x = o[i][j];
      x = is_finite(x) ? fmaf(x, rescale, sum[i][j]) : x + sum[i][j];  // inf * 0 is no NaN
    }
  }
}

// Stores out and lse of the thread's rows.
template <class S, class Shared>
__device__ __forceinline__ void store_rows(const ThreadTile<S>& thread, const Head& head, const Shared& shared,
                                           const float (&o)[S::kChunks][S::kRowsPerThread][4],
                                           float (&l)[S::kRowsPerThread]) {
  const AttentionParams& p = head.p;
#pragma unroll
  for (int i = 0; i < S::kRowsPerThread; ++i) {
    l[i] = over_row(l[i], Sum());
    const std::int64_t at = shared.out_at[thread.row(i)];
    if (at < 0) continue;
    const Row& row = shared.rows[thread.row(i)];
    const FinalizedRow f =
        finalize_row(shared.row_max[thread.row(i)], l[i], sink_of(head, row), alibi_shift_log2(head, row));
#pragma unroll
    for (int chunk = 0; chunk < S::kChunks; ++chunk)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t column = chunk * kColumns + 4 * thread.tx + j;
        if (column < p.dv)
          store(p.out, p.out_type, at + column * p.out_stride.d,
                f.sum == 0 ? 0.f : o[chunk][i][j] * f.root_scale * f.root_scale / f.sum);
      }
    if (p.lse && thread.tx == 0) p.lse[shared.lse_at[thread.row(i)]] = f.lse;
  }
}

// Q, K and V in global memory, and which of them are fetched as vectors.
template <bool kQuantized>
struct Sources {
  Source q, k, v;
  Vector vector;

  __device__ explicit Sources(const AttentionParams& p)
      : q{p.q, p.q_type, p.q_stride.d, p.d},
        k{p.k, p.kv_type, p.k_stride.d, p.d},
        v{p.v, p.kv_type, p.v_stride.d, p.dv} {
    const bool all = q.is_vector(p.q_stride) && k.is_vector(p.k_stride) && v.is_vector(p.v_stride);
    vector = {all, all, all};
  }
};
template <>
struct Sources<true> {
  Source q;
  KvSide k, v;
  Vector vector;

  __device__ explicit Sources(const AttentionParams& p)
      : q{p.q, p.q_type, p.q_stride.d, p.d}, k(KvSide::of_keys(p)), v(KvSide::of_values(p)) {
    vector = {q.is_vector(p.q_stride), allows_vectors(k), allows_vectors(v)};
  }
};

// Does the rows of tile `number` whose bits are set in `wanted`. A row's bits do not depend on the shape.
template <class S, int kOperands, bool kQuantized>
__device__ __forceinline__ void attend(const AttentionParams& p, unsigned number, std::uint64_t wanted,
                                       Shared<kOperands, kQuantized>& shared) {
  static_assert(kOperands >= S::kOperands);
  const auto tiles = static_cast<unsigned>(Tiles::tiles(p));
  const Tiles::Tile tile = Tiles::find(p, static_cast<int>(number / tiles), static_cast<int>(number % tiles));
  const Head head(p, tile.b, tile.head);
  const std::int64_t rows = head.len_q * p.group;
  if (tile.row >= rows) return;
  const bool modified = has_modifiers(p.score);
  const Sources<kQuantized> from(p);
  const ThreadTile<S> thread;

  find_rows<S>(head, tile.row, rows, wanted, shared);
  __syncthreads();
  const TileKeys keys = keys_of<S>(shared.rows, head.len_k);
  float o[S::kChunks][S::kRowsPerThread][4] = {}, l[S::kRowsPerThread];
#pragma unroll
  for (int i = 0; i < S::kRowsPerThread; ++i) {
    if (thread.tx == 0) shared.row_max[thread.row(i)] = -kInfinity;
    l[i] = 0;
  }
  __syncwarp();  // rows without keys are stored at once
  // Blocks begin at multiples of kKeys, so that a row's keys are cut in the same places whatever other rows the tile
  // has.
  for (std::int64_t block = keys.begin / kKeys * kKeys; block < keys.end; block += kKeys) {
    find_keys<S>(head, keys, block, shared);
    float s[S::kRowsPerThread][4] = {};
    multiply_keys(thread, from.q, from.k, from.vector, shared, s);
#pragma unroll
    for (int i = 0; i < S::kRowsPerThread; ++i) {
      const float scale = score_scale(head, shared.rows[thread.row(i)]);
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i][j] *= scale;
    }
    if (modified) modify_scores(thread, head, block, shared, s);
    if (block < keys.all_begin || block + kKeys > keys.all_end) mask_scores(thread, shared, s);
    softmax(thread, shared, s, l);
#pragma unroll
    for (int chunk = 0; chunk < S::kChunks; ++chunk) {
      if (chunk * kColumns >= p.dv) break;
      add_values(thread, from.v, from.vector.v, chunk * kColumns, shared, o[chunk]);
    }
  }
  store_rows(thread, head, shared, o, l);
}

template <int kChunks, bool kQuantized>
__global__ void __launch_bounds__(kBlockThreads<kChunks>, kBlocksPerProcessor<kChunks>)
    attention_simt(const __grid_constant__ AttentionParams p) {
  __shared__ Shared<FullTile<kChunks>::kOperands, kQuantized> shared;
  // Head by head, so that K and V stay in L2; the last rows first, as in causal calls they are the longest.
  const auto tiles = static_cast<unsigned>(Tiles::tiles(p)), in_head = blockIdx.x % tiles;
  attend<FullTile<kChunks>>(p, blockIdx.x - in_head + tiles - 1 - in_head, ~std::uint64_t{0}, shared);
}

constexpr int kFallbackBlocksPerProcessor = 2;

// attention_simt for rows whose bits are set. Mostly there are none, so each thread checks another tile.
template <int kChunks>
__global__ void __launch_bounds__(kBlockThreads<kChunks>, kFallbackBlocksPerProcessor)
    attention_simt_fallback(const __grid_constant__ AttentionParams p, const std::uint64_t* fallback_rows,
                            unsigned tiles) {
  constexpr int kThreads = kBlockThreads<kChunks>;
  using Small = SmallTile<kChunks>;
  using Full = FullTile<kChunks>;
  __shared__ Shared<kOperandsOfBoth<kChunks>, false> shared;
  __shared__ std::uint64_t wanted[kThreads];
  __shared__ unsigned of_warp[kThreads / 32];  // a bit for each thread whose tile has such rows
  wait_on_dependent_grids();
  for (unsigned first = blockIdx.x; first < tiles; first += kThreads * gridDim.x) {
    const unsigned own_tile = first + threadIdx.x * gridDim.x;
    const std::uint64_t rows = wanted[threadIdx.x] = own_tile < tiles ? fallback_rows[own_tile] : 0;
    const unsigned any = __ballot_sync(~0u, rows != 0);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = any;
    if (!__syncthreads_or(rows != 0)) continue;
#pragma unroll 1
    for (int warp = 0; warp < kThreads / 32; ++warp)
#pragma unroll 1
      for (unsigned left = of_warp[warp]; left != 0; left &= left - 1) {
        const int i = warp * 32 + __ffs(static_cast<int>(left)) - 1;
        const unsigned tile = first + i * gridDim.x;
        if (__popcll(wanted[i]) <= Small::kTileRows) attend<Small>(p, tile, wanted[i], shared);
        else attend<Full>(p, tile, wanted[i], shared);
        __syncthreads();
      }
    __syncthreads();  // all have read `wanted`
  }
}

template <int kChunks>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream, const std::uint64_t* fallback_rows) {
  constexpr int kThreads = kBlockThreads<kChunks>;
  const auto tiles = static_cast<unsigned>(simt_tiles(p));
  if (!fallback_rows) {
    const auto kernel =
        (set_of(p.kv_type) & kFloatTypes) != 0 ? attention_simt<kChunks, false> : attention_simt<kChunks, true>;
    return launch_kernel(false, kernel, tiles, kThreads, 0, stream, p);
  }
  if constexpr (kChunks > 4) {
    return cudaErrorInvalidValue;  // kernels with fallback rows take values of up to 256 columns
  } else {
    // An odd number of blocks: else the same tile of all heads might fall to one block.
    const unsigned blocks =
        std::min(tiles, static_cast<unsigned>(kFallbackBlocksPerProcessor * multiprocessors() / 2 * 2 + 1));
    return launch_kernel(true, attention_simt_fallback<kChunks>, blocks, kThreads, 0, stream, p, fallback_rows, tiles);
  }
}

}  // namespace

std::int64_t simt_tiles(const AttentionParams& p) {
  return Tiles::heads(p) * Tiles::tiles(p);
}

cudaError_t launch_attention_simt(const AttentionParams& p, cudaStream_t stream, const std::uint64_t* fallback_rows) {
  if (p.dv <= kColumns) return launch<1>(p, stream, fallback_rows);
  if (p.dv <= 2 * kColumns) return launch<2>(p, stream, fallback_rows);
  if (p.dv <= 4 * kColumns) return launch<4>(p, stream, fallback_rows);
  return launch<kSimtMaxValueHeadDim / kColumns>(p, stream, fallback_rows);
}

}  // namespace rapt::cuda
