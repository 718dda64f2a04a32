// Attention of 16-bit types on Hopper's tensor cores: FlashAttention-3's schedule. A block or two per multiprocessor
// go through tiles of query rows; a block's first warpgroup fills rings of Q tiles and of K and V blocks in shared
// memory, and each of the others does 64 rows of the tile. S = Q K^T of one key block runs while the softmax of the
// block before feeds O += P V. (Warpgroups taking turns, at products or at exponentials, were up to 5 % slower on an
// H200.) Results leave by way of their Q's place, while the next tile is at work.
//
// Keys are cut into blocks at multiples of the block size from key 0 and taken from the last to the first. A block that
// is masked for a row leaves what the row has unchanged to the bit, so that a row's result is its own.
//
// Masked weights are 0, but 0 times NaN is NaN: results that are not finite are not trusted. Such rows are fallback
// rows, which their warp computes once more in the end.
#include <cuda_runtime.h>

#include <cmath>

#include "cuda/hopper/combine_row.cuh"
#include "cuda/hopper/host.cuh"
#include "cuda/kernels/wgmma_codes.cuh"
#include "cuda/kernels/wgmma_load.cuh"
#include "cuda/kernels/wgmma_rows.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

// A math warpgroup.
template <class C>
__device__ void attend(const WgmmaParams& params, const SequenceList& list, const TileQueue& queue,
                       const Tile<C>* tiles, const QueryRing<C>& q, const Blocks<C>& k, const Blocks<C>& v,
                       std::uint32_t scales, int group) {
  using T = typename C::Element;
  constexpr int kSteps = C::kPanel / 16;  // of products, in a panel of Q and K
  Rows<C> rows(params);
  unsigned t = 0, stored = 0;  // tiles so far, and of these with their results stored
  unsigned bad_tiles = 0;      // with fallback rows
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
      q_matrix = matrix_at(q.slot(t) + group * kGroupRows * C::kRowBytes);
    }
    if (more) k.wait_full(n);
    if (n > 0) v.wait_full(n - 1);

    // S = Q K^T of the next block, then O += P V of this one. The first and the last time one of them is for nothing.
    const std::uint32_t k_matrix = matrix_at(k.slot(n));
    const std::uint32_t v_matrix = matrix_at(v.slot(n - 1), C::kKeys * C::kRowBytes);
    float s[Rows<C>::kScores] = {};
    pin(s);
    pin(rows.o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kColumns / 16; ++i) {
      const int panel = i / kSteps * (C::kRowBytes / 16), step = i % kSteps * 2;
      wgmma_abt<T, C::kRowBytes>(s, q_matrix + panel * C::kRows + step, k_matrix + panel * C::kKeys + step, i > 0);
    }
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i)
      wgmma_ab<T, C::kRowBytes>(rows.o, rows.weights + 4 * i, v_matrix + i * C::kRowBytes, 1);
    wgmma_commit();
    wgmma_wait<1>();
    pin(s);
    if (more) k.release(n);

    if (starts) {
      wgmma_wait<0>();
      pin(rows.o);
      if (n > 0) {
        v.release(n - 1);
        if (rows.store(tiles[(t - 1) % kQueueTiles],
                       q.slot(t - 1) + (group * kGroupRows + threadIdx.x / 32 % 4 * 16) * C::kRowBytes))
          bad_tiles |= 1u << (t - 1) % 32;
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
        zero_rows<C::kSize, C::kKeys, C::kPanel>(v.slot(n), keys);
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
    rows.softmax(s, tile, block * C::kKeys, scales + n % C::kScaleBlocks * C::kScaleBytes, [&] {
      if (starts) return;
      wgmma_wait<0>();
      pin(rows.o);
      v.release(n - 1);
      rows.rescale_values();
    });
    starts = ends;
  }
  if (bad_tiles == 0) return;
  if (C::kStoresByTma) tma_store_wait();
  __syncwarp();
  redo_fallback_rows<C>(params, list, bad_tiles);
}

