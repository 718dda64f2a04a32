// attention_prefill: out = softmax(q k^T) v of 16-bit types on Hopper's tensor cores, by FlashAttention-3's schedule.
//
// Launched by attention_prefill.cu and attention_decode_m64.cu. Thread blocks are persistent: one or two on a
// multiprocessor go through tiles of query rows. A block's first warpgroup (the producer) loads Q tiles and blocks of K
// and V into rings in shared memory. Each of the other warpgroups does 64 rows of the tile: S = Q K^T of one key block
// runs on the tensor cores while the softmax of the previous block feeds O += P V. (Ping-pong between warpgroups was up
// to 5 % slower on an H200.) Results leave through the place of the tile's Q, while the next tile is at work.
//
// Key blocks begin at multiples of block_k from key 0 and are taken from the last to the first. A block that is masked
// for a row leaves the row's state unchanged to the bit, so a row's result does not depend on the other rows of its
// tile.
//
// Masked weights are 0, but 0 times NaN is NaN: a result that is not finite may come from a hidden value. Such rows are
// fallback rows, which their warp recomputes when all tiles are done.
#pragma once

#include <cmath>

#include "cuda/hopper/combine_row.cuh"
#include "cuda/kernels/kernels.hpp"
#include "cuda/kernels/prefill_dense.cuh"
#include "cuda/kernels/prefill_load.cuh"
#include "cuda/kernels/prefill_load_codes.cuh"
#include "cuda/kernels/prefill_softmax.cuh"
#include "cuda/kernels/prefill_unspecialized.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

// The tiles of the thread block, as math warpgroups see them: in a queue that the producer fills.
template <class C>
struct QueuedTiles {
  const PrefillParams& params;
  const SequenceList& list;
  const TileQueue& queue;
  const Tile<C>* tiles;

  __device__ const Tile<C>& operator[](unsigned t) const { return tiles[t % kQueueTiles]; }
  __device__ bool exists(unsigned t) const {
    queue.wait_full(t);
    return uniform((*this)[t].blocks) > 0;
  }
  __device__ void done(unsigned t) const { queue.release(t); }
  __device__ void wait_stored() const {
    if (C::kStoresByTma) tma_store_wait();
  }
  __device__ int last_keys(unsigned t) const { return uniform((*this)[t].last_keys); }
  __device__ void recompute_fallback_rows(unsigned fallback_tiles) const {
    cuda::recompute_fallback_rows<C>(params, list, fallback_tiles);
  }
};

