// attention_backward on Hopper's tensor cores: the kernel for dk and dv, and the one for dq that computes scores anew.
// No atomic additions.
//
// A thread block's first warpgroup (the producer) loads its own rows or keys once, and tiles of the other side into a
// ring. Each of the other warpgroups has 64 own rows. For each tile, with keys as own:
//   S^T = K Q^T, dP^T = V dO^T, P = 2^(S - lse), dV += P^T dO, dS = P (dP - delta), dK += dS^T Q
// and with rows as own:
//   S = Q K^T, dP = dO V^T, P = 2^(S - lse), dS = P (dP - delta), dQ += dS K
// P and dS go from the accumulators of a product to an operand of the next in registers. With kKeepsDs, dS^T is also
// left in memory, for backward_queries.cuh. The two warpgroups multiply in turns. A cluster's sums are added up by its
// first block.
//
// Tiles begin at multiples of 64 from row or key 0 and are taken in ascending order; one that is hidden from a row or
// key adds zeros. Zero times NaN is NaN: own rows whose gradients are not finite are marked, for
// attention_backward_naive.
#pragma once

#include "cuda/kernels/backward_load.cuh"
#include "cuda/kernels/backward_store.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

// A math warpgroup: the gradients of its 64 own rows or keys.
template <class C>
struct BackwardMath {
  using T = typename C::Element;
  static constexpr int kSums = C::kSize / 2;
  static constexpr bool kOfKeys = C::kOfKeys;
  // Of P as an operand: fp16 has few bits of numbers below 2^-14.
  static constexpr float kWeightScale = std::is_same_v<T, __half> ? 0x1p10f : 1;
  static constexpr int kMinusDeltaAt = offsetof(RowsOfTile, minus_delta), kDpFactorAt = offsetof(RowsOfTile, dp_factor),
                       kOneValueAt = offsetof(RowsOfTile, has_one_value);

  const BackwardBlock<C>& block;
  const Ring<C::kStages>& ring;
  const std::uint32_t own;                   // the first own row of the warpgroup in shared memory
  const int group, first;                    // which warpgroup, and the number of that row
  std::uint32_t thread = threadIdx.x % 128;  // of the warpgroup
  std::uint32_t in_eight = thread % 4 * 2;   // the first of the lane's two among eight of the other side

  float sums[kSums], value_sums[kOfKeys ? kSums : 1];                 // dK and dV, or dQ
  float lse[2], minus_delta[2], dp_factor[2];                         // of own rows
  const float largest = C::kModified ? kept_log2(block.p.score) : 0;  // of a weight, in the log2 domain
  std::uint32_t weights[16], derivatives[16];
  KeyRange32 whole;           // the tiles of which each own row or key sees all
  KeyRange32 in_turns;        // those of which both warpgroups see something
  int q_head = block.q_head;  // whose tiles are at work
  int passed = 0;             // the tiles of the heads before it, in the ring

  // Own rows of a tensor by the rows of a tile. `adds`: to what is there.
  __device__ void multiply(float (&to)[32], int tensor, std::uint32_t tile, bool adds) const {
    const std::uint32_t a = matrix_at(own + tensor * C::kOwnBytes), b = matrix_at(tile + tensor * C::kOtherBytes);
#pragma unroll
    for (int i = 0; i < C::kSize / 16; ++i) {
      const int panel = i / 4, step = i % 4 * 2;
      wgmma_abt<T>(to, a + panel * (C::kOwnPanel / 16) + step, b + panel * (C::kOtherPanel / 16) + step, adds || i > 0);
    }
    wgmma_commit();
  }
  __device__ static void add_product(float (&to)[kSums], const std::uint32_t (&a)[16], std::uint32_t b) {
    const std::uint32_t matrix = matrix_at(b, C::kOtherPanel);
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_ab<T>(to, a + 4 * i, matrix + i * 128, 1);
    wgmma_commit();
  }

  // The lane's pair i of own row and other row: their numbers within the tile.
  __device__ int own_of(int i) const {
    return static_cast<int>(thread / 32 * 16 + thread % 32 / 4) + 8 * (i / 2 % 2);
  }
  __device__ int other_of(int i) const {
    return i / 4 * 8 + static_cast<int>(in_eight) + i % 2;
  }

