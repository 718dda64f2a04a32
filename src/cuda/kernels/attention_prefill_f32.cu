// attention_prefill_f32: out = softmax(q k^T) v in fp32 on Hopper's 16-bit tensor cores, as exact as fp32.
//
// The entry attention_prefill.f32 calls it. Every operand is the sum of two fp16 components, hi + lo, of 22 bits
// together; of their four products the three that matter are done: 6 b hq sq sk (d + dv) flops, half of that if causal.
// Operands are scaled by powers of two into fp16's range. Each block's P V starts from zero and is added to O in fp32,
// since tensor cores round sums towards zero, which would add up.
//
// The first kernel writes the components of K and V to the workspace, laid out as in shared memory: it reads 4 bytes
// and writes 4 bytes for each number. The second has attention_prefill's schedule: one thread loads components by bulk
// copies, and warps write those of their own rows of Q. A step issues P V of the previous block and Q K^T of this one.
// With up to 128 columns, the two math warpgroups take turns at issuing (ping-pong), so that one's softmax runs beside
// the other's products.
//
// Past 128 columns (kWideHead), registers hold little beside O, so P V is done 64 columns at a time; and shared memory
// has room for one block of K and of V: the next K loads during P V, the next V during Q K^T. Scores are then sums over
// two halves of the columns, since tensor cores lose more to rounding in long sums.
//
// Rows whose numbers 22 bits do not carry are fallback rows: a bit for each goes to the workspace, and attention_simt
// computes them in a third kernel.
#include <cuda_runtime.h>

#include <cmath>

#include "cuda/hopper/components.cuh"
#include "cuda/hopper/fragment.cuh"
#include "cuda/hopper/schedule.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

// A row falls back if its largest score reaches kMaxExactScore, in log2 units (fp32 has two more bits there), or if the
// product of a query's and a key's scale exceeds kCoarseScore: see OnlineSoftmaxF32::store().
constexpr float kMaxExactScore = 0x1p8f, kCoarseScore = 0x1p-15f;

// The sizes of the kernel for heads of up to kSize columns.
template <int kSize_, bool kModified_>
struct PrefillF32Config {
  static constexpr bool kSplit = false, kQuantized = false;
  static constexpr int kBlocksPerMultiprocessor = 1;
  static constexpr int kSize = kSize_, kColumns = kSize;  // columns of rows in shared memory, and of products
  static constexpr bool kModified = kModified_;           // scores need more than a scale
  static constexpr bool kDense = false;
  static constexpr int kGroups = 2, kLoadThreads = 128, kThreads = kLoadThreads + 128 * kGroups;
  static constexpr bool kWideHead = kSize > 128;
  static constexpr int kLoadRegisters = kWideHead ? 40 : 56, kMathRegisters = kWideHead ? 232 : 224;
  static_assert(kLoadRegisters + kGroups * kMathRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "or warpgroups wait for registers for ever: there are no more than the launch took");
  static constexpr int kProducers = 96;  // threads that put tiles into shared memory
  static constexpr int kRows = kGroupRows * kGroups, kKeys = kSize == 64 ? 128 : kSize == 256 ? 32 : 64;
  static constexpr int kStages = kWideHead ? 1 : 2;               // blocks of K, and of V, in shared memory
  static constexpr int kColumnsAtOnce = kWideHead ? 64 : kSize;   // columns of P V that are done at once
  static constexpr int kGroupBytes = 2 * kGroupRows * kSize * 2;  // both components of a warpgroup's rows of Q
  static constexpr int kBlockBytes = 2 * kKeys * kSize * 2;
  static constexpr int kScales = kKeys + 4;  // factors of a block: of each row of K, of V, and padding to 16 bytes
  static constexpr int kAllScales = kStages * kScales + kRows;  // of all stages, then of Q's rows
  static constexpr int kSharedBytes = kGroups * kGroupBytes + 2 * kStages * kBlockBytes + kAllScales * 4 + 1024;
  static constexpr float kRescaleThreshold = 0;  // the shift is always the row maximum
  static constexpr float kShift = kWeightShift, kOne = kWeightOne;
  using Tiles = Tiling<kRows>;
  using Blocks = Blocking<kKeys>;
};

