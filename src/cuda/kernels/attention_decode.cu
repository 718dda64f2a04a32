// Attention of few rows over many keys, as in decoding, where the time goes into reading K and V once. The rows are
// (token, head of the group) pairs, and the keys that a sequence's rows see are cut into splits (split-KV): a thread
// block goes over one, and the kernel after it combines them,
//   m = max m_i,  l = sum 2^(m_i - m) l_i,  out = sum 2^(m_i - m) o_i / l.
// How keys are split depends on their number and that of kv heads alone, so that a row's bits do not depend on the batch.
//
// 16-bit types are multiplied by tensor cores, 16 rows at a time, fp32 by the ordinary cores, 8 rows at a time: a tile of
// rows for each warp. The block's warps form teams, with a warp for each tile that there is, which take steps of a few keys
// in turn. Bulk copies fill a ring in shared memory for each team, row by row: no team waits for another before the split
// is done, and few instructions go into moving bytes. All m are integers: to change them multiplies by exact powers of two.
//
// Hidden keys have weights of 0, but 0 times NaN is NaN: the combining kernel computes rows whose results are not finite
// once more, key by key.
#include <cuda_runtime.h>

#include "cuda/hopper/host.cuh"
#include "cuda/hopper/mma.cuh"
#include "cuda/hopper/rows.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/shared_rows.cuh"

namespace rapt::cuda {
namespace {

// Splits of all kv heads of a sequence together: a few for each multiprocessor.
constexpr int kSplitsOfSequence = 512, kMaxSplits = 256, kSplitUnit = 64;
constexpr int kMinSplits = 16;         // of a sequence of its own, which has to occupy the GPU alone
constexpr int kSplitRows = 16;         // for more, splits are longer: partial results count beside their keys
constexpr int kMinSplitKeys = 256, kEnoughSplitKeys = 512;

struct Splits {
  int keys, count;  // keys of each but the last; at least one split, without keys if there are none
};
// The most that a sequence has.
int max_splits(std::int64_t hk) { return static_cast<int>(clamp_to(kSplitsOfSequence / (hk > 0 ? hk : 1), 1, kMaxSplits)); }
// `rows` of the sequence and a kv head.
__host__ __device__ Splits splits_of(std::int64_t all_keys, int rows, int max_splits) {
  const auto keys = static_cast<unsigned>(all_keys), units = (keys + kSplitUnit - 1) / kSplitUnit;
  const auto at_most = [&](unsigned splits) { return (units + splits - 1) / splits * kSplitUnit; };
  const unsigned few_rows = rows <= kSplitRows ? 1 : 2, even = at_most(max_splits);
  const unsigned shortest = clamp_to(at_most(kMinSplits), kMinSplitKeys, kEnoughSplitKeys) * few_rows;
  const unsigned size = even > shortest ? even : shortest;
  return {static_cast<int>(size), keys > size ? static_cast<int>((keys + size - 1) / size) : 1};
}

struct DecodeParams {
  AttentionParams p;
  int tiles, splits;            // blocks for the rows of a sequence and kv head, and for its keys: the most of any sequence
  int max_splits;               // that a sequence could have
  bool modified;                // scores need more than a scale
  bool kv_vector;               // rows of k and v are whole times 16 bytes
  float* partials;              // [row][splits][partial_floats]
  std::int64_t partial_floats;  // [dv] of O, then from a multiple of 4 on m and l
};

__host__ __device__ std::int64_t m_at(const AttentionParams& p) { return ceil_div(p.dv, 4) * 4; }

// The partial result of row r of a head and a split.
__device__ float* partial_at(const DecodeParams& params, const Head& head, std::int64_t r, std::int64_t split) {
  const AttentionParams& p = params.p;
  const std::int64_t row = p.total_q >= 0 ? (head.hk * p.total_q + head.q_first) * p.group + r
                                          : (head.b * p.hk + head.hk) * p.sq * p.group + r;
  return params.partials + (row * params.splits + split) * params.partial_floats;
}

// For elements T of K, V and Q, and head sizes up to kSize.
template <class T_, int kSize_>
struct Config {
  using T = T_;
  static constexpr int kSize = kSize_, kRowBytes = kSize * sizeof(T);
  static constexpr bool kTensorCores = sizeof(T) == 2;
  static constexpr int kRows = kTensorCores ? 16 : 8;
  // 16 bytes between rows: those of neighbours lie in other banks.
  static constexpr int kPitch = kRowBytes + 16;
  // As many blocks of as many warps as keep enough bytes on their way.
  static constexpr int kStepKeys = kRowBytes > 512 ? 8 : 16, kWarps = kRowBytes > 256 ? 2 : 4, kThreads = 32 * kWarps;
  static constexpr int kStages = kRowBytes == 128 ? 3 : 2;
  static constexpr int kTileBytes = kStepKeys * kPitch, kRingBytes = 2 * kStages * kTileBytes;  // K, then V
  static constexpr int shared_bytes(int team) { return team * kRows * kPitch + kWarps * kRingBytes; }
  static constexpr int kBlocks = (227 << 10) / (shared_bytes(1) + 2048);  // on a multiprocessor
  static_assert(kRingBytes >= kRows * kSize * 4, "a warp's O fits where its keys were");
  static constexpr int kScores = kRows * kStepKeys / 32, kOut = kRows * kSize / 32;  // of a lane
  // Weights are 2^kShift times as large, so that fp16 has more of the small ones.
  static constexpr float kShift = std::is_same_v<T, __half> ? 7 : 0;
};

// Warps that share keys, a tile of rows each: a power of two.
template <class C>
__host__ __device__ int team_for(std::int64_t rows) {
  int team = 1;
  while (team < C::kWarps && team * C::kRows < rows) team *= 2;
  return team;
}

// 16 bytes of a row in shared memory.
template <class C>
__device__ __forceinline__ std::uint32_t chunk_at(std::uint32_t matrix, int row, int chunk) {
  return matrix + row * C::kPitch + chunk * 16;
}

// What a lane has: of scores and O, two rows, row() of the first half of all and of the second. Lanes that share rows
// differ in the bits kSharing. On tensor cores it is mma's layout. Elsewhere shared memory serves half a warp's 16 bytes
// each at once if lanes that differ in bit 0, or those in bit 1, read the same: the former do of rows, the latter of
// keys and columns.
template <class C>
struct Lane {
  const int lane = threadIdx.x % 32;
  static constexpr int kSharing = C::kTensorCores ? 3 : 13;