// A math warpgroup: all tiles of its thread block.
template <class C, class Tiles>
__device__ void attend(const PrefillParams& params, const Tiles& tiles, const QueryRing<C>& q, const Blocks<C>& k,
                       const Blocks<C>& v, std::uint32_t scales, int group) {
  OnlineSoftmax<C> rows(params);
  unsigned t = 0, stored = 0;   // tiles begun; tiles whose results have been stored
  unsigned fallback_tiles = 0;  // bit t % 32: tile t has fallback rows
  bool storing = false;         // TMA may still read results of tile `stored` from its Q's place
  bool has_tile = tiles.exists(t);
  if (!has_tile) return;
  q.wait_full(t);
  // Delays one of two warpgroups, so that one multiplies while the other exponentiates.
  if (C::kGroups == 2 && group == 1 && tiles[t].blocks > 1) __nanosleep(1000);

  int block = 0;            // the tile's key block whose scores are in s
  bool first_block = true;  // s is of the tile's first block, or of none; O of the tile before is complete then
  std::uint32_t q_matrix = 0;
  for (unsigned n = 0;; ++n) {  // counts K blocks; V blocks are one behind
    if (C::kStoresByTma && storing) {
      if (threadIdx.x % 32 == 0) tma_store_wait_read();
      q.release(stored++);
      storing = false;
    }
    if (first_block && has_tile) {
      q.wait_full(t);
      q_matrix = matrix_at(q.slot(t) + group * kGroupRows * C::kRowBytes);
    }
    if (has_tile) k.wait_full(n);

    // S = Q K^T of the next block, then O += P V of this one. In the first pass P is 0, and in the last S is not used.
    const std::uint32_t k_matrix = matrix_at(k.slot(n));
    const std::uint32_t v_matrix = matrix_at(v.slot(n - 1), C::kKeys * C::kRowBytes);
    float s[OnlineSoftmax<C>::kScores] = {};
    pin(s);
    pin(rows.o);
    wgmma_fence();
    multiply_keys<C>(s, q_matrix, k_matrix);
    if (n > 0) v.wait_full(n - 1);
    wgmma_fence();  // without it ptxas inserts one and warns
    multiply_values<C>(rows.o, rows.weights, v_matrix);
    wgmma_wait<1>();
    pin(s);
    if (has_tile) k.release(n);

    if (first_block) {
      // While the last products run. (Not with a queue of tiles: ptxas then makes row sums wait for the products, too.)
      if (C::kDense && n > 0) rows.finish(tiles[t - 1]);
      wgmma_wait<0>();
      pin(rows.o);
      if (n > 0) {
        v.release(n - 1);
        if (!C::kDense) rows.finish(tiles[t - 1]);
        if (rows.store(tiles[t - 1], q.slot(t - 1) + (group * kGroupRows + threadIdx.x / 32 % 4 * 16) * C::kRowBytes))
          fallback_tiles |= 1u << (t - 1) % 32;
        storing = true;
        __syncwarp();
        tiles.done(t - 1);
      }
      if (!has_tile) {
        if (C::kStoresByTma) tma_store_wait_read();  // TMA reads shared memory until then
        break;
      }
      rows.begin(tiles[t]);
      block = uniform(tiles[t].blocks);
      if (const int keys = tiles.last_keys(t); C::kTma && keys < C::kKeys) {
        v.wait_full(n);
        zero_rows<C::kSize, C::kKeys, C::kPanel>(v.slot(n), keys);
        named_sync(1 + group, 128);
      }
    }
    const auto& tile = tiles[t];
    const bool last_block = --block == 0;
    if (last_block) {
      if (!C::kStoresByTma && !C::kStoresByProducer) q.release(t);
      ++t;
      has_tile = tiles.exists(t);
    }
    if constexpr (C::kModified && C::kSize == 256) wgmma_wait<0>();  // the modifiers need the registers of the weights
    rows.softmax(s, tile, block * C::kKeys, scales + n % C::kScaleBlocks * C::kScaleBytes, [&] {
      if (first_block) return;
      wgmma_wait<0>();
      pin(rows.o);
      v.release(n - 1);
      rows.rescale_values();
    });
    first_block = last_block;
  }
  if (fallback_tiles == 0) return;
  tiles.wait_stored();
  __syncwarp();
  tiles.recompute_fallback_rows(fallback_tiles);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerMultiprocessor)
    attention_prefill(const __grid_constant__ PrefillParams params) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[4 * C::kStages + 2 * kQueueTiles + 2 * C::kQueryTiles];
  __shared__ Tile<C> tiles[kQueueTiles];
  auto& list = *reinterpret_cast<SequenceList*>(shared + C::kSharedBytes);
  const std::uint32_t first = shared_address(barriers);
  std::uint32_t data = (shared_address(shared) + 1023) / 1024 * 1024;  // the swizzle's unit
  pin(data);
  const Blocks<C> k{first, data, C::kBlockBytes};
  const Blocks<C> v{first + 16 * C::kStages, k.data + C::kStages * C::kBlockBytes, C::kBlockBytes};
  const TileQueue queue{first + 32 * C::kStages};
  const QueryRing<C> q{queue.barriers + 16 * kQueueTiles, v.data + C::kStages * C::kBlockBytes, C::kRowsBytes};
  if (C::kSplit || params.p.total_q >= 0) launch_dependent_grids();
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
  if (params.has_list) list.fill<C>(params);
  else __syncthreads();
  const TileScheduler<C> scheduler{params, list};
  if (threadIdx.x < 128) {
    if (C::kTradesRegisters) registers_decrease<C::kLoadRegisters>();
    if constexpr (C::kQuantized) {
      load_codes<C>(params, {params, queue, tiles, scheduler}, queue, tiles, q, k, v, data + C::kScalesAt);
    } else if constexpr (!C::kTma) {
      load_by_threads<C>(params, {params, queue, tiles, scheduler}, queue, tiles, q, k, v);
    } else if (threadIdx.x < 32) {
      if (params.p.page_size > 0) load_by_tma<C, true>(params, scheduler, q, k, v);
      else if (threadIdx.x == 0) load_by_tma<C, false>(params, scheduler, q, k, v);
    } else {
      TileProducer<C> producer{params, queue, tiles, scheduler};
      for (unsigned i = 0; producer.push(i); ++i)
        if (!params.q_by_tma) load_q<C>(params, queue, tiles, q, i);
    }
  } else {
    if (C::kTradesRegisters) registers_increase<C::kMathRegisters>();
    attend<C>(params, QueuedTiles<C>{params, list, queue, tiles}, q, k, v, data + C::kScalesAt,
              uniform(threadIdx.x / 128 - 1));
  }
  if constexpr (C::kSplit) {
    if (params.combines_in_cluster) {
      __syncwarp();
      cluster_sync();
      if (threadIdx.x >= 128) {
        const unsigned number = params.splits.quotient(blockIdx.x), b = params.hk.quotient(number);
        const Head head(params.p, params.partials.first + b, number - b * static_cast<unsigned>(params.p.hk));
        const int warp = threadIdx.x / 32 - 4;
        combine_in_cluster<typename C::Element, C::kSize>(params.p, params.partials, head,
                                                          SplitKeys(head, params.partials.rule).count, warp);
      }
    }
    if (params.overlap_previous)
      wait_on_dependent_grids();  // so that a grid that depends on this one also depends on that one
  }
}

