// attention_latent: out = softmax(q k^T) v for heads too wide for attention_prefill, made for latent attention (MLA):
// keys of up to 576 columns, whose first columns, up to 512, may be their values; rows are the many query heads that
// share them. On Hopper's tensor cores, by FlashMLA's schedule.
//
// The entries attention_latent.bf16 and .f16 call it. It does 2 b hq sq sk (d + dv) flops, and reads keys once for each
// 64 rows.
//
// A thread block does 64 rows. Its two math warpgroups have the left and the right half of O's columns, as no warpgroup
// has registers for both. Blocks of 64 keys, of which shared memory holds two, belong to the warpgroups in turn. A
// block's warpgroup computes
//   S = Q K^T,  row_max = max(row_max, max S),  P = 2^(S - row_max),
// and hands P and row_max to the other through shared memory; then each adds P V in its own columns. While one computes
// its softmax, the other multiplies. The first warpgroup, the producer, fills the two places with keys, half of their
// columns as soon as the half before has been used. Values that are not columns of keys take turns with keys.
//
// A sequence's keys are split among the thread blocks of a cluster, which merge their results through shared memory;
// long sequences among several clusters, whose results attention_combine merges. The split depends only on the
// sequence's keys, rows and kv heads. A key block that is masked for a row leaves the row's state unchanged to the bit.
//
// Rows whose results are not finite, or whose scores are huge, are fallback rows: they are recomputed key by key.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/hopper/tma.cuh"
#include "cuda/kernels/latent_load.cuh"
#include "cuda/kernels/latent_merge.cuh"
#include "cuda/kernels/latent_softmax.cuh"
#include "cuda/kernels/latent_store.cuh"
#include "cuda/kernels/split_launches.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

// kByTma: TMA loads keys and values; else threads do.
template <class T, bool kByTma>
__global__ void __launch_bounds__(kThreads, 1) attention_latent(const __grid_constant__ LatentParams params) {
  extern __shared__ std::uint8_t dynamic[];
  __shared__ LatentShared shared;
  launch_dependent_grids();
  // The last rows first: in causal calls they see the most keys.
  const unsigned rank = cluster_rank(), cluster = params.grid.blocks - 1 - params.cluster_size.quotient(blockIdx.x);
  const SplitBlock block(params.p, params.partials, params.grid, kRows, cluster);
  if (!block.exists) return;
  const LatentShare share(block, static_cast<int>(params.cluster_size.by), static_cast<int>(rank));
  if (static_cast<int>(rank) >= share.sharers) return;

  const std::uint32_t q = (shared_address(dynamic) + 1023) / 1024 * 1024;  // the swizzle's unit
  const LatentRing<kByTma> ring{shared_address(shared.barriers), q + kBlockBytes};
  if (threadIdx.x == 0) {
    constexpr int kLoaders = kByTma ? 1 : 128;
    for (int n = 0; n < 2; ++n) {
      for (int part = 0; part < kParts; ++part) barrier_init(ring.full(n, part), kLoaders);
      // Each warpgroup frees its half of the values. Keys that are not values have a place of their own, which both
      // free.
      for (int half = 0; half < 2; ++half) barrier_init(ring.empty(n, half), params.separate_values && n == 0 ? 8 : 4);
    }
    barrier_init(ring.q_full(), params.q_by_tma ? 1 : kMathThreads);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_decrease<kLoadRegisters>();
    if (params.q_by_tma && threadIdx.x == 0) load_q_by_tma(params, block, q, ring.q_full());
    if constexpr (!kByTma) load_by_threads(params, block, share, ring);
    else if (threadIdx.x < 32) load_by_tma(params, block, share, ring);
    return;
  }
  registers_increase<kMathRegisters>();
  shared.rows.find(block, threadIdx.x - 128);
  if (threadIdx.x - 128 < kRows / 32) shared.fallback[threadIdx.x - 128] = 0;
  named_sync(kMathBarrier, kMathThreads);
  if (!params.q_by_tma) {
    load_q(params, block, shared, q);
    barrier_arrive(ring.q_full());
  }
  const int half = uniform(threadIdx.x / 128 - 1);
  LatentSoftmax<T, kByTma> math(params, block, share, ring, shared, q, ring.data + 2 * kBlockBytes, half);
  barrier_wait(ring.q_full(), 0);
  math.attend();

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = over_row(math.row_sum[h], Sum());
    if (math.lane % 4 == 0) shared.row_sum[half][math.row(h)] = sum;
  }
  named_sync(kMathBarrier, kMathThreads);  // all have read Q and keys
  if (params.from_registers) return store_rows(params, block, shared, math);
  auto* const results = reinterpret_cast<LatentResults*>(dynamic + (q - shared_address(dynamic)));
  math.store_for_cluster(ring.data, *results);
  cluster_sync();
  merge<T>(params, block, shared, share.sharers, static_cast<int>(rank), ring.data,
           dynamic + (ring.data - shared_address(dynamic)), q, *results);
  cluster_sync();
}

