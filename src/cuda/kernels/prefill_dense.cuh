// attention_prefill_dense's loads and stores: sequences of equal lengths, in no pages, whose rows TMA loads and stores.
// Row data (tokens, visible keys) are computed where they are needed instead of stored in shared memory, one thread
// loads, and another stores. (With stores by math warps, sequences of up to 512 keys took up to 1.18 times as long;
// part of that was the order of loads.)
#pragma once

#include "cuda/kernels/prefill_load.cuh"
#include "cuda/kernels/prefill_softmax.cuh"

namespace rapt::cuda {

// Shared memory of a multiprocessor, and what the system reserves of it for each thread block, in bytes.
constexpr int kSharedOfMultiprocessor = 228 << 10, kReserved = 1 << 10;

// A thread block's shared memory.
template <class C>
struct DenseShared {
  std::uint8_t q[C::kQueryTiles][C::kRowsBytes], k[C::kStages][C::kBlockBytes], v[C::kStages][C::kBlockBytes];
  std::uint64_t barriers[4 * C::kStages + 3 * C::kQueryTiles + 1];
  DenseTile<C> tiles[C::kQueryTiles];  // of the tiles whose Q is in `q`, or on its way
};
// The rings and barriers in it. A tile's record is valid from when its Q is requested until its results, which take the
// place of Q, have been stored.
template <class C>
struct DenseRings {
  static_assert(C::kBlocksPerMultiprocessor * (sizeof(DenseShared<C>) + kReserved) <= kSharedOfMultiprocessor);

  QueryRing<C> q;
  Blocks<C> k, v;
  std::uint32_t results, stored;  // barriers: a tile's results are in Q's place; all results have been stored

  __device__ explicit DenseRings(DenseShared<C>& shared)
      : q{shared_address(shared.barriers + 4 * C::kStages), shared_address(shared.q), C::kRowsBytes},
        k{shared_address(shared.barriers), shared_address(shared.k), C::kBlockBytes},
        v{shared_address(shared.barriers + 2 * C::kStages), shared_address(shared.v), C::kBlockBytes},
        results(q.barriers + 16 * C::kQueryTiles),
        stored(results + 8 * C::kQueryTiles) {}
  __device__ std::uint32_t results_of(unsigned t) const { return results + t % C::kQueryTiles * 8; }

  // By the loading thread.
  __device__ void init(const PrefillParams& params) const {
    prefetch_map(&params.q);
    prefetch_map(&params.k);
    prefetch_map(&params.v);
    prefetch_map(&params.out);
    k.init(1, 4 * C::kGroups);
    v.init(1, 4 * C::kGroups);
    q.init(1, C::kStoresByProducer ? 1 : 4 * C::kGroups);
    for (int t = 0; t < C::kQueryTiles; ++t) barrier_init(results_of(t), 4 * C::kGroups);
    barrier_init(stored, 1);
    fence_barrier_init();
  }
};

// The tiles of the thread block, as math warpgroups see them.
template <class C>
struct DenseTiles {
  const PrefillParams& params;
  const DenseTile<C>* tiles;
  const DenseRings<C>& rings;

  __device__ const DenseTile<C>& operator[](unsigned t) const { return tiles[t % C::kQueryTiles]; }
  __device__ bool exists(unsigned t) const { return params.has_tile(t); }
  // The warp's results of tile t are in Q's place.
  __device__ void done(unsigned t) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(rings.results_of(t));
  }
  __device__ void wait_stored() const { barrier_wait(rings.stored, 0); }
  // Keys of the last block that hold data or zeros: all, since TMA writes zeros past the tensor's end.
  __device__ int last_keys(unsigned) const { return C::kKeys; }
  __device__ void recompute_fallback_rows(unsigned fallback_tiles) const {
    // Tiles of equal lengths are found without a list, so that this one is never read.
    cuda::recompute_fallback_rows<C>(params, *reinterpret_cast<const SequenceList*>(tiles), fallback_tiles);
  }
};

// The n-th block of K or V that is loaded, `block` of a tile, by one thread.
template <class C>
__device__ void load_keys_by_tma(const PrefillParams& params, const Blocks<C>& ring, const CUtensorMap& map, unsigned n,
                                 const DenseTile<C>& tile, int block) {
  ring.wait_empty(n);
  barrier_arrive_expecting(ring.full(n), C::kBlockBytes);
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel)
    tma_load(ring.slot(n) + panel * C::kKeys * C::kRowBytes, &map, panel * C::kPanel,
             static_cast<int>(tile.key) + block * C::kKeys, tile.hk, tile.b, ring.full(n), keeps_keys<C>(params));
}

// Loads all tiles of the thread block, by one thread.
template <class C>
__device__ void load_dense(const PrefillParams& params, DenseTile<C>* tiles, const DenseRings<C>& rings) {
  static_assert(C::kQueryTiles > 1,
                "or a tile's Q waits for the results of the one whose keys are yet to be asked for");
  const auto begin = [&](unsigned t) {
    if (!params.has_tile(t)) return;
    DenseTile<C>& tile = tiles[t % C::kQueryTiles];
    rings.q.wait_empty(t);
    tile.find(params, t);
    load_q_by_tma<C>(params, tile, rings.q.slot(t), rings.q.full(t));
  };
  begin(0);
  unsigned n = 0;
  const DenseTile<C>* of_values = nullptr;  // V is loaded a block behind K, whose place is free sooner
  int values = 0;
  for (unsigned t = 0; params.has_tile(t); ++t) {
    const DenseTile<C>& tile = tiles[t % C::kQueryTiles];
    const int blocks = tile.blocks;
    for (int block = blocks - 1; block >= 0; --block, ++n) {
      load_keys_by_tma<C>(params, rings.k, params.k, n, tile, block);
      if (n > 0) load_keys_by_tma<C>(params, rings.v, params.v, n - 1, *of_values, values);
      of_values = &tile, values = block;
      if (block == blocks - 1) begin(t + 1);
    }
  }
  load_keys_by_tma<C>(params, rings.v, params.v, n - 1, *of_values, values);
}

// Stores the results of all tiles, by another thread.
template <class C>
__device__ void store_dense(const PrefillParams& params, const DenseTile<C>* tiles, const DenseRings<C>& rings) {
  for (unsigned t = 0; params.has_tile(t); ++t) {
    barrier_wait(rings.results_of(t), t / C::kQueryTiles % 2);
    for (int group = 0; group < C::kGroups; ++group)
      store_by_tma<C>(params, tiles[t % C::kQueryTiles], group * kGroupRows,
                      rings.q.slot(t) + group * kGroupRows * C::kRowBytes);
    tma_store_wait_read();
    barrier_arrive(rings.q.empty(t));
  }
  tma_store_wait();
  barrier_arrive(rings.stored);
}

}  // namespace rapt::cuda
