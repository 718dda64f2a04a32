// Attention of 16-bit types on Hopper's tensor cores: FlashAttention-3's schedule. A block or two per multiprocessor
// go through tiles of query rows; a block's first warpgroup fills rings of Q tiles and of K and V blocks in shared
// memory, and each of the others does 64 rows of the tile. S = Q K^T of one key block runs while the softmax of the
// block before feeds O += P V. (Warpgroups taking turns, at products or at exponentials, were up to 5 % slower on an
// H200.) Results leave by way of their Q's place, while the next tile is at work.
//
// Keys are cut into blocks at multiples of the block size from key 0 and taken from the last to the first. A block that
// is masked for a row leaves what the row has unchanged to the bit, so that a row's result is its own.
//
// Masked weights are 0, but 0 times NaN is NaN: results that are not finite are not trusted. Such rows are
// noted: attention_simt computes these fallback rows.
#include <cuda_runtime.h>

#include <cmath>

#include "cuda/hopper/host.cuh"
#include "cuda/hopper/rows.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

constexpr float kHugeScore = 0x1p20f;  // past it a weight would lose digits to the score's size
// Where all keys together weigh less beside a sink, their weights are no longer as exact as T.
template <class T>
constexpr float kMinKeyWeight = std::is_same_v<T, __half> ? 0x1p-16f : 0x1p-20f;

// The kernel for elements T and head sizes up to kSize, in tiles of rows for kGroups warpgroups. kSplit: of few rows,
// over splits of their keys.
template <class T, int kSize_, bool kTma_, bool kModified_, bool kSplit_, int kGroups_>
struct Config {
  using Element = T;
  static constexpr int kSize = kSize_;
  static constexpr bool kTma = kTma_;            // else K and V are loaded by the threads of the first warpgroup
  static constexpr bool kModified = kModified_;  // scores need more than a scale
  static constexpr bool kSplit = kSplit_;
  static constexpr int kGroups = kGroups_, kThreads = 128 * (kGroups + 1);
  // On a multiprocessor. Short tiles: one begins while another ends.
  static constexpr int kBlocks = kGroups == 1 && kSize <= (kSplit ? 128 : 64) ? 2 : 1;
  static constexpr int kLoadRegisters = kGroups == 1 ? 72 : kGroups == 3 ? 32 : kTma ? 56 : 72;
  static constexpr int kMathRegisters = kGroups == 1 ? 184 : kGroups == 3 ? 160 : kTma ? 224 : 216;
  static constexpr bool kTradesRegisters = kGroups > 1 || kBlocks > 1;  // else all have enough
  static constexpr int kProducers = kTma ? 96 : 128;                    // threads that put tiles into shared memory
  static constexpr int kRows = kGroupRows * kGroups, kKeys = kSize > 128 || kSplit ? 64 : 128;
  static constexpr int kStages = kSplit && kSize == 64 ? 4 : 2;  // blocks of K and of V at a time
  // A row's maximum moves only when it grows by more: weights are then up to 2^kSlack, and O is rarely rescaled.
  static constexpr float kSlack = 8;
  // Weights are 2^kShift times as large, so that fp16 has more of the small ones.
  static constexpr float kShift = std::is_same_v<T, __half> ? 7 : 0, kOne = std::is_same_v<T, __half> ? 128 : 1;
  static constexpr int kRowsBytes = kRows * kSize * 2, kBlockBytes = kKeys * kSize * 2;
  static constexpr int kQueryTiles = kSize == 64 ? 3 : kSize == 256 ? 1 : 2;  // that there is room for
  static constexpr int kSharedBytes = kQueryTiles * kRowsBytes + 2 * kStages * kBlockBytes + 1024;
  // By way of Q's place, if the next one has another.
  static constexpr bool kStoresByTma = kTma && kQueryTiles > 1;
  static_assert(kSplitUnit % kKeys == 0);
  static_assert(!kTradesRegisters ||
                    kLoadRegisters + kGroups * kMathRegisters <= 65536 / (kThreads * kBlocks) / 8 * 8 * (kGroups + 1),
                "or warpgroups wait for registers for ever: there are no more than the launch took");
  using Tiles = Tiling<kRows>;
};