// How keys are split. The fewer keys a thread block has, the faster a sequence alone, and the slower many sequences.
// Many rows occupy many thread blocks anyway.
struct Sharing {
  int cluster, max_keys;  // thread blocks of a cluster; most keys of each
};
Sharing sharing_of(const AttentionParams& p) {
  const std::int64_t rows = p.sq * p.group;
  if (has_many_lists(p)) return {1, 1 << 30};
  if (rows <= kFewRows) return {2, 1024};
  if (rows <= 1024) return {2, 2048};
  return {1, 1 << 30};
}
std::int64_t row_tiles(const AttentionParams& p) {
  return ceil_div(p.sq * p.group, kRows);
}
PartialResults latent_partials(const AttentionParams& p, std::byte* workspace) {
  const Sharing sharing = sharing_of(p);
  return partials_of(
      p, workspace,
      static_cast<int>(std::min<std::int64_t>(std::int64_t{sharing.cluster} * sharing.max_keys, 1 << 30)));
}

// Makes the map of Q, in boxes of a tile's rows. False: threads load Q.
bool make_queries_map(CUtensorMap& map, const AttentionParams& p) {
  const std::int64_t heads = std::min<std::int64_t>(p.group, kRows);
  return heads > 0 && p.group % heads == 0 && kRows % heads == 0 && is_vector(p.q, p.q_stride, 2) &&
         make_map(map, p.q_type, p.q,
                  {{p.d, 1, 64},
                   {p.group, p.q_stride.h, static_cast<int>(heads)},
                   {p.sq, p.q_stride.s, static_cast<int>(kRows / heads)},
                   {p.hk, p.q_stride.h * p.group, 1},
                   {p.b, p.q_stride.b, 1}});
}

template <class T>
cudaError_t launch(const LatentParams& params, cudaStream_t stream) {
  const unsigned cluster = params.cluster_size.by;
  const auto kernel = params.box > 0 ? attention_latent<T, true> : attention_latent<T, false>;
  return launch_clusters(cluster, false, kernel, params.grid.blocks * cluster, kThreads, kSharedBytes, stream, params);
}

}  // namespace

std::int64_t latent_items(const AttentionParams& p) {
  return p.b * p.hk * latent_partials(p, nullptr).splits * row_tiles(p) * sharing_of(p).cluster;
}
std::size_t latent_workspace(const AttentionParams& p) {
  const PartialResults partials = latent_partials(p, nullptr);
  return partials.splits > 1 ? bytes_of(p, partials) : 0;
}

cudaError_t launch_attention_latent(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  LatentParams params{p, latent_partials(p, workspace)};
  params.grid = SplitGrid(p, params.partials, row_tiles(p));
  params.cluster_size = Divisor(sharing_of(p).cluster);
  params.page_size = Divisor(p.page_size);
  params.separate_values = !values_in_keys(p);
  params.modified = has_modifiers(p.score);
  params.keep_in_l2 = params.grid.tiles.by > 2;
  params.q_vector = is_vector(p.q, p.q_stride, 2);
  params.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  params.out_vector = p.dv % 4 == 0 && is_vector(p.out, p.out_stride, p.out_type == DType::f32 ? 4 : 2);
  const int box = box_keys(p, kKeys);
  if (make_keys_map(params.k, p, p.k, p.k_stride, p.d, box) &&
      (!params.separate_values || make_keys_map(params.v, p, p.v, p.v_stride, p.dv, box)))
    params.box = box;
  params.q_by_tma = make_queries_map(params.q, p);
  params.writes_output = params.partials.splits == 1;
  params.from_registers = params.writes_output && params.cluster_size.by == 1 && params.out_vector && p.dv % 8 == 0 &&
                          p.out_type == p.q_type;
  const cudaError_t status =
      p.q_type == DType::f16 ? launch<__half>(params, stream) : launch<__nv_bfloat16>(params, stream);
  if (status != cudaSuccess || params.writes_output) return status;
  return launch_attention_combine(p, params.partials, stream);
}

}  // namespace rapt::cuda
