// attention_prefill_f8's kernel: products of f8e4m3 with weights of f8e4m3. One thread loads, and two warpgroups
// multiply: the next scores while the softmax turns the last ones into weights, as in FlashAttention-3.
//
// V has been transposed, since 8-bit wgmma takes both operands with the summed dimension innermost. Eight rows of ones
// follow V: their products are the sums of the rounded weights. Tensor cores sum with some 13 bits, so their sums are
// added to fp32 sums every kBlocksPerPartial blocks.
#pragma once

#include "cuda/kernels/prefill_f8_softmax.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

// The layout of shared memory: tiles and barriers.
template <class C>
struct F8Shared {
  std::uint32_t q;

  __device__ std::uint32_t k(int stage) const { return q + C::kQueryBytes + stage * C::kStageBytes; }
  __device__ std::uint32_t v(int stage) const { return k(stage) + C::kKeyBytes; }
  __device__ std::uint32_t q_full() const { return k(C::kStages); }
  __device__ std::uint32_t q_empty() const { return q_full() + 8; }
  __device__ std::uint32_t k_full(int stage) const { return q_full() + 8 * (2 + stage); }
  __device__ std::uint32_t k_empty(int stage) const { return k_full(stage) + 8 * C::kStages; }
  __device__ std::uint32_t v_full(int stage) const { return k_empty(stage) + 8 * C::kStages; }
  __device__ std::uint32_t v_empty(int stage) const { return v_full(stage) + 8 * C::kStages; }

  // By one thread.
  __device__ void init_barriers() const {
    barrier_init(q_full(), 1), barrier_init(q_empty(), C::kGroups);
    for (int stage = 0; stage < C::kStages; ++stage) {
      barrier_init(k_full(stage), 1), barrier_init(v_full(stage), 1);
      barrier_init(k_empty(stage), C::kGroups), barrier_init(v_empty(stage), C::kGroups);
    }
    fence_barrier_init();
  }
  // Writes the rows of ones behind each stage's values, by all threads.
  __device__ void write_ones() const {
    constexpr std::uint32_t kOnes = 0x38383838;
    for (int i = static_cast<int>(threadIdx.x); i < C::kStages * 8 * C::kKeys / 4; i += C::kThreads)
      store4(v(i / (2 * C::kKeys)) + C::kSize * C::kKeys + i % (2 * C::kKeys) * 4, kOnes);
    fence_async_proxy();
  }
};