  // Among tiles [begin, end).
  __device__ KeyRange32 find_whole(int begin, int end) const {
    const auto is_whole = [&](int n) {
      const int other = block.other + n * kBackwardTile, last = kBackwardTile - 1;
      return kOfKeys ? block.all_see(other, other + last, first, first + last)
                     : block.all_see(first, first + last, other, other + last);
    };
#pragma unroll 1
    while (begin < end && !is_whole(begin)) ++begin;
#pragma unroll 1
    while (begin < end && !is_whole(end - 1)) --end;
    return {begin, end};
  }
  // lse of the other side's rows: of the lane's eight pairs of neighbouring ones.
  using OtherLse = float2[kOfKeys ? 8 : 1];
  __device__ void load_lse(OtherLse& to, std::uint32_t of_rows) const {
#pragma unroll
    for (int j = 0; j < (kOfKeys ? 8 : 0); ++j) to[j] = load8(of_rows + 4 * other_of(4 * j));
  }
  // -delta of the rows of pairs i and i + 1.
  __device__ float2 load_minus_delta(int i, std::uint32_t of_rows) const {
    return kOfKeys ? load8(of_rows + kMinusDeltaAt + 4 * other_of(i))
                   : make_float2(minus_delta[i / 2 % 2], minus_delta[i / 2 % 2]);
  }
  __device__ const ScoreParams& score() const {
    return block.p.score;
  }
  __device__ bool drops() const {
    return score().dropout.given;
  }
  // s becomes P.
  __device__ void weigh(float (&s)[32], float scale, const OtherLse& other_lse) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float2& pair = other_lse[kOfKeys ? i / 4 : 0];
      const float of_row = kOfKeys ? (i % 2 ? pair.y : pair.x) : lse[i / 2 % 2];
      // No weight is above 1, or what dropout makes of it, whatever rounding errors the score and lse have.
      s[i] = exp2_approx(min_or_nan(fmaf(s[i], scale, -of_row), C::kModified ? largest : 0));
    }
  }
  // What a tile's modifiers make of q.k, which become scores in the log2 domain, and of dP - delta.
  __device__ void change_scores(float (&s)[32], float (&dp)[32], std::uint32_t tile) const {
    float scale = score().scale_log2;
    if (changes_derivative(score())) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const Capped made = capped(score(), s[i] * scale, [](float x, float y) { return tanh_approx(x, y); });
        s[i] = made.x, dp[i] *= made.derivative;
      }
      scale = 1;
    }
    const std::uint32_t at = tile + kShiftsAt<C> + (group * kBackwardTile + own_of(0)) * C::kShiftsPitch + 4 * in_eight;
    const bool shifts = score().bias || score().alibi;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const float2 shift = shifts ? load8(at + i / 2 % 2 * 8 * C::kShiftsPitch + i / 4 * 32) : make_float2(0, 0);
      s[i] = fmaf(s[i], scale, shift.x), s[i + 1] = fmaf(s[i + 1], scale, shift.y);
    }
  }
  __device__ PairBits bits_of(std::uint32_t words) const {
    return {words + (group * kBackwardTile + own_of(0)) * 8, in_eight};
  }
  __device__ void hide_masked(float (&s)[32], std::uint32_t tile) const {
    const PairBits hidden = bits_of(tile + kHiddenAt<C>);
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = hidden[i] ? 0 : s[i];
  }
  // A dropped weight's dP is 0.
  __device__ void drop_values(float (&dp)[32], std::uint32_t tile) const {
    const PairBits dropped = bits_of(tile + kDroppedAt<C>);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const float2 minus = load_minus_delta(i, tile + C::kRowsAt);
      dp[i] = dropped[i] ? minus.x : dp[i], dp[i + 1] = dropped[i + 1] ? minus.y : dp[i + 1];
    }
  }
  __device__ void drop_weights(float (&s)[32], std::uint32_t tile) const {
    const PairBits dropped = bits_of(tile + kDroppedAt<C>);
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = dropped[i] ? 0 : s[i];
  }
  // dP - delta of rows of one value, of a tile that is not whole.
  __device__ void keep_one_values(float (&dp)[32], std::uint32_t of_rows) const {
    if (kOfKeys ? load4(of_rows + kOneValueAt) != 0 : dp_factor[0] == 0 || dp_factor[1] == 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float factor = kOfKeys ? load4(of_rows + kDpFactorAt + 4 * other_of(i)) : dp_factor[i / 2 % 2];
        if (factor == 0) dp[i] = kOfKeys ? load4(of_rows + kMinusDeltaAt + 4 * other_of(i)) : minus_delta[i / 2 % 2];
      }
    }
  }
  // P and dP - delta of pairs that are hidden, of a tile that is not whole.
  __device__ void hide(float (&s)[32], float (&dp)[32], int n) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::uint32_t number = first + own_of(2 * h);
      pin(number);  // or registers would hold its range through all tiles
      const auto [from, to] = block.others_of(static_cast<int>(number), static_cast<int>(number) + 1);
      const int tile = block.other + n * kBackwardTile - from, count = to - from;
