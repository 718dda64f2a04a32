// attention_decode_f32: out = softmax(q k^T) v of few rows in fp32, on ordinary cores, with the keys split among thread
// blocks (split-KV).
//
// The entry attention_decode.f32 calls it, and attention_prefill.f32 for the short sequences of ragged calls. Memory
// bounds it: it reads K and V once. attention_combine adds up the partial results of several splits; rows of a single
// split are finished here.
//
// Rows are in tiles of 8, one for each warp. The warps of a block form teams of as many warps as there are tiles; teams
// take steps of a few keys in turn. Bulk copies fill a ring in shared memory for each team, so that no team waits for
// another before the end of the split, and few instructions move bytes. Shifts are integers: to move one multiplies by
// an exact power of two.
#include <cuda_runtime.h>

#include "cuda/hopper/key_modifiers.cuh"
#include "cuda/hopper/split_block.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/kernels/split_launches.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/shared_rows.cuh"

namespace rapt::cuda {
namespace {

constexpr int kRows = 8, kHalf = kRows / 2;
constexpr int kShortSum = 8;  // steps, after which sums are added to longer ones

struct DecodeF32Params {
  AttentionParams p;
  PartialResults partials;
  SplitGrid grid;
  bool modified;   // scores need more than a scale
  bool kv_vector;  // rows of k and v are multiples of 16 bytes
};

// The sizes of the kernel for heads of up to kSize columns.
template <int kSize_>
struct DecodeF32Config {
  static constexpr int kSize = kSize_;
  // Rows in shared memory are 16 bytes apart, so that neighbouring rows lie in other banks.
  static constexpr int kPitch = 4 * kSize + 16;
  // Steps and warps that keep enough bytes in flight.
  static constexpr int kStepKeys = kSize > 128 ? 8 : 16, kWarps = kSize > 64 ? 2 : 4, kThreads = 32 * kWarps;
  static constexpr int kStages = 2;
  static constexpr int kTileBytes = kStepKeys * kPitch, kRingBytes = 2 * kStages * kTileBytes;  // K, then V
  static constexpr int shared_bytes(int team) { return team * kRows * kPitch + kWarps * kRingBytes; }
  static constexpr int kBlocksPerMultiprocessor = (227 << 10) / (shared_bytes(1) + 2048);
  static_assert(kRingBytes >= kRows * kSize * 4, "a warp's O fits where its keys were");
  static constexpr int kScores = kRows * kStepKeys / 32, kOut = kRows * kSize / 32;  // a lane's registers
};

// Warps of a team, which share keys and have a tile of rows each: a power of two.
template <class C>
__host__ __device__ int team_for(std::int64_t rows) {
  int team = 1;
  while (team < C::kWarps && team * kRows < rows) team *= 2;
  return team;
}

// The address of 16 bytes of a row in shared memory.
template <class C>
__device__ __forceinline__ std::uint32_t chunk_at(std::uint32_t matrix, int row, int chunk) {
  return matrix + row * C::kPitch + chunk * 16;
}

// Which scores and elements of O a lane has: two rows, row(0) in the first half of the tile and row(1) in the second.
// Lanes that share rows differ in the bits kSharing. Shared memory serves 16 bytes for half a warp at once if lanes
// that differ in bit 0, or those that differ in bit 1, read the same: the former share rows, the latter keys and
// columns.
template <class C>
struct LaneMap {
  static constexpr int kSharing = 13, kRowScores = C::kScores / 2;
  const int lane = threadIdx.x % 32;