// The loading thread.
template <class C>
__device__ void load_f8_tiles(const PrefillF8Params& params, const F8Shared<C>& shared) {
  const AttentionParams& p = params.p;
  const int group = static_cast<int>(p.group);
  for (int n = 0, block = 0, number; (number = f8_tile_number(n, params.all_tiles)) < params.all_tiles; ++n) {
    const F8Tile tile = F8Tile::at<C>(params, number);
    const int hk = tile.q_head / group;
    barrier_wait(shared.q_empty(), n % 2 ^ 1);
    barrier_arrive_expecting(shared.q_full(), C::kQueryBytes);
    tma_load(shared.q, &params.q, 0, tile.row, tile.q_head, tile.b, shared.q_full(), false);
    for (int i = 0; i < tile.blocks; ++i, ++block) {
      const int stage = block % C::kStages, parity = block / C::kStages % 2;
      barrier_wait(shared.k_empty(stage), parity ^ 1);
      barrier_arrive_expecting(shared.k_full(stage), C::kKeyBytes);
      tma_load(shared.k(stage), &params.k, 0, i * C::kKeys, hk, tile.b, shared.k_full(stage), true);
      barrier_wait(shared.v_empty(stage), parity ^ 1);
      if (block == 0) wait_on_dependent_grids();  // the previous kernel transposes V
      barrier_arrive_expecting(shared.v_full(stage), C::kSize * C::kKeys);
      tma_load(shared.v(stage), &params.v, i * C::kKeys, 0, hk, tile.b, shared.v_full(stage), true);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_prefill_f8(const __grid_constant__ PrefillF8Params params) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const F8Shared<C> shared{shared_address(memory)};
  const AttentionParams& p = params.p;
  const int group = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) shared.init_barriers();
  shared.write_ones();
  __syncthreads();
  if (group == C::kGroups) {
    registers_decrease<24>();
    if (threadIdx.x == C::kGroups * 128) load_f8_tiles(params, shared);
    return;
  }
  registers_increase<240>();

  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int lane_row =
      group * C::kGroupRows + thread / 32 * 16 + lane / 4;  // the thread's rows are this one and the one 8 further on
  const bool is_leader = thread == 0;
  const std::uint32_t group_queries = shared.q + group * C::kGroupRows * C::kSize;
  PrefillF8Softmax<C> rows;
  std::uint32_t s[C::kScores], weights[C::kWeights];
  float o_partial[C::kSums], o_accum[C::kSums];  // the tensor cores' sums; fp32 sums
  const auto multiply_keys = [&](int stage) {
    wgmma_fence();
    pin(s), pin(weights);
#pragma unroll
    for (int i = 0; i < C::kSize / 32; ++i)
      wgmma_f8_abt<C::kSize>(s, matrix_at(group_queries) + 2 * i, matrix_at(shared.k(stage)) + 2 * i, i > 0);
    wgmma_commit();
  };
  const auto multiply_values = [&](int stage, bool adds) {
    wgmma_fence();
    pin(o_partial), pin(weights);
#pragma unroll
    for (int i = 0; i < C::kKeys / 32; ++i)
      wgmma_f8_abt(o_partial, weights + 4 * i, matrix_at(shared.v(stage)) + 2 * i, i > 0 || adds);
    wgmma_commit();
  };

  int block = 0;                // key blocks so far
  unsigned fallback_tiles = 0;  // bit n % 32: tile n has fallback rows
  int n = 0;
#pragma unroll 1
  for (int number; (number = f8_tile_number(n, params.all_tiles)) < params.all_tiles; ++n) {
    const F8Tile tile = F8Tile::at<C>(params, number);
    const int row = tile.row + lane_row;
    const int seen[2] = {F8Tile::seen(params, row), F8Tile::seen(params, row + 8)};
    const int seen_by_all =
        F8Tile::seen(params, tile.row + group * C::kGroupRows);  // keys that all rows of the warpgroup see
    const HeadScales scales(p, tile.b, tile.q_head, tile.q_head / static_cast<int>(p.group));
    barrier_wait(shared.q_full(), n % 2);
    float octaves[2];
    fit_queries<C>(group_queries, scales.of_scores < 0, octaves);
#pragma unroll
    for (float& x : octaves) x *= fabsf(scales.of_scores);
    rows.begin(octaves);
    named_sync(1 + group, 128);  // all queries have been scaled

    int stage = block % C::kStages;
    barrier_wait(shared.k_full(stage), block / C::kStages % 2);
    multiply_keys(stage);
    wgmma_wait<0>();
    pin(s);
    if (is_leader) barrier_arrive(shared.k_empty(stage));
    if (C::kKeys > seen_by_all) rows.mask(s, seen, lane % 4 * 2);
    rows.softmax(s);
    rows.pack_weights(s, weights);
#pragma unroll
    for (float& x : o_accum) x = 0;
    int blocks_in_partial = 0;  // blocks whose products are in o_partial
    bool rescales = false;
    // Before the next products: adds o_partial to o_accum if it is complete, and moves both to a new shift.
    const auto fold_partial_sums = [&] {
      if (blocks_in_partial == C::kBlocksPerPartial) {
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) o_accum[i] += o_partial[i];
        blocks_in_partial = 0;
      }
      if (!rescales) return;
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) o_accum[i] *= rows.rescale[i / 2 % 2];
      if (blocks_in_partial > 0) {
#pragma unroll
        for (int i = 0; i < C::kSums; ++i) o_partial[i] *= rows.rescale[i / 2 % 2];
      }
    };
#pragma unroll 1
    for (int i = 1; i < tile.blocks; ++i, ++block) {
      const int previous = block % C::kStages, current = (block + 1) % C::kStages;
      barrier_wait(shared.k_full(current), (block + 1) / C::kStages % 2);
      multiply_keys(current);
      fold_partial_sums();
      barrier_wait(shared.v_full(previous), block / C::kStages % 2);
      multiply_values(previous, blocks_in_partial > 0);
      wgmma_wait<1>();
      pin(s);
      if (is_leader) barrier_arrive(shared.k_empty(current));
      if ((i + 1) * C::kKeys > seen_by_all) rows.mask(s, seen, i * C::kKeys + lane % 4 * 2);
      rescales = rows.softmax(s);
      pin(s);
      // A branch that is never taken: without it the compiler waits for the products before the softmax.
      if (params.tiles < 0) asm volatile("nanosleep.u32 20;");
      wgmma_wait<0>();
      pin(o_partial), pin(weights);
      if (is_leader) barrier_arrive(shared.v_empty(previous));
      rows.pack_weights(s, weights);
      ++blocks_in_partial;
    }
    if (is_leader) barrier_arrive(shared.q_empty());
    stage = block % C::kStages;
    fold_partial_sums();
    barrier_wait(shared.v_full(stage), block / C::kStages % 2);
    multiply_values(stage, blocks_in_partial > 0);
    wgmma_wait<0>();
    pin(o_partial);
    if (is_leader) barrier_arrive(shared.v_empty(stage));
    ++block;
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) o_accum[i] += o_partial[i];

    bool falls_back = false;
#pragma unroll
    for (int b = 0; b < 2; ++b)
      falls_back |= store_f8_row<C>(params, tile, row + 8 * b, b, o_accum, rows, scales.of_values);
    if (__any_sync(~0u, falls_back)) fallback_tiles |= 1u << n % 32;
  }
  __syncwarp();  // results have been stored before they are read and stored again
  if (fallback_tiles != 0)
    recompute_f8_fallback_rows<C>(params, group * C::kGroupRows + thread / 32 * 16, fallback_tiles);
}

}  // namespace rapt::cuda