  __device__ int row(int half) const {
    return half * (C::kRows / 2) + (C::kTensorCores ? lane / 4 : (lane >> 1 & 1) | (lane >> 3 & 2));
  }
  __device__ int in_row() const { return C::kTensorCores ? lane % 4 : (lane & 1) | (lane >> 1 & 6); }
  // Which of its rows, which key of a step and which column score i, or element i of O, belongs to.
  static constexpr int kRowScores = C::kScores / 2;
  __device__ static constexpr int half_of_score(int i) { return C::kTensorCores ? i / 2 % 2 : i / kRowScores; }
  __device__ int key_of_score(int i) const {
    return C::kTensorCores ? i / 4 * 8 + 2 * in_row() + i % 2 : i % kRowScores * 8 + in_row();
  }
  __device__ static constexpr int half_of_out(int i) { return C::kTensorCores ? i / 2 % 2 : i / 4 % 2; }
  __device__ int column_of_out(int i) const {
    return C::kTensorCores ? i / 4 * 8 + 2 * in_row() + i % 2 : i / 8 * 32 + 4 * in_row() + i % 4;
  }
  template <class Combine>
  __device__ static float over_row(float x, Combine combine) {
#pragma unroll
    for (int bit = 1; bit <= kSharing; bit *= 2)
      if (kSharing & bit) x = combine(x, __shfl_xor_sync(~0u, x, bit));
    return x;
  }
};

// s = Q K^T.
template <class C>
__device__ __forceinline__ void multiply_keys(const AttentionParams& p, std::uint32_t q, std::uint32_t k,
                                              float (&s)[C::kScores]) {
  const Lane<C> at;
#pragma unroll
  for (float& x : s) x = 0;
  if constexpr (C::kTensorCores) {
#pragma unroll
    for (int i = 0; i < C::kSize / 16; ++i) {
      std::uint32_t a[4], b[4];
      load_tiles(a, chunk_at<C>(q, at.lane % 16, 2 * i + at.lane / 16));
      load_tiles(b, chunk_at<C>(k, at.lane / 16 * 8 + at.lane % 8, 2 * i + at.lane / 8 % 2));
      mma<typename C::T>(s, a, b[0], b[1]);
      mma<typename C::T>(s + 4, a, b[2], b[3]);
    }
  } else {
    const int chunks = (static_cast<int>(p.d) + 3) / 4;
#pragma unroll 4
    for (int i = 0; i < chunks; ++i) {
      constexpr int kKeys = at.kRowScores;
      float4 left[2], right[kKeys];
#pragma unroll
      for (int j = 0; j < 2; ++j) left[j] = load16(chunk_at<C>(q, at.row(j), i));
#pragma unroll
      for (int j = 0; j < kKeys; ++j) right[j] = load16(chunk_at<C>(k, at.key_of_score(j), i));
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int j = 0; j < C::kScores; ++j)
          s[j] = fmaf(element(left[j / kKeys], n), element(right[j % kKeys], n), s[j]);
    }
  }
}

// As the products take them.
template <class C>
__device__ __forceinline__ void round_weights(float (&s)[C::kScores]) {
  if constexpr (C::kTensorCores) {
#pragma unroll
    for (int i = 0; i < C::kScores; i += 2) {
      const float2 pair = unpack<typename C::T>(pack<typename C::T>(s[i], s[i + 1]));
      s[i] = pair.x, s[i + 1] = pair.y;
    }
  }
}

// O = O * rescale + P V, where P are the weights in `s`.
template <class C>
__device__ __forceinline__ void add_values(std::uint32_t v, const float (&s)[C::kScores], const float (&rescale)[2],
                                           float (&o)[C::kOut]) {
  const Lane<C> at;
  if constexpr (C::kTensorCores) {
    if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
      for (int i = 0; i < C::kOut; ++i) o[i] *= rescale[at.half_of_out(i)];
    }
    using T = typename C::T;
    const std::uint32_t a[4] = {pack<T>(s[0], s[1]), pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7])};
