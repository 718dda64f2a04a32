// attention_prefill_unspecialized: attention_prefill_dense's results, to the bit, for heads of up to 64 columns,
// without warp specialisation: two warpgroups to a thread block, two thread blocks to a multiprocessor, no producer.
//
// Each warpgroup multiplies, exponentiates and multiplies in turn. The four warpgroups of a multiprocessor, each at
// another step, hide each other's latencies better than two or three that overlap products with exponentials. One
// thread requests the next keys and the next tile's Q while products run.
#pragma once

#include "cuda/kernels/prefill_dense.cuh"
#include "cuda/kernels/prefill_softmax.cuh"

namespace rapt::cuda {

// The loading thread. It requests K blocks kStages ahead of their products, and V blocks one ahead; where such a block
// is the first of a tile, it finds the tile first.
template <class C>
struct UnspecializedLoader {
  const PrefillParams& params;
  DenseShared<C>& shared;
  const DenseRings<C>& rings;

  // The first requests: those that a tile of one block before the first tile would have made.
  __device__ void begin() {
#pragma unroll 1
    for (int ahead = 1; ahead <= C::kStages; ++ahead) {
      load_keys(ahead - 1, ~0u, -ahead);
      if (ahead == 1) load_values(0, ~0u, 0);
    }
  }
  // Requests the n-th block of K: `block` of tile t or, if negative, counted back from the end of the next tile; and
  // that tile's Q, if the block is its first.
  __device__ void load_keys(unsigned n, unsigned t, int block) {
    while (block < 0) {
      DenseTile<C>& next = tile(++t);
      if (block == -1) {
        rings.q.wait_empty(t);
        next.find(params, t);
        if (next.blocks == 0) barrier_arrive(rings.q.full(t));  // an empty tile ends the loop of the readers
        else load_q_by_tma<C>(params, next, rings.q.slot(t), rings.q.full(t));
      }
      if (next.blocks == 0) return;
      block += next.blocks;
    }
    load_keys_by_tma<C>(params, rings.k, params.k, n, tile(t), block);
  }
  // Requests the n-th block of V: the one after `block` of tile t. Its K block has been requested before.
  __device__ void load_values(unsigned n, unsigned t, int block) {
    if (block == 0) block = tile(++t).blocks;
    if (block > 0) load_keys_by_tma<C>(params, rings.v, params.v, n, tile(t), block - 1);
  }

 private:
  __device__ DenseTile<C>& tile(unsigned t) const {
    return shared.tiles[t % C::kQueryTiles];
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerMultiprocessor)
    attention_prefill_unspecialized(const __grid_constant__ PrefillParams params) {
  static_assert(C::kQueryTiles > C::kStages,
                "or the loading thread waits for its own tile, where others have one block");
  extern __shared__ __align__(1024) std::uint8_t memory[];  // the swizzle's unit
  auto& shared = *reinterpret_cast<DenseShared<C>*>(memory);
  const DenseRings<C> rings(shared);
  const auto& q = rings.q;
  const auto &k = rings.k, &v = rings.v;
  const bool loads = threadIdx.x == 0;
  UnspecializedLoader<C> loader{params, shared, rings};
  if (loads) {
    rings.init(params);
    loader.begin();
  }
  __syncthreads();

  const int group = uniform(threadIdx.x / 128);
  const std::uint32_t warp_rows = group * kGroupRows * C::kRowBytes;
  OnlineSoftmax<C> rows(params);
  unsigned t = 0, n = 0;             // tiles and key blocks begun
  unsigned fallback_tiles = 0;       // bit t % 32: tile t has fallback rows
  const auto release_before = [&] {  // frees the previous tile's Q once TMA has read its results
    if (t == 0) return;
    if (threadIdx.x % 32 == 0) tma_store_wait_read();
    __syncwarp();
    q.release(t - 1);
  };
  for (;; ++t) {
    q.wait_full(t);
    const DenseTile<C>& tile = shared.tiles[t % C::kQueryTiles];
    const int blocks = uniform(tile.blocks);
    if (blocks == 0) break;
    const bool idle = tile.row + group * kGroupRows >= tile.rows;
    rows.begin(tile);
    const std::uint32_t q_matrix = matrix_at(q.slot(t) + warp_rows);
#pragma unroll 1
    for (int block = blocks - 1; block >= 0; --block, ++n) {
      const bool first_block = block == blocks - 1;
      if (idle) {
        if (first_block) release_before();
        k.wait_full(n);
        k.release(n);
        v.wait_full(n);
        v.release(n);
        continue;
      }
      const std::uint32_t k_matrix = matrix_at(k.slot(n)), v_matrix = matrix_at(v.slot(n), C::kKeys * C::kRowBytes);
      float s[OnlineSoftmax<C>::kScores] = {};
      k.wait_full(n);
      pin(s);
      wgmma_fence();
      multiply_keys<C>(s, q_matrix, k_matrix);
      if (loads) loader.load_values(n + 1, t, block);
      if (first_block) release_before();
      wgmma_wait<0>();
      pin(s);
      k.release(n);
      rows.softmax(s, tile, block * C::kKeys, 0, [] {});
      if (!first_block) rows.rescale_values();
      v.wait_full(n);
      pin(rows.o);
      wgmma_fence();
      multiply_values<C>(rows.o, rows.weights, v_matrix);
      if (loads) loader.load_keys(n + C::kStages, t, block - C::kStages);
      wgmma_wait<0>();
      pin(rows.o);
      v.release(n);
    }
    if (!idle) rows.finish(tile);
    if (!idle && rows.store(tile, q.slot(t) + warp_rows + threadIdx.x / 32 % 4 * 16 * C::kRowBytes))
      fallback_tiles |= 1u << t % 32;
  }
  if (fallback_tiles == 0) {
    tma_store_wait_read();  // TMA reads shared memory until then
    return;
  }
  tma_store_wait();
  __syncwarp();
  recompute_fallback_rows<C>(params, reinterpret_cast<const SequenceList&>(shared),
                             fallback_tiles);  // no list is looked up
}

}  // namespace rapt::cuda