// attention_prefill_dense: the same for sequences of equal lengths, whose results a thread of the producer stores.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerMultiprocessor)
    attention_prefill_dense(const __grid_constant__ PrefillParams params) {
  extern __shared__ __align__(1024) std::uint8_t memory[];  // the swizzle's unit
  auto& shared = *reinterpret_cast<DenseShared<C>*>(memory);
  const DenseRings<C> rings(shared);
  if (threadIdx.x == 0) rings.init(params);
  __syncthreads();
  if (threadIdx.x < 128) {
    if (C::kTradesRegisters) registers_decrease<C::kLoadRegisters>();
    if (threadIdx.x == 0) load_dense<C>(params, shared.tiles, rings);
    if (threadIdx.x == 32) store_dense<C>(params, shared.tiles, rings);
  } else {
    if (C::kTradesRegisters) registers_increase<C::kMathRegisters>();
    attend<C>(params, DenseTiles<C>{params, shared.tiles, rings}, rings.q, rings.k, rings.v, 0,
              uniform(threadIdx.x / 128 - 1));
  }
}

// A launch's parameters, except tensor maps and what quantized keys need.
inline PrefillParams params_of(const AttentionParams& p) {
  PrefillParams params{};
  params.p = p;
  const float scale = std::fabs(p.score.scale_log2);
  const bool last = scales_last(p.score);
  params.inner = last ? 1 : scale, params.outer = last ? scale : 1;
  params.q_vector = p.score.scale_log2 >= 0 && is_vector(p.q, p.q_stride, 2);
  params.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  const auto in_pairs = [&](const void* data, const Strides& s, std::int64_t size) {
    return s.d == 1 && (s.b | s.h | s.s) % 2 == 0 && reinterpret_cast<std::uintptr_t>(data) % (2 * size) == 0;
  };
  params.mask_pairs = in_pairs(p.score.mask, p.score.mask_stride, 1);
  params.bias_pairs = in_pairs(p.score.bias, p.score.bias_stride, p.score.bias_type == DType::f32 ? 4 : 2);
  params.out_vector = is_vector(p.out, p.out_stride, p.out_type == DType::f32 ? 4 : 2);
  params.page_size = Divisor(p.page_size);
  return params;
}

// Launches the kernel whose thread blocks go through queues of tiles.
template <class C>
cudaError_t launch_queued(PrefillParams& params, cudaStream_t stream) {
  const int blocks = plan_grid<C>(params, 2 * (params.p.d + params.p.dv));
  const int splits = C::kSplit ? params.partials.splits : 1;
  params.writes_output = C::kSplit && writes_output_directly(params.p, params.partials);
  // Only where all clusters fit at once: a cluster starts when all of its thread blocks have room.
  params.combines_in_cluster = C::kSplit && params.p.total_q < 0 && !params.writes_output &&
                               splits <= kMaxCombineCluster && 2 * params.total_tiles <= multiprocessors();
  return launch_clusters(params.combines_in_cluster ? splits : 1, params.overlap_previous, attention_prefill<C>, blocks,
                         C::kThreads, C::kSharedBytes + SequenceList::bytes(params), stream, params);
}

// Describes a call's rows to TMA. False: TMA cannot load its K and V.
template <class C>
bool make_maps(PrefillParams& params) {
  const AttentionParams& p = params.p;
  params.q_by_tma = params.out_by_tma = false;
  params.box = box_keys(p, C::kKeys);
  if (!make_keys_map(params.k, p, p.k, p.k_stride, p.d, params.box, C::kPanel) ||
      !make_keys_map(params.v, p, p.v, p.v_stride, p.dv, params.box, C::kPanel))
    return false;
  params.q_by_tma =
      p.score.scale_log2 >= 0 && make_rows_map(params.q, p, p.q_type, p.q, p.q_stride, p.d, kGroupRows, C::kPanel);
  params.out_by_tma = p.total_q < 0 && p.out_type == p.q_type &&
                      make_rows_map(params.out, p, p.out_type, p.out, p.out_stride, p.dv,
                                    C::kStoresByProducer ? kGroupRows : kGroupRows / 4, C::kPanel);
  return true;
}

// A kernel for scores with modifiers: of attention_prefill_modified.cu.
cudaError_t launch_prefill_modified(PrefillParams& params, const PrefillConfig& config, cudaStream_t stream);

// Launches a kernel; or, where TMA cannot describe the call's rows, one that does without.
template <PrefillConfig kConfig>
cudaError_t launch_prefill(PrefillParams& params, cudaStream_t stream) {
  using C = Prefill<kConfig>;
  if constexpr (kConfig.dense) {
    if (!make_maps<C>(params) || !params.q_by_tma || !params.out_by_tma)
      return launch_prefill<without_dense(kConfig)>(params, stream);
    const int blocks = plan_grid<C>(params, 2 * (params.p.d + params.p.dv));
    const auto kernel = [] {
      if constexpr (kConfig.warp_specialized) return attention_prefill_dense<C>;
      else return attention_prefill_unspecialized<C>;
    }();
    return launch_kernel(false, kernel, blocks, C::kThreads, sizeof(DenseShared<C>), stream, params);
  } else if constexpr (kConfig.tma) {
    return make_maps<C>(params) ? launch_queued<C>(params, stream)
                                : launch_prefill<without_tma(kConfig)>(params, stream);
  } else {
    return launch_queued<C>(params, stream);
  }
}

}  // namespace rapt::cuda