#pragma unroll
    for (int i = 0; i < C::kSize / 16; ++i) {
      std::uint32_t b[4];
      load_tiles_transposed(b, chunk_at<C>(v, at.lane % 16, 2 * i + at.lane / 16));
      mma<T>(o + 8 * i, a, b[0], b[1]);
      mma<T>(o + 8 * i + 4, a, b[2], b[3]);
    }
  } else {
    float weights[2][C::kStepKeys];
#pragma unroll
    for (int key = 0; key < C::kStepKeys; ++key) {
      const int owner = (at.lane & ~at.kSharing) | (key & 1) | (key & 6) << 1;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weights[half][key] = __shfl_sync(~0u, s[half * at.kRowScores + key / 8], owner);
    }
#pragma unroll
    for (int i = 0; i < C::kOut; i += 8) {
      float sum[8] = {};  // the step's own first: the rounding of a sum grows with its terms
#pragma unroll
      for (int key = 0; key < C::kStepKeys; ++key) {
        const float4 right = load16(chunk_at<C>(v, key, i + at.in_row()));
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[n] = fmaf(weights[n / 4][key], element(right, n % 4), sum[n]);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) o[i + n] = fmaf(o[i + n], rescale[n / 4], sum[n]);
    }
  }
}

// A team's ring of K and V tiles.
template <class C>
struct KeyRing {
  std::uint32_t data, barriers;

  __device__ std::uint32_t k(int slot) const { return data + slot * 2 * C::kTileBytes; }
  __device__ std::uint32_t v(int slot) const { return k(slot) + C::kTileBytes; }
  __device__ std::uint32_t full(int slot) const { return barriers + slot * 8; }