struct WgmmaParams : Grid {
  CUtensorMap q, k, v, out;  // if TMA loads them, or stores it
  bool out_by_tma, unsplit;  // unsplit: no sequence's keys are split, and results are stored at once
  float inner, outer;        // scales of scores, before and after the modifiers; Q takes the sign
  bool q_vector, kv_vector;  // 16 bytes at a time
};

template <class C>
using Blocks = Ring<C::kStages>;
template <class C>
using QueryRing = Ring<C::kQueryTiles>;

// Tile i's rows of Q, by the threads that queued it.
template <class C>
__device__ void load_q(const WgmmaParams& params, const TileQueue& queue, const Tile<C>* tiles, const QueryRing<C>& q,
                       unsigned i) {
  const AttentionParams& p = params.p;
  const Tile<C>& tile = tiles[i % kQueueTiles];
  queue.wait_full(i);
  q.wait_empty(i);
#pragma unroll 1
  for (int row = (threadIdx.x - (128 - C::kProducers)) / 32 * 16; row < C::kRows; row += C::kProducers / 2)
    load_rows<C::kSize, 2>(16, q.slot(i) + row * 128, C::kRows * 128, p.q, tile.of_row[row + threadIdx.x % 16].q,
                           p.q_stride.d, static_cast<int>(p.d), params.q_vector, p.score.scale_log2 < 0 ? 0x8000 : 0);
  copy_commit();
  copy_wait<0>();
  fence_async_proxy();
  barrier_arrive(q.full(i));
}

// Where TMA loads K and V, and mostly Q: one thread.
template <class C>
__device__ void load_by_tma(const WgmmaParams& params, const QueryRing<C>& q, const Blocks<C>& k, const Blocks<C>& v) {
  TileScheduler<C> scheduler{params};
  TileExtent tile;
  KeyWindow keys;
  const bool keep = params.tiles * C::kGroups > 4;  // else a head's keys are read by tiles that run side by side
  bool more = scheduler.next(tile, keys);
  for (unsigned t = 0, n = 0; more; ++t) {
    if (params.q_by_tma) {
      const int groups = min((tile.rows - tile.row + kGroupRows - 1) / kGroupRows, C::kGroups);
      const int tokens = kGroupRows / static_cast<int>(params.p.group);
      q.wait_empty(t);
      barrier_arrive_expecting(q.full(t), groups * (kGroupRows * C::kSize * 2));
#pragma unroll 1
      for (int group = 0; group < groups; ++group)
#pragma unroll
        for (int panel = 0; panel < C::kSize / 64; ++panel)
          tma_load(q.slot(t) + (panel * C::kRows + group * kGroupRows) * 128, &params.q, panel * 64, 0,
                   tile.q_first + tile.token + group * tokens, tile.hk, params.p.total_q >= 0 ? 0 : tile.b, q.full(t));
    }
    const bool ragged = params.p.total_k >= 0;
    const int hk = tile.hk, b = ragged ? 0 : tile.b, blocks = tile.blocks;
    int key = static_cast<int>(tile.key) + (blocks - 1) * C::kKeys;
    if (ragged) key += static_cast<int>(Head(params.p, tile.b, tile.hk).k_first);
    for (int block = blocks; block > 0; --block, ++n, key -= C::kKeys) {
      const auto load = [&](const Blocks<C>& ring, const CUtensorMap& map) {
        ring.wait_empty(n);
        barrier_arrive_expecting(ring.full(n), C::kBlockBytes);
#pragma unroll
        for (int panel = 0; panel < C::kSize / 64; ++panel)
          tma_load(ring.slot(n) + panel * C::kKeys * 128, &map, panel * 64, key, hk, b, ring.full(n), keep);
      };
      load(k, params.k);
      load(v, params.v);
      if (block == min(2, blocks)) more = scheduler.next(tile, keys);  // before it is urgent
    }
  }
}