struct PrefillF32Params : ComponentParams {
  float scale;                   // factor of scores; a negative scale's sign goes to Q
  bool scales_after_modifiers;   // the factor is applied after the modifiers
  std::uint16_t* fallback_rows;  // a bit for each row, 16 rows to a number: attention_simt is to compute them
};
static_assert(kGroupRows == kSimtRows, "a warpgroup's rows are a tile of attention_simt");
// Bytes of fallback_rows.
std::size_t fallback_bytes(const AttentionParams& p) {
  return static_cast<std::size_t>(simt_tiles(p)) * sizeof(std::uint64_t);
}

template <class C>
using Stages = Ring<C::kStages>;

// Loads K and V to shared memory, by one thread.
template <class C>
__device__ void load(const PrefillF32Params& params, const TileQueue& queue, const Tile<C>* tiles, const Stages<C>& k,
                     const Stages<C>& v, std::uint32_t scales) {
  for (int t = 0, n = 0;; ++t) {
    queue.wait_full(t);
    const Tile<C>& tile = tiles[t % kQueueTiles];  // its readers release it after they have used all of its blocks
    if (tile.blocks == 0) break;
    const Head head(params.p, tile.b, tile.hk);
    // Rows that see no key have a block all the same.
    const std::int64_t first = C::Blocks::number(head, tile.end > tile.begin ? tile.key : C::Blocks::origin(head));
#pragma unroll 1
    for (int i = tile.blocks - 1; i >= 0; --i, ++n) {
      const std::int64_t block = first + i;
      k.wait_empty(n);
      barrier_arrive_expecting(k.full(n), C::kBlockBytes + C::kScales * 4);
      bulk_load(scales + n % C::kStages * (C::kScales * 4), params.scales + block * C::kScales, C::kScales * 4,
                k.full(n), true);
      bulk_load(k.slot(n), params.k + block * C::kBlockBytes, C::kBlockBytes, k.full(n), true);
      v.wait_empty(n);
      barrier_arrive_expecting(v.full(n), C::kBlockBytes);
      bulk_load(v.slot(n), params.v + block * C::kBlockBytes, C::kBlockBytes, v.full(n), true);
    }
  }
}

// A math warpgroup's state: weights, O and statistics of its rows.
template <class C>
struct OnlineSoftmaxF32 : SoftmaxState<C> {
  using SoftmaxState<C>::kScores, SoftmaxState<C>::kOut, SoftmaxState<C>::lane, SoftmaxState<C>::warp_row,
      SoftmaxState<C>::column;
  using SoftmaxState<C>::row, SoftmaxState<C>::o, SoftmaxState<C>::row_max, SoftmaxState<C>::row_sum,
      SoftmaxState<C>::rescale;
  static constexpr int kColumnsAtOnce = C::kColumnsAtOnce / 2;

  const PrefillF32Params& params;
  std::uint32_t hi[kScores / 2] = {},
                             lo[kScores / 2] =
                                 {};  // components of the weights of the block before the one in s, as operand A
  float value_scale = 0;              // that block's factor on P V
  float factor[2];                    // each row's factor on scores
  // Maxima so far: of the scales of K's rows that the lane saw; of scores before modifiers, likewise; of the scales of
  // blocks of V.
  float key_scale[2], raw_max[2], top_value_scale[2];

  __device__ OnlineSoftmaxF32(const PrefillF32Params& params) : params(params) {}

  __device__ void begin(const Tile<C>& tile, const float* scales) {
    SoftmaxState<C>::begin(params, tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = scales[row(h)] * params.scale;
      key_scale[h] = raw_max[h] = top_value_scale[h] = 0;
    }
  }