  // Zeros where heads of fewer columns leave the rows as they are. Of kStages slots, by a warp.
  __device__ void init(const AttentionParams& p) const {
    const int lane = threadIdx.x % 32;
    if (lane < C::kStages) barrier_init(full(lane), 1);
    if (p.d < C::kSize || p.dv < C::kSize)
      for (int i = 16 * lane; i < C::kRingBytes; i += 512) store16(data + i, make_uint4(0, 0, 0, 0));
    fence_barrier_init();
    fence_async_proxy();
  }
  // A step's keys, by a warp: half of it K and half V. The lane's row of either starts at index `at`.
  __device__ void load(const AttentionParams& p, int slot, std::int64_t at, bool vector) const {
    using T = typename C::T;
    const int lane = threadIdx.x % 32, row = lane % 16;
    const bool values = lane >= 16;
    const auto* const from = static_cast<const T*>(values ? p.v : p.k) + at;
    const int size = static_cast<int>(values ? p.dv : p.d);
    const std::uint32_t to = (values ? v(slot) : k(slot)) + row * C::kPitch;
    if (vector) {
      if (lane == 0)
        barrier_arrive_expecting(full(slot), static_cast<int>(p.d + p.dv) * C::kStepKeys * static_cast<int>(sizeof(T)));
      __syncwarp();
      if (row < C::kStepKeys) bulk_load(to, from, size * static_cast<int>(sizeof(T)), full(slot), false);
      return;
    }
    const std::int64_t step = values ? p.v_stride.d : p.k_stride.d;
    if (row < C::kStepKeys)
      for (int i = 0; i < size; ++i) put<T>(to + i * static_cast<int>(sizeof(T)), from[i * step]);
    __syncwarp();
    if (lane == 0) barrier_arrive(full(slot));
  }
  template <class T>
  __device__ static void put(std::uint32_t to, const T& x) {
    if constexpr (sizeof(T) == 2) store2(to, reinterpret_cast<const std::uint16_t&>(x));
    else store4(to, __float_as_uint(x));
  }
};

// What a block's rows see of its split, whose keys are counted from its first.
template <int kCount>
struct SplitRows {
  int token[kCount], q_head[kCount], from[kCount], to[kCount];

  // By one thread of each row. Rows past the last see what it sees: nothing is masked for them alone.
  __device__ void find(const Head& head, int first, int rows, std::int64_t key, int keys) {
    const int i = threadIdx.x;
    if (i >= kCount) return;
    const Row row = row_of(head, min(first + i, rows - 1));
    token[i] = static_cast<int>(row.token), q_head[i] = static_cast<int>(row.q_head);
    from[i] = static_cast<int>(clamp_to(row.first - key, 0, keys));
    to[i] = static_cast<int>(clamp_to(row.last - key, 0, keys));
  }
  __device__ float finish(const Head& head, int i, std::int64_t key, float score) const {
    Row row;
    row.token = token[i], row.q_head = q_head[i];
    return finish_score(head, row, key, score);
  }
};