// Both by all threads of a warpgroup, for any layout of K and V. Only keys that some row sees are read.
template <class C>
__device__ void load_by_threads(const WgmmaParams& params, const TileQueue& queue, Tile<C>* tiles,
                                const QueryRing<C>& q, const Blocks<C>& k, const Blocks<C>& v) {
  constexpr int kWarpRows = C::kKeys / 4;
  const AttentionParams& p = params.p;
  const int first = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
  TileProducer<C> producer{params, queue, tiles};
  bool more = producer.push(0);
  if (more) load_q<C>(params, queue, tiles, q, 0);
  for (unsigned i = 0, n = 0; more; ++i) {
    const TileExtent& tile = tiles[i % kQueueTiles];
    more = producer.push(i + 1);  // a tile early, so that its readers do not wait for it

    const Head head(p, tile.b, tile.hk);
    std::uint32_t filling = 0;  // barrier of the block whose copies are under way
    for (int block = tile.blocks - 1; block >= 0; --block, ++n) {
      const std::int64_t key = tile.key + block * C::kKeys + first + lane;
      const bool exists = key >= tile.begin && key < tile.end;
#pragma unroll 1
      for (int values = 0; values < 2; ++values) {
        const Strides stride = values ? p.v_stride : p.k_stride;
        const Blocks<C> ring = values ? v : k;
        ring.wait_empty(n);
        load_rows<C::kSize, 2>(kWarpRows, ring.slot(n) + first * 128, C::kKeys * 128, values ? p.v : p.k,
                               exists ? head.key_at(stride, key) : -1, stride.d, static_cast<int>(values ? p.dv : p.d),
                               params.kv_vector, 0);
        copy_commit();
        if (filling) {
          copy_wait<1>();
          fence_async_proxy();
          barrier_arrive(filling);
        }
        filling = ring.full(n);
      }
    }
    copy_wait<0>();
    fence_async_proxy();
    barrier_arrive(filling);
    if (more) load_q<C>(params, queue, tiles, q, i + 1);
  }
}

// A math warpgroup's state.
template <class C>
struct Rows : RowState<C> {
  using RowState<C>::kScores, RowState<C>::kOut, RowState<C>::lane, RowState<C>::warp_row, RowState<C>::column;
  using RowState<C>::row, RowState<C>::o, RowState<C>::m, RowState<C>::l, RowState<C>::rescale;

  const WgmmaParams& params;
  std::uint32_t weights[kScores / 2] = {};  // of the block before the one in s, as operand A
  int all_from, all_to;                     // keys that all rows of the warp see, counted like `first`

  __device__ Rows(const WgmmaParams& params) : params(params) {}

  __device__ void begin(const Tile<C>& tile) {
    RowState<C>::begin(tile);
    const auto& both = tile.of_row[warp_row + lane % 16];
    all_from = __reduce_max_sync(~0u, both.first), all_to = __reduce_min_sync(~0u, both.last);
  }

  // From scores of keys [key, ...), counted like `first`, to weights. `finish_values` is for the weights before to be
  // used up; it is called halfway through the exponentials, which leave the processor time for other things.
  template <class FinishValues>
  __device__ void softmax(float (&s)[kScores], const Tile<C>& tile, int key, FinishValues finish_values) {
    if constexpr (C::kModified) {
      for_each_four(s, [&](int j, float(&four)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = key + j + column + i % 2;
          const auto& r = tile.of_row[row(i / 2)];
          four[i] = at < r.first || at >= r.last
                        ? -kInfinity
                        : finish_score(params.p.score, {tile.b, r.q_head, r.token, tile.key + at}, r.nearest,
                                       four[i] * params.inner);
        }
      });
    } else if (key < all_from || key + C::kKeys > all_to) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto& r = tile.of_row[row(h)];
        const int from = r.first - key - column, to = r.last - key - column;
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
          const int at = i / 2 * 8 + i % 2;
          float& score = s[i / 2 * 4 + 2 * h + i % 2];
          score = at < from || at >= to ? -kInfinity : score;
        }
      }
    }
    const float factor = params.outer;
    float neg_m[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = over_row(max_of_row(s, h), Max()) * factor;
      neg_m[h] = this->move_shift(h, top);
    }
    float sum[4] = {};
    const auto add = [&](int i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[n] += s[i + n];
    };
    const auto pack_four = [&](int i) {
#pragma unroll
      for (int n = i; n < i + 4; n += 2) weights[n / 2] = pack<typename C::Element>(s[n], s[n + 1]);
    };
    constexpr int kHalf = kScores / 2;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      if (i == kHalf) finish_values();