  // Turns products with keys [key, key + kKeys), counted from the tile's first, into scores, except for `factor`.
  // `scales` are the block's.
  __device__ void finish_scores(float (&s)[kScores], const Tile<C>& tile, int key, const float* scales) {
    const auto keys = [&](int j) { return *reinterpret_cast<const float2*>(scales + j + column); };
    int from[2], to[2];  // the columns [from, to) that rows see, counted from the lane's first
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& r = tile.row_info[row(h)];
      from[h] = r.first - key - column, to[h] = r.last - key - column;
    }
    if constexpr (C::kModified) {
      for_each_four(s, [&](int j, float(&four)[4]) {
        const float2 of_key = keys(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = j + i % 2, h = i / 2;
          const float by = i % 2 ? of_key.y : of_key.x,
                      x = four[i] * by * (params.scales_after_modifiers ? 1.f : factor[h]);
          const auto& r = tile.row_info[row(h)];
          four[i] = at < from[h] || at >= to[h]
                        ? -kInfinity
                        : finish_score(params.p.score, {tile.b, r.q_head, r.token, tile.key + key + column + at},
                                       r.nearest, x);
          if (four[i] == -kInfinity) continue;
          key_scale[h] = fmaxf(key_scale[h], by);
          if (!params.scales_after_modifiers) raw_max[h] = fmaxf(raw_max[h], fabsf(x));
        }
      });
    } else if (max(from[0], from[1]) > -column || min(to[0], to[1]) < C::kKeys - column) {
#pragma unroll
      for (int j = 0; j < C::kKeys; j += 8) {
        const float2 of_key = keys(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = j + i % 2, h = i / 2;
          const bool hidden = at < from[h] || at >= to[h];
          const float by = i % 2 ? of_key.y : of_key.x;
          s[j / 2 + i] = hidden ? -kInfinity : s[j / 2 + i] * by;
          key_scale[h] = fmaxf(key_scale[h], hidden ? 0.f : by);
        }
      }
    } else {
      float max_scale = 0;
#pragma unroll
      for (int j = 0; j < C::kKeys; j += 8) {
        const float2 of_key = keys(j);
        max_scale = fmaxf(max_scale, fmaxf(of_key.x, of_key.y));
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j / 2 + i] *= i % 2 ? of_key.y : of_key.x;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) key_scale[h] = fmaxf(key_scale[h], max_scale);
    }
    value_scale = scales[C::kKeys];
  }

  // Scores to weights, as components.
  __device__ void softmax(float (&s)[kScores]) {
    float by[2], neg_m[2], sum[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -kInfinity;
#pragma unroll
      for (int i = 2 * h; i < kScores; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
      by[h] = C::kModified && !params.scales_after_modifiers ? 1.f : factor[h];
      top = over_row(top, Max()) * by[h];
      if (top != -kInfinity) top_value_scale[h] = fmaxf(top_value_scale[h], value_scale);
      neg_m[h] = this->update_shift(h, top);
    }
    pin(s);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int h = i / 2 % 2;
      const float a = exp2_approx(fmaf(s[i], by[h], neg_m[h])), b = exp2_approx(fmaf(s[i + 1], by[h], neg_m[h]));
      sum[h] += a + b;
      split_f16(a, b, hi[i / 2], lo[i / 2]);
    }
    pin(hi);  // or the compiler moves exponentials to the products that use them
    pin(lo);
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[h] = fmaf(row_sum[h], rescale[h], sum[h]);
  }

  // Adds P V of columns from part * kColumnsAtOnce on to O.
  __device__ void add(const float (&pv)[kColumnsAtOnce], int part) {
#pragma unroll
    for (int i = 0; i < kColumnsAtOnce; ++i) {
      float& x = o[part * kColumnsAtOnce + i];
      x = fmaf(x, rescale[i / 2 % 2], pv[i] * value_scale);
    }
  }

  // Normalises and stores the tile's results, and notes its fallback rows.
  __device__ void store(const Tile<C>& tile) {
    const AttentionParams& p = params.p;
    bool falls_back[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& r = tile.row_info[row(h)];
      row_sum[h] = over_row(row_sum[h], Sum());
      if (r.lse >= 0 && lane % 4 == 0) p.lse[r.lse] = lse_of(row_max[h], row_sum[h] * (1 / C::kOne), r.alibi_shift);
      const float estimate = __fdividef(1, row_sum[h]);  // refined by a Newton step below
      const float output_scale =
          row_sum[h] == 0 ? 0.f : fmaf(estimate, fmaf(-row_sum[h], estimate, 1), estimate) * C::kOne;
      float nan_or_0 = row_sum[h] * 0, smallest = kInfinity, largest = 0;
#pragma unroll
      for (int i = 0; i < kOut; ++i) {
        if (i / 2 % 2 != h) continue;
        o[i] *= output_scale;
        nan_or_0 = fmaf(o[i], 0, nan_or_0);
        largest = fmaxf(largest, fabsf(o[i]));
        if (o[i] != 0) smallest = fminf(smallest, fabsf(o[i]));
      }
      // Numbers of V below 2^-3 of their scaled block have lost digits. In a sum of many, larger ones outweigh them;
      // rows whose result is mostly one key's value, or small in all columns, are found by their size.
      const float coarse = top_value_scale[h] * C::kOne * (kLoError * 0x1p21f);
      const bool small = over_row(largest, Max()) < coarse || (row_sum[h] < 4 * C::kOne && smallest < coarse);
      // Numbers of Q and K are off by up to 2^-25, beside numbers up to 2^15: a score is off by less than 2^-6 times
      // the product of both scales.
      const bool carried =
          fabsf(row_max[h]) < kMaxExactScore && raw_max[h] < kMaxExactScore && key_scale[h] * factor[h] <= kCoarseScore;
      falls_back[h] = r.out >= 0 && !(nan_or_0 == 0 && !small && (row_max[h] == -kInfinity || carried));
    }
    const unsigned rows = rows_of_warp(falls_back);
    if (lane == 0 && tile.row + warp_row / kGroupRows * kGroupRows < tile.rows)
      params.fallback_rows[4 * Tiling<kGroupRows>::number(p, tile.b, tile.hk, tile.row) + warp_row / 16] =
          static_cast<std::uint16_t>(rows);
    store_rows(params, tile, warp_row, o);
  }
};