  __device__ int row(int half) const { return half * kHalf + ((lane >> 1 & 1) | (lane >> 3 & 2)); }
  __device__ int in_row() const { return (lane & 1) | (lane >> 1 & 6); }
  __device__ int lane_of_key(int key) const { return (lane & ~kSharing) | (key & 1) | (key & 6) << 1; }
  // The row, the key of a step and the column that score i, or element i of O, belongs to.
  __device__ static constexpr int half_of_score(int i) { return i / kRowScores; }
  __device__ int key_of_score(int i) const { return i % kRowScores * 8 + in_row(); }
  __device__ static constexpr int half_of_out(int i) { return i / 4 % 2; }
  __device__ int column_of_out(int i) const { return i / 8 * 32 + 4 * in_row() + i % 4; }
  template <class Combine>
  __device__ static float over_row(float x, Combine combine) {
    for (const int bit : {1, 4, 8}) x = combine(x, __shfl_xor_sync(~0u, x, bit));
    return x;
  }
};

// s = Q K^T.
template <class C>
__device__ __forceinline__ void multiply_keys(const AttentionParams& p, std::uint32_t q, std::uint32_t k,
                                              float (&s)[C::kScores]) {
  const LaneMap<C> at;
  constexpr int kKeys = at.kRowScores;
  const int chunks = (static_cast<int>(p.d) + 3) / 4;
#pragma unroll
  for (float& x : s) x = 0;
#pragma unroll 4
  for (int i = 0; i < chunks; ++i) {
    float4 left[2], right[kKeys];
#pragma unroll
    for (int j = 0; j < 2; ++j) left[j] = load16(chunk_at<C>(q, at.row(j), i));
#pragma unroll
    for (int j = 0; j < kKeys; ++j) right[j] = load16(chunk_at<C>(k, at.key_of_score(j), i));
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int j = 0; j < C::kScores; ++j) s[j] = fmaf(element(left[j / kKeys], n), element(right[j % kKeys], n), s[j]);
  }
}

// O = O * rescale + P V, where P are the weights in `s`.
template <class C>
__device__ __forceinline__ void add_values(std::uint32_t v, const float (&s)[C::kScores], const float (&rescale)[2],
                                           float (&o)[C::kOut]) {
  const LaneMap<C> at;
  float weights[2][C::kStepKeys];
#pragma unroll
  for (int key = 0; key < C::kStepKeys; ++key)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      weights[half][key] = __shfl_sync(~0u, s[half * at.kRowScores + key / 8], at.lane_of_key(key));
#pragma unroll
  for (int i = 0; i < C::kOut; i += 8) {
    float sum[8] = {};  // the step's own sum first: the rounding error of a sum grows with its length
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

// A team's ring of K and V tiles.
template <class C>
struct KeyRing {
  std::uint32_t data, barriers;

  __device__ std::uint32_t k(int slot) const { return data + slot * 2 * C::kTileBytes; }
  __device__ std::uint32_t v(int slot) const { return k(slot) + C::kTileBytes; }
  __device__ std::uint32_t full(int slot) const { return barriers + slot * 8; }

  // Initialises barriers, and pads rows of fewer columns with zeros. By a warp.
  __device__ void init(const AttentionParams& p) const {
    const int lane = threadIdx.x % 32;
    if (lane < C::kStages) barrier_init(full(lane), 1);
    if (p.d < C::kSize || p.dv < C::kSize)
      for (int i = 16 * lane; i < C::kRingBytes; i += 512) store16(data + i, make_uint4(0, 0, 0, 0));
    fence_barrier_init();
    fence_async_proxy();
  }
  // Loads a step's keys, by a warp: half of the lanes load K, half V. `at`: the offset of the lane's row.
  __device__ void load(const AttentionParams& p, int slot, std::int64_t at, bool vector) const {
    const int lane = threadIdx.x % 32, row = lane % 16;
    const bool values = lane >= 16;
    const auto* const from = static_cast<const float*>(values ? p.v : p.k) + at;
    const int size = static_cast<int>(values ? p.dv : p.d);
    const std::uint32_t to = (values ? v(slot) : k(slot)) + row * C::kPitch;
    if (vector) {
      if (lane == 0) barrier_arrive_expecting(full(slot), 4 * static_cast<int>(p.d + p.dv) * C::kStepKeys);
      __syncwarp();
      if (row < C::kStepKeys) bulk_load(to, from, 4 * size, full(slot), false);
      return;
    }
    const std::int64_t step = values ? p.v_stride.d : p.k_stride.d;
    if (row < C::kStepKeys)
      for (int i = 0; i < size; ++i) store4(to + 4 * i, __float_as_uint(from[i * step]));
    __syncwarp();
    if (lane == 0) barrier_arrive(full(slot));
  }
};

// Loads rows [first, first + count) of Q, with zeros from row `rows` on and past the last column.
template <class C>
__device__ __forceinline__ void load_q(const Head& head, int first, int count, int rows, std::uint32_t to) {
  const AttentionParams& p = head.p;
#pragma unroll 4
  for (int row = threadIdx.x / 32; row < count; row += C::kWarps) {
    const bool exists = first + row < rows;
    const auto* const from =
        static_cast<const float*>(p.q) + (exists ? row_at(p.q_stride, head, row_of(head, first + row)) : 0);
#pragma unroll
    for (int i = threadIdx.x % 32; i < C::kSize; i += 32)
      store4(to + row * C::kPitch + 4 * i, exists && i < p.d ? __float_as_uint(from[i * p.q_stride.d]) : 0);
  }
}

// kShared: modifiers are a mask and a bias that all rows of a sequence share.
template <class C, bool kShared>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerMultiprocessor)
    attention_decode_f32(const __grid_constant__ DecodeF32Params params) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ SplitRows<C::kWarps * kRows> rows;
  __shared__ std::uint64_t barriers[C::kWarps][C::kStages];
  __shared__ WarpResults<C::kWarps, kRows> results;
  const AttentionParams& p = params.p;
  launch_dependent_grids();
  const SplitBlock block(p, params.partials, params.grid, [](int rows) { return team_for<C>(rows) * kRows; });
  if (!block.exists) return;
  const int team = team_for<C>(block.row_count);
  const Head& head = block.head;
  const std::int64_t first_key = block.first_key;
  const int begin = block.begin, end = block.end;

  const int warp = uniform(threadIdx.x / 32), teams = C::kWarps / team, team_index = warp / team;
  const int warp_rows = warp % team * kRows;  // the warp's first row in the block
  const LaneMap<C> at;
  const std::uint32_t q = shared_address(shared), rings = q + team * kRows * C::kPitch;
  const std::uint32_t warp_ring = rings + warp * C::kRingBytes;
  KeyRing<C>{warp_ring, shared_address(barriers[warp])}.init(p);
  const KeyRing<C> ring{rings + team_index * team * C::kRingBytes, shared_address(barriers[team_index * team])};
  const int slots = team * C::kStages;
  const auto sync_team = [&] {
    if (team == 1) __syncwarp();
    else named_sync(1 + team_index, 32 * team);
  };
  sync_team();
  // The first key of the team's n-th step.
  const int first_step = begin / C::kStepKeys;
  const auto key_at_step = [&](int n) { return (first_step + n * teams + team_index) * C::kStepKeys; };
  const auto load = [&](int n, int slot) {
    if (warp_rows != 0 || key_at_step(n) >= end) return;
    // The key, clamped to those that some row sees: its elements are finite, or that row falls back anyway.
    const int key = min(max(key_at_step(n) + at.lane % 16, begin), end - 1);
    ring.load(p, slot, head.key_at(at.lane < 16 ? p.k_stride : p.v_stride, first_key + key), params.kv_vector);
  };
  for (int n = 0; n < slots; ++n) load(n, n);
  rows.find(block);
  load_q<C>(head, block.row_begin, team * kRows, block.row_count, q);
  __syncthreads();
  const int all_from = __reduce_max_sync(~0u, rows.from[warp_rows + at.lane % kRows]);
  const int all_to = __reduce_min_sync(~0u, rows.to[warp_rows + at.lane % kRows]);

  // Sums over kShortSum steps, and sums of those: the rounding error of a sum grows with its length.
  float o[C::kOut] = {}, o_accum[C::kOut] = {}, row_max[2], max_accum[2], row_sum[2] = {}, sum_accum[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) row_max[h] = max_accum[h] = -kInfinity;
  const auto fold_partial_sums = [&] {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = rescale_factor(max_accum[h], row_max[h]), max_accum[h] = row_max[h];
      sum_accum[h] = fmaf(sum_accum[h], factor[h], row_sum[h]), row_sum[h] = 0;
    }
#pragma unroll
    for (int i = 0; i < C::kOut; ++i) o_accum[i] = fmaf(o_accum[i], factor[at.half_of_out(i)], o[i]), o[i] = 0;
  };
  std::conditional_t<kShared, KeyModifiers<C::kStepKeys>, NoModifiers> modifiers(p.score, head.b, first_key,
                                                                                 key_at_step(0), end);
#pragma unroll 1
  for (int n = 0, slot = 0, phase = 0; key_at_step(n) < end; ++n) {
    const int key = key_at_step(n);
    barrier_wait(ring.full(slot), phase);
    float s[C::kScores];
    multiply_keys<C>(p, q + warp_rows * C::kPitch, ring.k(slot), s);
#pragma unroll
    for (float& x : s) x *= p.score.scale_log2;
    const float of_lane = modifiers.next(teams * C::kStepKeys);
    const bool changes = kShared ? __any_sync(~0u, of_lane != 0) : params.modified;
    if (changes || key < all_from || key + C::kStepKeys > all_to) {
#pragma unroll
      for (int i = 0; i < C::kScores; ++i) {
        const int row = warp_rows + at.row(at.half_of_score(i)), j = key + at.key_of_score(i);
        if (kShared) s[i] = with_modifier(s[i], __shfl_sync(~0u, of_lane, at.key_of_score(i)));
        if (j < rows.from[row] || j >= rows.to[row]) s[i] = -kInfinity;
        else if (!kShared && params.modified) s[i] = rows.finish(head, row, first_key + j, s[i]);
      }
    }
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -kInfinity;
#pragma unroll
      for (int i = 0; i < C::kScores; ++i)
        if (at.half_of_score(i) == h) top = fmaxf(top, s[i]);
      top = next_row_max(row_max[h], ceilf(at.over_row(top, Max())));  // factors are powers of two
      rescale[h] = rescale_factor(row_max[h], top);
      row_max[h] = top;
    }
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) s[i] = exp2_approx(s[i] - shift_of(row_max[at.half_of_score(i)]));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < C::kScores; ++i)
        if (at.half_of_score(i) == h) sum += s[i];
      row_sum[h] = fmaf(row_sum[h], rescale[h], sum);
    }
    add_values<C>(ring.v(slot), s, rescale, o);
    fence_async_proxy();
    sync_team();
    load(n + slots, slot);
    if (++slot == slots) slot = 0, phase ^= 1;
    if (n % kShortSum == kShortSum - 1) fold_partial_sums();
  }
  fold_partial_sums();

  // Adds up the teams' results.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = at.over_row(sum_accum[h], Sum());
    if (at.in_row() == 0) results.row_max[at.row(h)][warp] = row_max[h], results.row_sum[at.row(h)][warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < C::kOut; ++i)  // [kRows][kSize], in the place of keys
    store4(warp_ring + 4 * (at.row(at.half_of_out(i)) * C::kSize + at.column_of_out(i)), __float_as_uint(o_accum[i]));
  __syncthreads();
  results.store(block, params.partials, params.partials.splits == 1, team,
                reinterpret_cast<const float*>(shared + team * kRows * C::kPitch), C::kSize, C::kRingBytes / 4);
}