#pragma unroll
      for (int n = i; n < i + 4; ++n) s[n] = exp2_approx(fmaf(s[n], factor, neg_m[n / 2 % 2]));
      if (i > 0) add(i - 4);
      if (i >= kHalf) pack_four(i - kHalf);
      pin(sum);  // or the compiler does one kind of thing after the other
    }
    add(kScores - 4);
#pragma unroll
    for (int i = kScores - kHalf; i < kScores; i += 4) pack_four(i);
#pragma unroll
    for (int h = 0; h < 2; ++h) l[h] = fmaf(l[h], rescale[h], sum[2 * h] + sum[2 * h + 1]);
  }

  __device__ void rescale_values() {
    // Times exactly 1 in most blocks.
    if (!__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] *= rescale[i / 2 % 2];
  }

  // The split's partial results.
  __device__ void store_partials(const Tile<C>& tile) {
    const AttentionParams& p = params.p;
    const Head head(p, tile.b, tile.hk);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      l[h] = over_row(l[h], Sum());
      if (tile.of_row[row(h)].out < 0) continue;
      float* const to = params.partials.at(head, tile.row + row(h), tile.split);
#pragma unroll
      for (int i = 2 * h; i < kOut; i += 4)
        store_pair(to + column + 2 * (i - 2 * h), 1, static_cast<int>(p.dv) - column - 2 * (i - 2 * h), o[i], o[i + 1]);
      if (lane % 4 == 0) to[Partials::m_at(p)] = m[h] - C::kShift, to[Partials::m_at(p) + 1] = l[h];
    }
  }

  // Notes the fallback rows among the lane's two, from what it has of them before they are normalised. `suspect`: rows
  // that are to fall back whatever their numbers.
  __device__ void check(const Tile<C>& tile, float shift, const bool (&suspect)[2]) {
    float nan_or_0[2][2] = {};
#pragma unroll
    for (int i = 0; i < kOut; i += 2) {
      float& part = nan_or_0[i / 2 % 2][i / 4 % 2];
      part = fmaf(o[i], 0, fmaf(o[i + 1], 0, part));
    }
    bool falls_back[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = m[h] - shift;
      const bool trusted =
          nan_or_0[h][0] + nan_or_0[h][1] == 0 && l[h] * 0 == 0 && (top == -kInfinity || fabsf(top) < kHugeScore);
      falls_back[h] = tile.of_row[row(h)].out >= 0 && (suspect[h] || !trusted);
    }
    mark_fallback_rows(params, tile, warp_row, falls_back);
  }

  // Results of the tile. `q_row`: the warp's first row of its Q.
  __device__ void store(const Tile<C>& tile, std::uint32_t q_row) {
    if (C::kSplit && !params.unsplit) return store_partials(tile);
    const AttentionParams& p = params.p;
    bool suspect[2] = {};
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& r = tile.of_row[row(h)];
      l[h] = over_row(l[h], Sum());
      float lse;
      if constexpr (C::kSplit) {  // what attention_combine makes of the partial results of an only split, to the bit
        const Finish f = finish_row(m[h] - C::kShift, l[h], -kInfinity, r.alibi_shift);
        lse = f.lse, inverse[h] = f.sum == 0 ? 0.f : f.half / f.sum;  // half: 1 or, of what has no sink, NaN
      } else {
        if (p.score.sinks) {
          const float sink = exp2_approx(r.sink - shift_of(m[h]) + C::kShift);
          suspect[h] = r.first < r.last && sink > 0 && l[h] <= fmaf(sink, kMinKeyWeight<typename C::Element>, sink);
        }
        lse = lse_of(m[h] - C::kShift, l[h], r.alibi_shift);
        inverse[h] = l[h] == 0 ? 0.f : __fdividef(1, l[h]);
      }
      if (r.lse >= 0 && lane % 4 == 0) p.lse[r.lse] = lse;
    }
    check(tile, C::kSplit ? C::kShift : 0.f, suspect);