// A math warpgroup: all tiles of its thread block.
template <class C>
__device__ void attend(const PrefillF32Params& params, const TileQueue& queue, const Tile<C>* tiles, std::uint32_t q,
                       const Stages<C>& k, const Stages<C>& v, float* scales, int group) {
  constexpr int kColumnParts = C::kSize / C::kColumnsAtOnce, kSteps = C::kSize / 16 / (C::kWideHead ? 2 : 1);
  constexpr int kLow = kGroupRows * C::kSize / 8;  // descriptor offset from Q's hi to its lo
  constexpr int kBlockLow = C::kKeys * C::kSize / 8;
  OnlineSoftmaxF32<C> rows(params);
  float* const query_scales = scales + C::kStages * C::kScales;
  // Named barriers: kTurnBarrier + group opens a warpgroup's turn at issuing products; kGroupBarrier + group
  // synchronises a warpgroup.
  constexpr int kTurnBarrier = 1, kGroupBarrier = kTurnBarrier + C::kGroups;
  const auto load_queries = [&](const Tile<C>& tile) {
    const auto sync = [&] { named_sync(kGroupBarrier + group, 128); };
    sync();  // all warps have read the last tile's Q
    write_queries(params, tile, rows.warp_row, q, query_scales);
    fence_async_proxy();
    sync();
  };
  float s[OnlineSoftmaxF32<C>::kScores] = {}, pv[OnlineSoftmaxF32<C>::kColumnsAtOnce] = {};
  queue.wait_full(0);
  bool has_tile = tiles[0].blocks > 0;
  if (!has_tile) return;
  load_queries(tiles[0]);

  // Opens the first turn. (With one slot for a block, turns would keep it in use half a step longer.)
  if (!C::kWideHead && group == C::kGroups - 1) named_arrive(kTurnBarrier, 256);
  const std::uint32_t q_matrix = matrix_at(q);
  int t = 0;                // tiles begun
  int block = 0;            // the tile's key block whose scores are in s
  bool first_block = true;  // s is of the tile's first block, or of none; O of the tile before is complete then
  for (int n = 0;; ++n) {   // counts K blocks; V blocks are one behind
    if (has_tile && !C::kWideHead) k.wait_full(n);
    if (n > 0) v.wait_full(n - 1);

    // P V of the previous block, then S = Q K^T of this one. In the first pass P is 0, and in the last S is not used.
    if constexpr (!C::kWideHead) named_sync(kTurnBarrier + group, 256);
    const std::uint32_t k_matrix = matrix_at(k.slot(n));
    const std::uint32_t v_matrix = matrix_at(v.slot(n + C::kStages - 1), C::kKeys * 128);
    const auto multiply_values = [&](int part) {
#pragma unroll
      for (int product = 0; product < 3; ++product)  // the smallest products first
#pragma unroll
        for (int i = 0; i < C::kKeys / 16; ++i)
          wgmma_ab<__half>(
              pv, (product == 1 ? rows.lo : rows.hi) + 4 * i,
              v_matrix + part * (C::kColumnsAtOnce / 64 * C::kKeys * 8) + i * 128 + (product == 0 ? kBlockLow : 0),
              product + i > 0);
      wgmma_commit();
    };
    const auto multiply_keys = [&](float(&sums)[OnlineSoftmaxF32<C>::kScores], int chain) {
#pragma unroll
      for (int product = 0; product < 3; ++product)
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const int i = chain * kSteps + step;
          wgmma_abt<__half>(sums, q_matrix + i / 4 * (kGroupRows * 8) + i % 4 * 2 + (product == 1 ? kLow : 0),
                            k_matrix + i / 4 * (C::kKeys * 8) + i % 4 * 2 + (product == 0 ? kBlockLow : 0),
                            product + step > 0);
        }
      wgmma_commit();
    };
    pin(s);
    pin(pv);
#pragma unroll
    for (int part = 0; part < kColumnParts - 1; ++part) {
      wgmma_fence();
      multiply_values(part);
      wgmma_wait<0>();
      pin(pv);
      rows.add(pv, part);  // in the first pass, to an O that begin() resets
      pin(pv);
    }
    if (has_tile && C::kWideHead) k.wait_full(n);  // waits this late, as with one slot the block may still be loading
    wgmma_fence();
    multiply_values(kColumnParts - 1);
    multiply_keys(s, 0);
    wgmma_wait<1>();
    pin(pv);
    if constexpr (!C::kWideHead) named_arrive(kTurnBarrier + (group + 1) % C::kGroups, 256);
    if (n > 0) {
      v.release(n - 1);
      rows.add(pv, kColumnParts - 1);
    }
    if constexpr (C::kWideHead) {  // the second half of the columns, in the registers of P V
      auto& second_half = reinterpret_cast<float(&)[OnlineSoftmaxF32<C>::kScores]>(pv);
      pin(pv);
      wgmma_fence();
      multiply_keys(second_half, 1);
      wgmma_wait<0>();
      pin(s);
      pin(pv);
#pragma unroll
      for (int i = 0; i < OnlineSoftmaxF32<C>::kScores; ++i) s[i] += second_half[i];
    } else {
      wgmma_wait<0>();
      pin(s);
    }

    if (first_block) {
      if (n > 0) {
        rows.store(tiles[(t - 1) % kQueueTiles]);
        __syncwarp();
        queue.release(t - 1);
      }
      if (!has_tile) break;
      rows.begin(tiles[t % kQueueTiles], query_scales);
      block = tiles[t % kQueueTiles].blocks;
    }
    const Tile<C>& tile = tiles[t % kQueueTiles];
    first_block = --block == 0;
    rows.finish_scores(s, tile, block * C::kKeys, scales + n % C::kStages * C::kScales);
    fence_async_proxy();  // orders the ordinary loads of scales before the bulk copies that overwrite them
    __syncwarp();
    k.release(n);
    rows.softmax(s);
    if (first_block) {
      queue.wait_full(++t);
      has_tile = tiles[t % kQueueTiles].blocks > 0;
      if (has_tile) load_queries(tiles[t % kQueueTiles]);
    }
  }
  if (!C::kWideHead && group == 0) named_sync(kTurnBarrier, 256);  // takes the last turn, which no warpgroup waits for
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_prefill_f32(const __grid_constant__ PrefillF32Params params) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[4 * C::kStages + 2 * kQueueTiles];
  __shared__ Tile<C> tiles[kQueueTiles];
  auto& list = *reinterpret_cast<SequenceList*>(shared + C::kSharedBytes);
  const std::uint32_t first = shared_address(barriers), start = shared_address(shared);
  const std::uint32_t data = (start + 1023) / 1024 * 1024;  // the swizzle's unit
  const Stages<C> k{first, data + C::kGroups * C::kGroupBytes, C::kBlockBytes};
  const Stages<C> v{first + 16 * C::kStages, k.data + C::kStages * C::kBlockBytes, C::kBlockBytes};
  const TileQueue queue{first + 32 * C::kStages};
  const std::uint32_t scales = v.data + C::kStages * C::kBlockBytes;
  launch_dependent_grids();
  if (threadIdx.x == 0) {
    k.init(1, 4 * C::kGroups);
    v.init(1, 4 * C::kGroups);
    queue.init(C::kProducers, 4 * C::kGroups);
    fence_barrier_init();
  }
  if (params.has_list) list.fill<C>(params);
  else __syncthreads();
  if (threadIdx.x < 128) {
    registers_decrease<C::kLoadRegisters>();
    if (threadIdx.x == 0) {
      wait_on_dependent_grids();  // the previous kernel writes the components
      load<C>(params, queue, tiles, k, v, scales);
    }
    if (threadIdx.x >= 32) {
      TileProducer<C> producer{params, queue, tiles, {params, list}};
      for (unsigned i = 0; producer.push(i); ++i) {
        queue.wait_full(i);
        prefetch_queries(params, tiles[i % kQueueTiles]);
      }
    }
  } else {
    registers_increase<C::kMathRegisters>();
    const int group = threadIdx.x / 128 - 1;
    attend<C>(params, queue, tiles, data + group * C::kGroupBytes, k, v,
              reinterpret_cast<float*>(shared + (scales - start)), group);
  }
}