// Calls `then` with the sizes for a call.
template <class Then>
auto with_config(const AttentionParams& p, Then then) {
  const std::int64_t size = std::max(p.d, p.dv);
  if (size <= 64) return then(DecodeF32Config<64>());
  if (size <= 128) return then(DecodeF32Config<128>());
  return then(DecodeF32Config<256>());
}

}  // namespace

cudaError_t launch_attention_decode_f32(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  const bool vector = is_vector(p.k, p.k_stride, 4) && is_vector(p.v, p.v_stride, 4) && p.d % 4 == 0 && p.dv % 4 == 0;
  return for_each_part(p, partials_of(p, workspace), [&](const PartialResults& partials) {
    const cudaError_t status = with_config(p, [&](auto config) {
      using C = decltype(config);
      const int team = team_for<C>(max_rows(p));
      const SplitGrid grid(p, partials, ceil_div(max_rows(p), team * kRows));
      const DecodeF32Params params{p, partials, grid, has_modifiers(p.score), vector};
      const auto kernel = rows_share_modifiers(p) ? attention_decode_f32<C, true> : attention_decode_f32<C, false>;
      return launch_kernel(false, kernel, grid.blocks, C::kThreads, C::shared_bytes(team), stream, params);
    });
    return status == cudaSuccess && partials.splits > 1 ? launch_attention_combine(p, partials, stream) : status;
  });
}

}  // namespace rapt::cuda