#pragma unroll
    for (int i = 0; i < kOut; ++i)  // sums of partial results begin with 0: none is -0
      o[i] = C::kSplit ? fmaf(o[i], inverse[i / 2 % 2], 0.f) : o[i] * inverse[i / 2 % 2];
    if (C::kStoresByTma && params.out_by_tma) store_rows_by_tma(params, &params.out, tile, warp_row, q_row, o);
    else store_rows(params, tile, warp_row, o);
  }
};

// A math warpgroup.
template <class C>
__device__ void attend(const WgmmaParams& params, const TileQueue& queue, const Tile<C>* tiles, const QueryRing<C>& q,
                       const Blocks<C>& k, const Blocks<C>& v, int group) {
  using T = typename C::Element;
  Rows<C> rows(params);
  unsigned t = 0, stored = 0;  // tiles so far, and of these with their results stored
  bool storing = false;        // those of tile `stored` may be on their way from its Q's place
  const auto has_blocks = [&] {
    queue.wait_full(t);
    return uniform(tiles[t % kQueueTiles].blocks) > 0;
  };
  bool more = has_blocks();
  if (!more) return;

  int block = 0;       // of the tile, whose scores these are
  bool starts = true;  // it is its tile's first, or there is no more; O is complete once the weights are used
  std::uint32_t q_matrix = 0;
  for (unsigned n = 0;; ++n) {  // K and V blocks so far; V's are one behind
    if (C::kStoresByTma && storing) {
      if (threadIdx.x % 32 == 0) tma_store_wait_read();
      q.release(stored++);
      storing = false;
    }
    if (starts && more) {
      q.wait_full(t);
      q_matrix = matrix_at(q.slot(t) + group * kGroupRows * 128);
    }
    if (more) k.wait_full(n);
    if (n > 0) v.wait_full(n - 1);

    // S = Q K^T of the next block, then O += P V of this one. The first and the last time one of them is for nothing.
    const std::uint32_t k_matrix = matrix_at(k.slot(n));
    const std::uint32_t v_matrix = matrix_at(v.slot(n - 1), C::kKeys * 128);
    float s[Rows<C>::kScores] = {};
    pin(s);
    pin(rows.o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kSize / 16; ++i)
      wgmma_abt<T>(s, q_matrix + i / 4 * (C::kRows * 8) + i % 4 * 2, k_matrix + i / 4 * (C::kKeys * 8) + i % 4 * 2,
                   i > 0);
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i) wgmma_ab<T>(rows.o, rows.weights + 4 * i, v_matrix + i * 128, 1);
    wgmma_commit();
    wgmma_wait<1>();
    pin(s);
    if (more) k.release(n);

    if (starts) {
      wgmma_wait<0>();
      pin(rows.o);
      if (n > 0) {
        v.release(n - 1);
        rows.store(tiles[(t - 1) % kQueueTiles],
                   q.slot(t - 1) + (group * kGroupRows + threadIdx.x / 32 % 4 * 16) * 128);
        storing = true;
        __syncwarp();
        queue.release(t - 1);
      }
      if (!more) {
        if (C::kStoresByTma) tma_store_wait_read();  // before shared memory is gone
        break;
      }
      const Tile<C>& tile = tiles[t % kQueueTiles];
      rows.begin(tile);
      block = uniform(tile.blocks);
      if (const int keys = uniform(tile.last_keys); C::kTma && keys < C::kKeys) {
        v.wait_full(n);
        zero_rows<C::kSize, C::kKeys>(v.slot(n), keys);
        named_sync(1 + group, 128);
      }
    }
    const Tile<C>& tile = tiles[t % kQueueTiles];
    const bool ends = --block == 0;
    if (ends) {
      if (!C::kStoresByTma) q.release(t);
      ++t;
      more = has_blocks();
    }
    if constexpr (C::kModified && C::kSize == 256) wgmma_wait<0>();  // the weights' registers are wanted
    rows.softmax(s, tile, block * C::kKeys, [&] {
      if (starts) return;
      wgmma_wait<0>();
      pin(rows.o);
      v.release(n - 1);
      rows.rescale_values();
    });
    starts = ends;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) wgmma(const __grid_constant__ WgmmaParams params) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[4 * C::kStages + 2 * kQueueTiles + 2 * C::kQueryTiles];
  __shared__ Tile<C> tiles[kQueueTiles];
  const std::uint32_t first = shared_address(barriers);
  std::uint32_t data = (shared_address(shared) + 1023) / 1024 * 1024;  // the swizzle's unit
  pin(data);
  const Blocks<C> k{first, data, C::kBlockBytes};
  const Blocks<C> v{first + 16 * C::kStages, k.data + C::kStages * C::kBlockBytes, C::kBlockBytes};
  const TileQueue queue{first + 32 * C::kStages};
  const QueryRing<C> q{queue.barriers + 16 * kQueueTiles, v.data + C::kStages * C::kBlockBytes, C::kRowsBytes};
  let_next_start();
  if (threadIdx.x == 0) {
    if (C::kTma) {
      if (params.q_by_tma) prefetch_map(&params.q);
      if (C::kStoresByTma && params.out_by_tma) prefetch_map(&params.out);
      prefetch_map(&params.k);
      prefetch_map(&params.v);
    }
    k.init(C::kTma ? 1 : 128, 4 * C::kGroups);
    v.init(C::kTma ? 1 : 128, 4 * C::kGroups);
    queue.init(C::kProducers, 4 * C::kGroups);
    q.init(params.q_by_tma ? 1 : C::kProducers, 4 * C::kGroups);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    if (C::kTradesRegisters) registers_decrease<C::kLoadRegisters>();
    if constexpr (!C::kTma) {
      load_by_threads<C>(params, queue, tiles, q, k, v);
    } else if (threadIdx.x == 0) {
      load_by_tma<C>(params, q, k, v);
    } else if (threadIdx.x >= 32) {
      TileProducer<C> producer{params, queue, tiles};
      for (unsigned i = 0; producer.push(i); ++i)
        if (!params.q_by_tma) load_q<C>(params, queue, tiles, q, i);
    }
  } else {
    if (C::kTradesRegisters) registers_increase<C::kMathRegisters>();
    attend<C>(params, queue, tiles, q, k, v, uniform(threadIdx.x / 128 - 1));
  }
}