// Rows [first, first + count) of Q, zeros from row `rows` and past the last column.
template <class C>
__device__ __forceinline__ void load_q(const Head& head, int first, int count, int rows, std::uint32_t to) {
  using T = typename C::T;
  const AttentionParams& p = head.p;
#pragma unroll 4
  for (int row = threadIdx.x / 32; row < count; row += C::kWarps) {
    const bool exists = first + row < rows;
    const auto* const from =
        static_cast<const T*>(p.q) + (exists ? row_at(p.q_stride, head, row_of(head, first + row)) : 0);
#pragma unroll
    for (int i = threadIdx.x % 32; i < C::kSize; i += 32)
      KeyRing<C>::put(to + row * C::kPitch + i * static_cast<int>(sizeof(T)),
                      exists && i < p.d ? from[i * p.q_stride.d] : T(0.f));
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) decode(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ SplitRows<C::kWarps * C::kRows> rows;
  __shared__ std::uint64_t barriers[C::kWarps][C::kStages];
  __shared__ float m_of[C::kWarps][C::kRows], l_of[C::kWarps][C::kRows];
  const AttentionParams& p = params.p;
  let_next_start();
  // Blocks of one split side by side: they read the same keys.
  const auto tiles = static_cast<unsigned>(params.tiles), splits = static_cast<unsigned>(params.splits);
  const unsigned split = blockIdx.x / tiles % splits;
  const int index = static_cast<int>(blockIdx.x / tiles / splits), hk = static_cast<int>(p.hk);
  const Head head(p, index / hk, index % hk);
  const int row_count = static_cast<int>(head.len_q * p.group), team = team_for<C>(row_count);
  const int row_begin = static_cast<int>(blockIdx.x % tiles) * team * C::kRows;
  if (row_begin >= row_count) return;
  const KeyRange visible = visible_keys(p.score, head);
  const Splits all = splits_of(visible.last - visible.first, row_count, params.max_splits);
  if (split >= static_cast<unsigned>(all.count)) return;
  const std::int64_t first_key = visible.first + std::int64_t{all.keys} * split;
  const int keys = static_cast<int>(clamp_to(visible.last - first_key, 0, all.keys));
  // What any of the rows sees: neither end moves down from row to row, but rows past the mask's see nothing.
  const Row top = row_of(head, row_begin), bottom = row_of(head, min(row_begin + team * C::kRows, row_count) - 1);
  const std::int64_t last_token = min(bottom.token + 1, p.score.modifier_rows) - 1;
  const int begin = static_cast<int>(clamp_to(top.first - first_key, 0, keys));
  const int end = last_token < top.token
                      ? 0
                      : static_cast<int>(clamp_to(Row(head, last_token, 0).last - first_key, 0, keys));

  const int warp = uniform(threadIdx.x / 32), teams = C::kWarps / team, own_team = warp / team;
  const int own_rows = warp % team * C::kRows;  // of the block's
  const Lane<C> at;
  const std::uint32_t q = shared_address(shared), rings = q + team * C::kRows * C::kPitch;
  const std::uint32_t own_ring = rings + warp * C::kRingBytes;
  KeyRing<C>{own_ring, shared_address(barriers[warp])}.init(p);
  const KeyRing<C> ring{rings + own_team * team * C::kRingBytes, shared_address(barriers[own_team * team])};
  const int slots = team * C::kStages;
  const auto sync_team = [&] {
    if (team == 1) __syncwarp();
    else named_sync(1 + own_team, 32 * team);
  };
  sync_team();
  // The team's n-th step begins with this key.
  const int first_step = begin / C::kStepKeys;
  const auto key_at_step = [&](int n) { return (first_step + n * teams + own_team) * C::kStepKeys; };
  const auto load = [&](int n, int slot) {
    if (own_rows != 0 || key_at_step(n) >= end) return;
    // Where there is no key, one that some row sees: finite, unless that row's result is not.
    const int key = min(max(key_at_step(n) + at.lane % 16, begin), end - 1);
    ring.load(p, slot, head.key_at(at.lane < 16 ? p.k_stride : p.v_stride, first_key + key), params.kv_vector);
  };
  for (int n = 0; n < slots; ++n) load(n, n);
  rows.find(head, row_begin, row_count, first_key, keys);
  load_q<C>(head, row_begin, team * C::kRows, row_count, q);
  __syncthreads();
  const int all_from = __reduce_max_sync(~0u, rows.from[own_rows + at.lane % C::kRows]);
  const int all_to = __reduce_min_sync(~0u, rows.to[own_rows + at.lane % C::kRows]);

  float o[C::kOut] = {}, m[2], l[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) m[h] = -kInfinity, l[h] = 0;
#pragma unroll 1
  for (int n = 0, slot = 0, phase = 0; key_at_step(n) < end; ++n) {
    const int key = key_at_step(n);
    barrier_wait(ring.full(slot), phase);
    float s[C::kScores];
    multiply_keys<C>(p, q + own_rows * C::kPitch, ring.k(slot), s);
#pragma unroll
    for (float& x : s) x *= p.score.scale_log2;
    if (params.modified || key < all_from || key + C::kStepKeys > all_to) {
#pragma unroll
      for (int i = 0; i < C::kScores; ++i) {
        const int row = own_rows + at.row(at.half_of_score(i)), j = key + at.key_of_score(i);
        if (j < rows.from[row] || j >= rows.to[row]) s[i] = -kInfinity;
        else if (params.modified) s[i] = rows.finish(head, row, first_key + j, s[i]);
      }
    }
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -kInfinity;
#pragma unroll
      for (int i = 0; i < C::kScores; ++i)
        if (at.half_of_score(i) == h) top = fmaxf(top, s[i]);
      top = fmaxf(m[h], ceilf(at.over_row(top, Max())));
      rescale[h] = exp2_approx(m[h] - shift_of(top));
      m[h] = top;
    }
#pragma unroll
    for (int i = 0; i < C::kScores; ++i)
      s[i] = exp2_approx(s[i] - (shift_of(m[at.half_of_score(i)]) - C::kShift));
    round_weights<C>(s);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < C::kScores; ++i)
        if (at.half_of_score(i) == h) sum += s[i];
      l[h] = fmaf(l[h], rescale[h], sum);
    }
    add_values<C>(ring.v(slot), s, rescale, o);
    fence_async_proxy();
    sync_team();
    load(n + slots, slot);
    if (++slot == slots) slot = 0, phase ^= 1;
  }

  // The teams' results together.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    l[h] = at.over_row(l[h], Sum());
    if (at.in_row() == 0) m_of[warp][at.row(h)] = m[h], l_of[warp][at.row(h)] = l[h];
  }
  __syncthreads();
  const auto top_of = [&](int first, int row) {  // of warps `first`, `first` + team, ...
    float top = -kInfinity;
    for (int w = first; w < C::kWarps; w += team) top = fmaxf(top, m_of[w][row]);
    return top;
  };
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) factor[h] = exp2_approx(m[h] - shift_of(top_of(warp % team, at.row(h))));
#pragma unroll
  for (int i = 0; i < C::kOut; ++i)  // [kRows][kSize], where keys were
    store4(own_ring + 4 * (at.row(at.half_of_out(i)) * C::kSize + at.column_of_out(i)),
           __float_as_uint(o[i] * factor[at.half_of_out(i)]));
  __syncthreads();
  const auto* const out = reinterpret_cast<const float*>(shared + team * C::kRows * C::kPitch);
  for (int r = warp; r < team * C::kRows && row_begin + r < row_count; r += C::kWarps) {
    const int first = r / C::kRows, row = r % C::kRows;
    float* const partial = partial_at(params, head, row_begin + r, split);
    for (int column = at.lane; column < p.dv; column += 32) {
      float sum = 0;
      for (int w = first; w < C::kWarps; w += team) sum += out[w * (C::kRingBytes / 4) + row * C::kSize + column];
      partial[column] = sum;
    }
    if (at.lane != 0) continue;
    const float m_all = top_of(first, row);
    float sum = 0;
    for (int w = first; w < C::kWarps; w += team)
      sum = fmaf(l_of[w][row], exp2_approx(m_of[w][row] - shift_of(m_all)), sum);
    partial[m_at(p)] = m_all - C::kShift, partial[m_at(p) + 1] = sum;
  }
}