#pragma unroll
      for (int i = 2 * h; i < 32; i += i % 2 ? 3 : 1)
        if (static_cast<unsigned>(tile + other_of(i)) >= static_cast<unsigned>(count)) s[i] = 0, dp[i] = 0;
    }
  }
  // Adds tile n's part to the sums; asynchronous.
  __device__ __forceinline__ void add_products(int n) {
    pin(derivatives), pin(sums);
    if constexpr (kOfKeys) pin(weights), pin(value_sums);
    wgmma_fence();
    const std::uint32_t tile = ring.slot(passed + n);
    if constexpr (kOfKeys) add_product(value_sums, weights, tile + C::kOtherBytes);
    add_product(sums, derivatives, tile);
    if constexpr (C::kKeepsDs) keep_ds(n);
  }
  // P and dS of tile n. `adds_last`: the tensor cores add the products of tile n - 1 in the meantime. (Operands are
  // rounded when no product runs: else ptxas makes every product wait for the one before.)
  __device__ __forceinline__ void differentiate(int n, bool adds_last) {
    const std::uint32_t tile = ring.slot(passed + n), of_rows = tile + C::kRowsAt;
    ring.wait_full(passed + n);
    float s[32] = {}, dp[32];
    OtherLse other_lse;  // loaded first where that can be: loads wait for the products that were started before them
    if constexpr (!C::kOverlaps) load_lse(other_lse, of_rows);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {  // what dP is added to
      const float2 pair = load_minus_delta(i, of_rows);
      dp[i] = pair.x, dp[i + 1] = pair.y;
    }
    if (adds_last) add_products(n - 1);
    pin(s);
    wgmma_fence();
    multiply(s, 0, tile, false);
    pin(dp);
    wgmma_fence();
    multiply(dp, 1, tile, true);
    pass_turn(n);
    if constexpr (C::kOverlaps) load_lse(other_lse, of_rows);
    const bool is_whole = n >= whole.first && n < whole.last;
    if constexpr (C::kScores) {
      finish_products();
      pin(s), pin(dp);
      if (!is_whole) keep_one_values(dp, of_rows);
      if (drops()) drop_values(dp, tile);
      change_scores(s, dp, tile);
      weigh(s, 1, other_lse);
      if (score().mask) hide_masked(s, tile);
      if (!is_whole) hide(s, dp, n);
    } else {
      wgmma_wait<1>();
      pin(s);
      if (adds_last) ring.release(passed + n - 1);
      weigh(s, score().scale_log2, other_lse);
      if constexpr (C::kModified) {
        if (score().mask) hide_masked(s, tile);
      }
      if (!is_whole) {  // here: without a branch, ptxas would wait for dP amid the exponentials
        finish_products();
        pin(dp);
        keep_one_values(dp, of_rows);
        if (C::kModified && drops()) drop_values(dp, tile);
        hide(s, dp, n);
      }
      finish_products();
      pin(dp);
      if (C::kModified && drops() && is_whole) drop_values(dp, tile);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) dp[i] *= s[i];
    if constexpr (C::kModified && kOfKeys) {
      if (drops()) drop_weights(s, tile);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      derivatives[i] = pack<T>(dp[2 * i], dp[2 * i + 1]);
      if constexpr (kOfKeys) weights[i] = pack<T>(s[2 * i] * kWeightScale, s[2 * i + 1] * kWeightScale);
    }
  }
  __device__ __forceinline__ void finish_products() {
    wgmma_wait<0>();
    pin(sums);
    if constexpr (kOfKeys) pin(value_sums);
  }
  // Leaves dS of tile n in memory: matrices of 8 keys by 8 rows, which backward_queries.cuh transposes.
  __device__ __forceinline__ void keep_ds(int n) const {
    auto* const to =
        reinterpret_cast<std::uint32_t*>(block.ds_tile(q_head, first / kBackwardTile, block.other / kBackwardTile + n));
#pragma unroll
    for (int i = 0; i < 16; ++i) to[thread / 32 * 512 + i * 32 + thread % 32] = derivatives[i];
  }
  // Says that dS is in memory.
  __device__ void report_ds() const {
    named_sync(3, 256);
    if (group == 0 && thread == 0) count_up(&block.params.rows.progress[block.kv_head()].written);
  }
  // The warpgroups multiply in turns where both need a tile, so that one multiplies while the other exponentiates.
  __device__ void take_turn(int n) const {
    if (n >= in_turns.first && n < in_turns.last) named_sync(1 + group, 256);
  }
  __device__ void pass_turn(int n) const {
    if (n >= in_turns.first && (n + group < in_turns.last || (n < in_turns.last && !is_last_head())))
      named_arrive(2 - group, 256);
  }
  __device__ bool is_last_head() const {
    return !C::kGrouped || q_head + 1 == block.q_head + block.q_heads;
  }
  // Passes by tiles [from, to), of which no own row or key sees anything.
  __device__ void skip(int from, int to) const {
#pragma unroll 1
    for (int n = passed + from; n < passed + to; ++n) {
      ring.wait_full(n);
      ring.release(n);
    }
  }

  __device__ void run(std::uint32_t own_full) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll
    for (int i = 0; i < (kOfKeys ? kSums : 1); ++i) value_sums[i] = 0;
    if (block.tiles == 0) return;
    barrier_wait(own_full, 0);
    pin(thread), pin(in_eight);  // or they would be asked for in every tile, and each address have a register
    if constexpr (!kOfKeys) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowsOfTile* const tile = first < block.tokens() ? block.rows_of(block.q_head, first) : nullptr;
        const int row = own_of(2 * h);
        lse[h] = tile ? tile->lse_log2[row] : kInfinity;
        minus_delta[h] = tile ? tile->minus_delta[row] : 0, dp_factor[h] = tile ? tile->dp_factor[row] : 0;
      }
    }
    const auto [begin, end] = block.tiles_of(first);
    const auto [other_begin, other_end] = block.tiles_of(first + (group == 0 ? kBackwardTile : -kBackwardTile));
    whole = find_whole(begin, end), in_turns = {max(begin, other_begin), min(end, other_end)};
    if (group == 1 && in_turns.first < in_turns.last) named_arrive(1, 256);  // the first turn is the other's
    if (begin == end) return skip(0, block.q_heads * block.tiles);
    skip(0, begin);
    if constexpr (C::kOverlaps) {
      do {
        take_turn(begin);
        differentiate(begin, false);
#pragma unroll 1
        for (int n = begin + 1; n < end; ++n) {
          take_turn(n);
          differentiate(n, true);
        }
        add_up(end - 1);
      } while (next_head(begin, end));
    } else {
#pragma unroll 1
      for (int n = begin; n < end; ++n) {  // of all heads: ptxas spills the sums around a loop within a loop
        take_turn(n);
        differentiate(n, false);
        add_up(n);
        if constexpr (C::kGrouped) {
          if (n + 1 == end && next_head(begin, end)) n = begin - 1;
        }
      }
    }
    skip(end, block.tiles);
  }
  // Whether there is another query head, of which own keys too see tiles [begin, end). Passes on to its first.
  __device__ bool next_head(int begin, int end) {
    if (is_last_head()) return false;
    skip(end, block.tiles);
    ++q_head, passed += block.tiles;
    skip(0, begin);
    return true;
  }
  // Adds tile n's part to the sums, and releases the tile.
  __device__ __forceinline__ void add_up(int n) {
    add_products(n);
    finish_products();
    ring.release(passed + n);
  }

  // Adds the sums of the cluster's other blocks to those of the first, in order. `shared`: memory that holds them,
  // which no thread of the block uses any more.
  __device__ void add_up_cluster(std::uint32_t shared) {
    const int sharers = block.params.sharers;
    if (sharers == 1) return;
    named_sync(3, 256);
    const std::uint32_t at = shared + (group * 128 + thread) * 16;
    const auto for_each_four = [&](auto f) {
#pragma unroll
      for (int i = 0; i < kSums; i += 4) f(sums + i, at + i * 1024), f(value_sums + i, at + (kSums + i) * 1024);
    };
    if (block.rank() > 0)
      for_each_four([](const float* x, std::uint32_t to) {
        store16(to, {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])});
      });
    cluster_sync();