template <class C>
cudaError_t launch(WgmmaParams& params, cudaStream_t stream) {
  const int blocks = plan_grid<C>(params, 2 * (params.p.d + params.p.dv));
  return launch_kernel(false, wgmma<C>, blocks, C::kThreads, C::kSharedBytes, stream, params);
}

// Warpgroups for the tiles of small heads, which have registers for three and shared memory for two blocks of one. No
// bit depends on it but through values that are not finite and hidden, which count for a tile: so it may depend on the
// sequences' sizes alone.
int groups_for(const AttentionParams& p) {
  constexpr std::int64_t kLong = 1280;
  if (!are_alike(p) || p.sk > kLong) return 3;
  const bool wide = p.score.right == kOpen && p.d > 48;
  return wide || p.sq * p.group <= kGroupRows ? 1 : 2;
}

template <class T, int kSize, bool kSplit>
cudaError_t launch(WgmmaParams& params, cudaStream_t stream) {
  const AttentionParams& p = params.p;
  constexpr int kGroups = kSplit ? 1 : 2;
  // Without a scale, masked scores would be -inf * 0.
  if (has_modifiers(p.score) || p.score.scale_log2 == 0)
    return launch<Config<T, kSize, false, true, kSplit, kGroups>>(params, stream);
  using Tma = Config<T, kSize, true, false, kSplit, kGroups>;
  if (!make_keys_map(params.k, p, p.k, p.k_stride, p.d, Tma::kKeys) ||
      !make_keys_map(params.v, p, p.v, p.v_stride, p.dv, Tma::kKeys))
    return launch<Config<T, kSize, false, false, kSplit, kGroups>>(params, stream);
  params.q_by_tma = p.score.scale_log2 >= 0 && make_rows_map(params.q, p, p.q_type, p.q, p.q_stride, p.d, kGroupRows);
  params.out_by_tma = p.total_q < 0 && p.out_type == p.q_type &&
                      make_rows_map(params.out, p, p.out_type, p.out, p.out_stride, p.dv, kGroupRows / 4);
  if constexpr (kSize == 64 && !kSplit) {
    // Small heads have registers for a third warpgroup.
    if (groups_for(p) == 3) return launch<Config<T, kSize, true, false, kSplit, 3>>(params, stream);
    if (groups_for(p) == 1) return launch<Config<T, kSize, true, false, kSplit, 1>>(params, stream);
  }
  return launch<Tma>(params, stream);
}