// What attention_combine does, to the bit, for the rows of a sequence and kv head whose splits the cluster has: a row
// to a math warp. In memory where Q and keys were.
template <class C>
__device__ void combine_in_cluster(const WgmmaParams& params, std::uint8_t* shared) {
  using Sums = RowSums<C::kSize, 1>;
  const AttentionParams& p = params.p;
  const int splits = params.partials.splits, warp = threadIdx.x / 32 - 4;
  const unsigned number = params.splits.quotient(blockIdx.x), b = params.hk.quotient(number);
  const Head head(p, params.partials.first + b, number - b * static_cast<unsigned>(p.hk));
  const int rows = split_rows(head);
  unsigned bad = 0;  // of the warp's rows
  int first = static_cast<int>(cluster_rank()) * 4 + warp;
#pragma unroll 1
  for (int i = 0, row = first; row < rows; ++i, row += 4 * splits)
    if (!combine_row(p, params.partials, head, row, reinterpret_cast<Sums*>(shared)[warp])) bad |= 1u << i;
#pragma unroll 1
  for (; bad != 0; bad >>= 1, first += 4 * splits)
    if (bad & 1)
      attend_rows<typename C::Element, C::kSize, true>(p, static_cast<int>(head.b), static_cast<int>(head.hk), first,
                                                       1);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) wgmma(const __grid_constant__ WgmmaParams params) {
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
  if (C::kSplit || params.p.total_q >= 0) let_next_start();
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
  if (params.listed) list.fill<C>(params);
  else __syncthreads();
  const TileScheduler<C> scheduler{params, list};
  if (threadIdx.x < 128) {
    if (C::kTradesRegisters) registers_decrease<C::kLoadRegisters>();
    if constexpr (C::kQuantised) {
      load_codes<C>(params, {params, queue, tiles, scheduler}, queue, tiles, q, k, v, data + C::kScalesAt);
    } else if constexpr (!C::kTma) {
      load_by_threads<C>(params, {params, queue, tiles, scheduler}, queue, tiles, q, k, v);
    } else if (threadIdx.x == 0) {
      load_by_tma<C>(params, scheduler, q, k, v);
    } else if (threadIdx.x >= 32) {
      TileProducer<C> producer{params, queue, tiles, scheduler};
      for (unsigned i = 0; producer.push(i); ++i)
        if (!params.q_by_tma) load_q<C>(params, queue, tiles, q, i);
    }
  } else {
    if (C::kTradesRegisters) registers_increase<C::kMathRegisters>();
    attend<C>(params, list, queue, tiles, q, k, v, data + C::kScalesAt, uniform(threadIdx.x / 128 - 1));
  }
  if constexpr (C::kSplit) {
    if (params.combines) {
      __syncwarp();
      cluster_sync();
      if (threadIdx.x >= 128) combine_in_cluster<C>(params, shared + (data - shared_address(shared)));
    }
    if (params.early) wait_for_previous();  // whoever waits for this one, waits for that as well
  }
}

template <class C>
cudaError_t launch(WgmmaParams& params, cudaStream_t stream) {
  const int blocks = plan_grid<C>(params, 2 * (params.p.d + params.p.dv));
  const int splits = C::kSplit ? params.partials.splits : 1;
  params.unsplit = C::kSplit && finishes_at_once(params.p, params.partials);
  // Only where clusters have room beside each other: others wait until all of their thread blocks do.
  params.combines = C::kSplit && !params.unsplit && splits <= kCombineWarps && 2 * params.all <= multiprocessors();
  return launch_clusters(params.combines ? splits : 1, params.early, wgmma<C>, blocks, C::kThreads,
                         C::kSharedBytes + SequenceList::bytes(params), stream, params);
}

// Of scores that need no more than a scale: by TMA if it can load K and V, else in the form `Other`.
template <class C, class Other>
cudaError_t launch_plain(WgmmaParams& params, cudaStream_t stream) {
  const AttentionParams& p = params.p;
  if (!make_keys_map(params.k, p, p.k, p.k_stride, p.d, C::kKeys, C::kPanel) ||
      !make_keys_map(params.v, p, p.v, p.v_stride, p.dv, C::kKeys, C::kPanel))
    return launch<Other>(params, stream);
  params.q_by_tma =
      p.score.scale_log2 >= 0 && make_rows_map(params.q, p, p.q_type, p.q, p.q_stride, p.d, kGroupRows, C::kPanel);
  params.out_by_tma = p.total_q < 0 && p.out_type == p.q_type &&
                      make_rows_map(params.out, p, p.out_type, p.out, p.out_stride, p.dv, kGroupRows / 4, C::kPanel);
  return launch<C>(params, stream);
}