#pragma unroll 1
    for (int rank = 1; rank < sharers && block.rank() == 0; ++rank)
      for_each_four([&](float* x, std::uint32_t from) {
        const float4 part = cluster_load16(in_cluster(from, rank));
        x[0] += part.x, x[1] += part.y, x[2] += part.z, x[3] += part.w;
      });
    cluster_sync();
  }

  // Stores the warpgroup's gradients, and marks those that are not finite.
  __device__ void store() const {
    if (C::kGrouped && block.rank() > 0) return;
    const auto& p = block.p;
    GradientRows<C> rows{block, first};
    if constexpr (kOfKeys) {
      rows.put(p.grad_k, sums, p.scale, static_cast<int>(p.d));
      rows.put(p.grad_v, value_sums, 1 / kWeightScale, static_cast<int>(p.dv));
    } else {
      rows.put(p.grad_q, sums, p.scale, static_cast<int>(p.d));
    }
    rows.mark(block.params.rows);
  }
};

// What the threads of a thread block do. `data`: its dynamic shared memory, aligned to the swizzle's unit.
template <class C>
__device__ void differentiate_tiles(const BackwardBlock<C>& block, std::uint32_t barriers, std::uint32_t data) {
  if (block.own >= block.store_end()) return;
  const Ring<C::kStages> ring{barriers, data + 2 * C::kOwnBytes, C::kPlaceBytes};
  const std::uint32_t own_full = barriers + 16 * kMaxBackwardStages;
  if (threadIdx.x < 128) {
    registers_decrease<C::kLoadRegisters>();
    const BackwardLoads<C> loads{block, ring, data, own_full};
    // Without tiles nobody would wait for own rows, and add_up_cluster() needs their place.
    if (block.tiles == 0) {
    } else if (!C::kKeepsDs && !block.params.tma) {
      loads.by_threads();
    } else {
      loads.by_tma();
    }
  } else {
    registers_increase<C::kMathRegisters>();
    const int group = uniform(threadIdx.x / 128 - 1);
    BackwardMath<C> math{block, ring, data + group * kBackwardTile * 128, group, block.own + group * kBackwardTile};
    math.run(own_full);
    if constexpr (C::kKeepsDs) math.report_ds();
    if constexpr (C::kGrouped) math.add_up_cluster(data);
    math.store();
  }
}