WgmmaParams params_of(const AttentionParams& p) {
  WgmmaParams params{};
  params.p = p;
  const float scale = std::fabs(p.score.scale_log2);
  const bool last = scales_last(p.score);
  params.inner = last ? 1 : scale, params.outer = last ? scale : 1;
  params.q_vector = p.score.scale_log2 >= 0 && is_vector(p.q, p.q_stride, 2);
  params.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  params.out_vector = is_vector(p.out, p.out_stride, p.out_type == DType::f32 ? 4 : 2);
  return params;
}

}  // namespace

bool wgmma_can_count(const AttentionParams& p) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;  // of what is counted in 32 bits
  return std::max(p.sk, p.total_k) < kLimit && std::max(p.sq, p.total_q) < kLimit / at_least_1(p.group) &&
         simt_tiles(p) < kLimit && p.b < kLimit && p.hk < kLimit;
}

std::size_t wgmma_workspace(const AttentionParams& p) {
  return fallback_bytes(p);
}

cudaError_t attention_wgmma(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  WgmmaParams params = params_of(p);
  params.fallback_rows = reinterpret_cast<std::uint16_t*>(workspace);
  return launch_with_fallback(params, stream, [&] {
    return with_head_size(p, [&](auto size) {
      return p.q_type == DType::f16 ? launch<__half, size, false>(params, stream)
                                    : launch<__nv_bfloat16, size, false>(params, stream);
    });
  });
}

cudaError_t attention_wgmma_split(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  WgmmaParams params = params_of(p);
  params.partials = partials_of(p, workspace);
  params.unsplit = params.partials.splits == 1 && !p.score.sinks;
  if (params.unsplit) params.fallback_rows = reinterpret_cast<std::uint16_t*>(workspace);
  const cudaError_t status = with_head_size(p, [&](auto size) {
    return p.q_type == DType::f16 ? launch<__half, size, true>(params, stream)
                                  : launch<__nv_bfloat16, size, true>(params, stream);
  });
  if (status != cudaSuccess) return status;
  if (params.unsplit) return attention_recompute(p, reinterpret_cast<const std::uint64_t*>(workspace), stream);
  return attention_combine(p, params.partials, stream);
}

}  // namespace rapt::cuda