// What follows chooses tiles and blocks of keys. No bit depends on the number of warpgroups but through values that are
// not finite and hidden, which count for a tile: so it may depend on the sequences' sizes alone. Bits do depend on the
// blocks of keys, but for sequences of one block: these depend on the head size, the mask's right end and whether
// scores have modifiers alone, for rows to have the same bits in every layout.

constexpr std::int64_t kLong = 1280;

// Warpgroups for the tiles of heads of up to 64 columns, which have registers for three and shared memory for two
// blocks of one.
int groups_for(const AttentionParams& p) {
  const std::int64_t rows = p.sq * p.group;
  if (!are_alike(p) || p.sk > kLong) return 3;
  if (rows <= kGroupRows) return 1;
  if (p.score.right != kOpen) return 2;
  return std::max(p.d, p.dv) > 48 ? 1
         : rows > kLong           ? 3
                                  : 2;  // narrow heads of many rows: the more share K and V, the better
}

// The same for those of 65 to 80: one where the last of three would have little to do, or tiles share no keys.
bool has_short_tiles(const AttentionParams& p, int keys_of_block) {
  return are_alike(p) && (p.sq * p.group <= 5 * kGroupRows || p.sk <= keys_of_block);
}

template <class T, class Other>
cudaError_t launch_up_to_64(WgmmaParams& params, cudaStream_t stream) {
  constexpr int kFewKeys = 80;  // as many as a caption has in image models, and some
  const AttentionParams& p = params.p;
  const int groups = groups_for(p);
  const bool few_keys = are_alike(p) && p.sk <= kFewKeys;
  if (std::max(p.d, p.dv) <= 48 && groups > 1) {
    if (groups == 2) return launch_plain<Config<T, 64, true, false, false, 2, 48>, Other>(params, stream);
    return few_keys ? launch_plain<Config<T, 64, true, false, false, 4, 48, kFewKeys>, Other>(params, stream)
                    : launch_plain<Config<T, 64, true, false, false, 3, 48>, Other>(params, stream);
  }
  if (groups == 3) return launch_plain<Config<T, 64, true, false, false, 3>, Other>(params, stream);
  if (groups == 2) return launch_plain<Config<T, 64, true, false, false, 2>, Other>(params, stream);
  return few_keys ? launch_plain<Config<T, 64, true, false, false, 1, 64, kFewKeys>, Other>(params, stream)
                  : launch_plain<Config<T, 64, true, false, false, 1>, Other>(params, stream);
}

template <class T, class Other>
cudaError_t launch_up_to_128(WgmmaParams& params, cudaStream_t stream) {
  const AttentionParams& p = params.p;
  const std::int64_t columns = std::max(p.d, p.dv);
  if (columns <= 80 && p.score.right == kOpen) {
    using Threads = Config<T, 128, false, false, false, 2, 128, 96>;
    return has_short_tiles(p, 96) ? launch_plain<Config<T, 96, true, false, false, 1, 80, 96>, Threads>(params, stream)
                                  : launch_plain<Config<T, 96, true, false, false, 3, 80, 96>, Threads>(params, stream);
  }
  // Half a panel's row at a time is only faster where rows are whole sectors of L2.
  if (columns <= 96 && p.d % 16 == 0 && p.dv % 16 == 0)
    return columns <= 80 ? launch_plain<Config<T, 96, true, false, false, 2, 80>, Other>(params, stream)
                         : launch_plain<Config<T, 96, true, false, false, 2, 96>, Other>(params, stream);
  return launch_plain<Config<T, 128, true, false, false, 2>, Other>(params, stream);
}