// Lays out the workspace, and returns its bytes.
template <class C>
std::size_t lay_out(PrefillF32Params& params, std::byte* workspace) {
  const AttentionParams& p = params.p;
  const std::int64_t blocks = C::Blocks::heads(p) * C::Blocks::blocks(p);
  std::size_t bytes = 0;
  const auto reserve = [&](auto*& to, std::int64_t size) {
    if (workspace) to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(workspace + bytes);
    bytes += static_cast<std::size_t>(size + 127) / 128 * 128;
  };
  reserve(params.k, blocks * C::kBlockBytes);
  reserve(params.v, blocks * C::kBlockBytes);
  reserve(params.scales, blocks * C::kScales * 4);
  reserve(params.fallback_rows, static_cast<std::int64_t>(fallback_bytes(p)));
  return bytes;
}

constexpr std::int64_t kFewBlocks = 16;  // thread blocks of prefill_f32_components_sparse for each multiprocessor

template <class C>
cudaError_t launch(PrefillF32Params& params, std::byte* workspace, cudaStream_t stream) {
  const AttentionParams& p = params.p;
  lay_out<C>(params, workspace);
  cudaError_t status = cudaSuccess;
  // Tiles of ragged sequences may be empty: no warp writes their bits.
  if (p.total_q >= 0) status = cudaMemsetAsync(params.fallback_rows, 0, fallback_bytes(p), stream);
  if (status != cudaSuccess) return status;
  const int processors = plan_grid<C>(params, 2 * 4 * C::kSize);
  const std::int64_t units = 2 * C::Blocks::heads(p) * C::Blocks::blocks(p);
  using Components = PrefillF32Config<C::kSize, false>;
  const std::int64_t few = kFewBlocks * multiprocessors();
  const bool some = p.total_q >= 0 && units > few;
  status = some ? launch_kernel(false, prefill_f32_components_sparse<Components>, static_cast<unsigned>(few),
                                kPrepareThreads, 0, stream, params, static_cast<unsigned>(units))
                : launch_kernel(false, prefill_f32_components<Components>, static_cast<unsigned>(units),
                                kPrepareThreads, 0, stream, params);
  if (status != cudaSuccess) return status;
  status = launch_kernel(true, attention_prefill_f32<C>, processors, C::kThreads,
                         C::kSharedBytes + SequenceList::bytes(params), stream, params);
  if (status != cudaSuccess) return status;
  return launch_attention_simt(p, stream, reinterpret_cast<const std::uint64_t*>(params.fallback_rows));
}