constexpr int kMaxSize = kWgmmaMaxHeadSize;
constexpr int kCombineWarps = 8, kCombineThreads = 32 * kCombineWarps;
static_assert(kMaxSplits <= kCombineThreads && kMaxSize <= kCombineThreads, "a thread for each split, and each column");

// A row's sums in a block's shared memory: of O those of each warp, which relate to `top`, as `l` does.
struct RowSums {
  float o[kCombineWarps][kMaxSize], of_warp[kCombineWarps], factor[kMaxSplits];

  // Over all threads, the same for each.
  template <class Combine>
  __device__ float over_block(float x, Combine combine) {
    for (int bit = 16; bit > 0; bit /= 2) x = combine(x, __shfl_xor_sync(~0u, x, bit));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warp[0];
    for (int warp = 1; warp < kCombineWarps; ++warp) x = combine(x, of_warp[warp]);
    return x;
  }

  // From partial results, of which each warp takes so many in their order.
  __device__ void add_splits(const DecodeParams& params, const float* partial, int count, float& top, float& l) {
    const AttentionParams& p = params.p;
    const int warp = threadIdx.x / 32, each = (count + kCombineWarps - 1) / kCombineWarps;
    const bool exists = static_cast<int>(threadIdx.x) < count;
    const float* const own = partial + threadIdx.x * params.partial_floats + m_at(p);
    const float m = exists ? own[0] : -kInfinity;
    l = exists ? own[1] : 0;
    top = over_block(m, Max());
    factor[threadIdx.x] = exp2_approx(m - shift_of(top));
    l = over_block(l * factor[threadIdx.x], Sum());
    for (int column = 4 * (threadIdx.x % 32); column < p.dv; column += 128) {
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (int i = warp * each; i < min(count, (warp + 1) * each); ++i) {
        const float4 x = *reinterpret_cast<const float4*>(partial + i * params.partial_floats + column);
        const float f = factor[i];
        sum = make_float4(fmaf(f, x.x, sum.x), fmaf(f, x.y, sum.y), fmaf(f, x.z, sum.z), fmaf(f, x.w, sum.w));
      }
      *reinterpret_cast<float4*>(&o[warp][column]) = sum;
    }
    __syncthreads();
  }