// A thread block's shared memory but for the tiles, and its start.
struct BackwardStart {
  std::uint32_t barriers, data;

  // `writers`: threads that arrive when a place of the ring is full, beside what loads its tile.
  __device__ BackwardStart(const BackwardParams& params, std::uint64_t (&memory)[2 * kMaxBackwardStages + 1],
                           const std::uint8_t* tiles, int writers)
      : barriers(shared_address(memory)), data((shared_address(tiles) + 1023) / 1024 * 1024) {  // the swizzle's unit
    pin(data);
    if (threadIdx.x == 0) {
      const int loaders = params.tma ? 1 : 128;
      Ring<kMaxBackwardStages>{barriers}.init(loaders + writers, 8);
      barrier_init(barriers + 16 * kMaxBackwardStages, loaders);
      if (params.tma)
        for (const CUtensorMap* map : {&params.q, &params.k, &params.v, &params.dout}) prefetch_map(map);
      fence_barrier_init();
    }
    __syncthreads();
    launch_dependent_grids();
    wait_on_dependent_grids();
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[2 * kMaxBackwardStages + 1];
  const BackwardStart start(params, barriers, shared, C::kModified ? 128 : 0);
  differentiate_tiles(BackwardBlock<C>(params), start.barriers, start.data);
}

}  // namespace rapt::cuda