// Calls `then` with the smallest compiled head dimension that fits the call, as a constant.
template <class Then>
auto with_head_dim(const AttentionParams& p, Then then) {
  const std::int64_t size = std::max(p.d, p.dv);
  if (size <= 64) return then(std::integral_constant<int, 64>());
  if (size <= 128) return then(std::integral_constant<int, 128>());
  if (size <= 192) return then(std::integral_constant<int, 192>());
  return then(std::integral_constant<int, 256>());
}

}  // namespace

bool prefill_f32_can_count(const AttentionParams& p) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 28;  // of what is counted in 32 bits
  using Smallest = PrefillF32Config<256, false>::Blocks;
  return std::max(p.sk, p.total_k) < kLimit && std::max(p.sq, p.total_q) < kLimit / at_least_1(p.group) &&
         p.b < kLimit && p.hk < kLimit && simt_tiles(p) < kLimit &&
         Smallest::heads(p) < kLimit / at_least_1(Smallest::blocks(p));
}

std::size_t prefill_f32_workspace(const AttentionParams& p) {
  PrefillF32Params params{};
  params.p = p;
  const std::size_t bytes =
      with_head_dim(p, [&](auto size) { return lay_out<PrefillF32Config<size, false>>(params, nullptr); });
  return p.total_q < 0 ? bytes : std::max(bytes, decode_workspace(p));
}

cudaError_t launch_attention_prefill_f32(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  PrefillF32Params params{};
  params.p = p;
  params.scale = std::fabs(p.score.scale_log2);
  params.scales_after_modifiers = scales_last(p.score);
  params.q_vector = is_vector(p.q, p.q_stride, 4), params.k_vector = is_vector(p.k, p.k_stride, 4);
  params.v_vector = is_vector(p.v, p.v_stride, 4);
  params.out_vector = is_vector(p.out, p.out_stride, p.out_type == DType::f32 ? 4 : 2);
  return with_head_dim(p, [&](auto size) {
    // Without a scale, masked scores would be -inf * 0.
    if (has_modifiers(p.score) || params.scale == 0)
      return launch<PrefillF32Config<size, true>>(params, workspace, stream);
    return launch<PrefillF32Config<size, false>>(params, workspace, stream);
  });
}

}  // namespace rapt::cuda