  // From the keys themselves, one after another: those that are hidden count for nothing, whatever their values.
  __device__ __noinline__ void add_keys(const DecodeParams& params, const Head& head, const Row& row, float& top,
                                        float& l) {
    const AttentionParams& p = params.p;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const std::int64_t q = row_at(p.q_stride, head, row);
    double sums[kMaxSize / 32] = {}, weights = 0;
    float m = -kInfinity;
    for (std::int64_t j = row.first + warp; j < row.last; j += kCombineWarps) {
      const std::int64_t k = head.key_at(p.k_stride, j), v = head.key_at(p.v_stride, j);
      float dot = 0;
      for (int i = lane; i < p.d; i += 32)
        dot = fmaf(load(p.q, p.q_type, q + i * p.q_stride.d), load(p.k, p.kv_type, k + i * p.k_stride.d), dot);
      for (int bit = 16; bit > 0; bit /= 2) dot += __shfl_xor_sync(~0u, dot, bit);
      const float score = params.modified ? finish_score(head, row, j, dot * p.score.scale_log2) : dot * p.score.scale_log2;
      if (score == -kInfinity) continue;
      const float before = m;
      m = fmaxf(m, score);
      const double rescale = exp2_approx(before - shift_of(m)), weight = exp2_approx(score - shift_of(m));
      weights = weights * rescale + weight;
#pragma unroll
      for (int i = 0; i < kMaxSize / 32; ++i) {
        const int column = lane + 32 * i;
        if (column >= p.dv) continue;
        const double x = load(p.v, p.kv_type, v + column * p.v_stride.d);
        sums[i] = (isfinite(sums[i]) ? sums[i] * rescale : sums[i]) + weight * x;  // inf times 0 is no NaN
      }
    }
    top = over_block(lane == 0 ? m : -kInfinity, Max());
    const float factor = exp2_approx(m - shift_of(top));
    l = over_block(lane == 0 ? static_cast<float>(weights) * factor : 0.f, Sum());
#pragma unroll
    for (int i = 0; i < kMaxSize / 32; ++i) {
      const auto x = static_cast<float>(sums[i]);
      o[warp][lane + 32 * i] = is_finite(x) ? x * factor : x;
    }
    __syncthreads();
  }
};

// Rows from their partial results, a block for each.
__global__ void __launch_bounds__(kCombineThreads) combine(const __grid_constant__ DecodeParams params) {
  __shared__ RowSums sums;
  const AttentionParams& p = params.p;
  const int rows = static_cast<int>(gridDim.x / static_cast<unsigned>(p.b * p.hk)), hk = static_cast<int>(p.hk);
  const int index = static_cast<int>(blockIdx.x) / rows, r = static_cast<int>(blockIdx.x) % rows;
  const Head head(p, index / hk, index % hk);
  const int row_count = static_cast<int>(head.len_q * p.group);
  if (r >= row_count) return;
  const Row row = row_of(head, r);
  const KeyRange visible = visible_keys(p.score, head);
  const int count = splits_of(visible.last - visible.first, row_count, params.max_splits).count;
  const float sink = sink_of(head, row), alibi_shift = alibi_shift_log2(head, row);
  const std::int64_t out = row_at(p.out_stride, head, row);
  const int column = threadIdx.x;
  const auto sum_of_column = [&] {
    float sum = 0;
    if (column < p.dv)
      for (const auto& of_warp : sums.o) sum += of_warp[column];
    return sum;
  };
  wait_for_previous();

  float top, l;
  sums.add_splits(params, partial_at(params, head, r, 0), count, top, l);
  float o = sum_of_column();
  if (__syncthreads_or(!is_finite(l) || !is_finite(o))) {
    sums.add_keys(params, head, row, top, l);
    o = sum_of_column();
  }
  const Finish f = finish_row(top, l, sink, alibi_shift);
  if (column < p.dv)
    store(p.out, p.out_type, out + column * p.out_stride.d, f.sum == 0 ? 0.f : o * f.half * f.half / f.sum);
  if (p.lse && threadIdx.x == 0) p.lse[row_at(p.lse_stride, head, row)] = f.lse;
}