template <class T, int kSize, bool kSplit>
cudaError_t launch(WgmmaParams& params, cudaStream_t stream) {
  constexpr int kGroups = kSplit ? 1 : 2;
  // Without a scale, masked scores would be -inf * 0.
  const bool modified = has_modifiers(params.p.score) || params.p.score.scale_log2 == 0;
  if constexpr (!kSplit) {
    constexpr int kKeys = kSize > 128 ? 64 : 128;
    if ((only(params.p.kv_type) & kFloatTypes) == 0)
      return modified ? launch<Config<T, kSize, false, true, false, kGroups, kSize, kKeys, true>>(params, stream)
                      : launch<Config<T, kSize, false, false, false, kGroups, kSize, kKeys, true>>(params, stream);
  }
  if (modified) return launch<Config<T, kSize, false, true, kSplit, kGroups>>(params, stream);
  using Other = Config<T, kSize, false, false, kSplit, kGroups>;
  if constexpr (kSize == 64 && !kSplit) return launch_up_to_64<T, Other>(params, stream);
  else if constexpr (kSize == 128 && !kSplit) return launch_up_to_128<T, Other>(params, stream);
  else return launch_plain<Config<T, kSize, true, false, kSplit, kGroups>, Other>(params, stream);
}

// Whether rows of codes are whole times 16 bytes, and 32 bits count these.
bool codes_come_in_sixteens(const AttentionParams& p, const void* data, const Strides& s, std::int64_t size) {
  const std::int64_t entries = p.page_size > 0 && !p.ring ? p.page_count : p.b;
  const std::int64_t rows = p.page_size > 0 ? p.page_size : std::max(p.sk, p.total_k);
  return is_vector(data, s, 1) && (p.kv_type == DType::i4x2 ? size / 2 : size) % 16 == 0 &&
         entries * s.b + p.hk * s.h + rows * s.s < std::int64_t{15} << 32;
}

WgmmaParams params_of(const AttentionParams& p) {
  WgmmaParams params{};
  params.p = p;
  const float scale = std::fabs(p.score.scale_log2);
  const bool last = scales_last(p.score);
  params.inner = last ? 1 : scale, params.outer = last ? scale : 1;
  params.q_vector = p.score.scale_log2 >= 0 && is_vector(p.q, p.q_stride, 2);
  if ((only(p.kv_type) & kFloatTypes) != 0) {
    params.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  } else {
    params.kv_vector =
        codes_come_in_sixteens(p, p.k, p.k_stride, p.d) && codes_come_in_sixteens(p, p.v, p.v_stride, p.dv);
    params.page_size = Divisor(p.page_size);
    params.code_offset = p.kv_type == DType::i8 ? Codes<DType::i8>::kOffset : Codes<DType::i4x2>::kOffset;
  }
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
  return p.total_q < 0 ? 0 : decode_workspace(p);
}

// Of ragged sequences, those that have few rows get their keys split, as they do where they are dense; two launches,
// each of which leaves out what the other does, side by side.
cudaError_t attention_wgmma(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  WgmmaParams params = params_of(p);
  const cudaError_t status = with_head_size(p, [&](auto size) {
    return p.q_type == DType::f16 ? launch<__half, size, false>(params, stream)
                                  : launch<__nv_bfloat16, size, false>(params, stream);
  });
  if (status != cudaSuccess || p.total_q < 0) return status;
  const bool quantised = (only(p.kv_type) & kFloatTypes) == 0;
  return (quantised ? attention_decode_quantised : attention_wgmma_split)(p, workspace, stream);
}

cudaError_t attention_wgmma_split(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  WgmmaParams params = params_of(p);
  return for_each_part(p, partials_of(p, workspace), [&](const Partials& partials) {
    params.partials = partials;
    params.early = p.total_q >= 0 && partials.first == 0;  // the other parts use the same workspace
    const cudaError_t status = with_head_size(p, [&](auto size) {
      return p.q_type == DType::f16 ? launch<__half, size, true>(params, stream)
                                    : launch<__nv_bfloat16, size, true>(params, stream);
    });
    if (status != cudaSuccess || params.unsplit || params.combines) return status;
    return attention_combine(p, partials, stream);
  });
}

}  // namespace rapt::cuda