// Of a sequence and kv head, at most.
int rows_of(const AttentionParams& p) { return static_cast<int>((p.total_q >= 0 ? p.total_q : p.sq) * p.group); }
// The most splits of a sequence: splits_of() of fewer keys may have more.
int most_splits(const AttentionParams& p) {
  const std::int64_t keys = std::max(p.sk, p.total_k);
  const std::int64_t shortest = ceil_div(keys, kMinSplitKeys), enough = ceil_div(keys, kEnoughSplitKeys);
  const std::int64_t most = std::min(shortest, std::max<std::int64_t>(enough, kMinSplits));
  return static_cast<int>(clamp_to(most, 1, max_splits(p.hk)));
}
std::int64_t partial_floats(const AttentionParams& p) { return m_at(p) + 4; }

template <class C>
int tiles_of(const AttentionParams& p) {
  const int rows = rows_of(p);
  return static_cast<int>(ceil_div(rows, team_for<C>(rows) * C::kRows));
}

// Calls `then` with the configuration for a call.
template <class Then>
auto with_config(const AttentionParams& p, Then then) {
  const auto with_type = [&](auto element) {
    using T = decltype(element);
    const std::int64_t size = std::max(p.d, p.dv);
    if (size <= 64) return then(Config<T, 64>());
    if (size <= 128) return then(Config<T, 128>());
    return then(Config<T, kMaxSize>());
  };
  if (p.q_type == DType::f32) return with_type(float());
  if (p.q_type == DType::f16) return with_type(__half());
  return with_type(__nv_bfloat16());
}

}  // namespace

std::int64_t decode_blocks(const AttentionParams& p) {
  return with_config(p, [&](auto config) { return p.b * p.hk * tiles_of<decltype(config)>(p) * most_splits(p); });
}

std::size_t decode_workspace(const AttentionParams& p) {
  const std::int64_t rows = p.hk * p.group * (p.total_q >= 0 ? p.total_q : p.b * p.sq);
  return static_cast<std::size_t>(rows * most_splits(p) * partial_floats(p)) * sizeof(float);
}

cudaError_t attention_decode(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  const std::int64_t size = p.q_type == DType::f32 ? 4 : 2;
  const auto is_whole = [&](const void* x, const Strides& stride, std::int64_t columns) {
    return is_vector(x, stride, size) && columns * size % 16 == 0;
  };
  DecodeParams params{};
  params.p = p;
  params.splits = most_splits(p), params.max_splits = max_splits(p.hk);
  params.modified = has_modifiers(p.score);
  params.kv_vector = is_whole(p.k, p.k_stride, p.d) && is_whole(p.v, p.v_stride, p.dv);
  params.partials = reinterpret_cast<float*>(workspace);
  params.partial_floats = partial_floats(p);
  const cudaError_t status = with_config(p, [&](auto config) {
    using C = decltype(config);
    params.tiles = tiles_of<C>(p);
    const auto blocks = static_cast<unsigned>(p.b * p.hk * params.tiles * params.splits);
    return launch_kernel(false, decode<C>, blocks, C::kThreads, C::shared_bytes(team_for<C>(rows_of(p))), stream, params);
  });
  if (status != cudaSuccess) return status;
  const auto rows = static_cast<unsigned>(p.b * p.hk * rows_of(p));
  return launch_kernel(true, combine, rows, kCombineThreads, 0, stream, params);
}

}  // namespace rapt::cuda
