// attention_backward on Hopper's tensor cores: the kernel for dk and dv, and the one for dq that computes scores anew.
// No atomic additions.
//
// A thread block's first warpgroup (the producer) loads its own rows or keys once, and tiles of the other side into a
// ring. Each of the other warpgroups has 64 own rows. For each tile, with keys as own:
//   S^T = K Q^T, dP^T = V dO^T, P = 2^(S - lse), dV += P^T dO, dS = P (dP - delta), dK += dS^T Q
// and with rows as own:
//   S = Q K^T, dP = dO V^T, P = 2^(S - lse), dS = P (dP - delta), dQ += dS K
// P and dS go from the accumulators of a product to an operand of the next in registers. With kKeepsDs, dS^T is also
// left in memory, for backward_queries.cuh.
//
// Tiles begin at multiples of 64 from row or key 0 and are taken in ascending order; one that is hidden from a row or
// key adds zeros. Zero times NaN is NaN: own rows whose gradients are not finite are marked, for
// attention_backward_naive.
#pragma once

#include "cuda/hopper/fragment.cuh"
#include "cuda/kernels/backward_config.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {

// The thread block's own rows or keys, and the tiles of the other side that they meet.
template <class C>
struct BackwardBlock {
  using Rows = Tiling<C::kOwn>;
  using Keys = Blocking<C::kOwn>;

  const BackwardParams& params;
  const AttentionBackwardParams& p;
  Head head;
  KeyBounds32 bounds;
  int own, own_end;  // the first own row or key, and the end of those that exist
  int other, tiles;  // the tiles of the other side that some own row or key meets: from a multiple of 64 on

  struct Start {
    std::int64_t b, hk, own;
  };
  // Within a section, the longest tiles of causal calls come first.
  __device__ static Start find(const BackwardParams& params) {
    const int in_section = params.section * params.tiles, first = static_cast<int>(blockIdx.x) / in_section,
              left = static_cast<int>(blockIdx.x) % in_section;
    const int heads = min(params.section, params.heads - first * params.section);
    const int head = params.first_head + first * params.section + left % heads, tile = left / heads;
    if constexpr (C::kOfKeys) {
      const auto found = Keys::find(params.p, std::int64_t{head} * params.tiles + tile);
      return {found.b, found.hk, found.key};
    } else {
      const auto found = Rows::find(params.p, head, params.tiles - 1 - tile);
      return {found.b, found.hk, found.row};
    }
  }

  __device__ explicit BackwardBlock(const BackwardParams& params) : BackwardBlock(params, find(params)) {}

  __device__ int rows() const { return static_cast<int>(head.len_q * p.group); }
  __device__ int keys() const { return static_cast<int>(head.len_k); }
  __device__ std::byte* ds_tile(int key_tile, int row_tile) const {
    const std::int64_t in_launch = head.b * p.hk + head.hk - params.first_head;
    return params.ds + ((in_launch * params.ds_keys + key_tile) * params.ds_rows + row_tile) * kDsTileBytes;
  }
  // What the math warpgroups need of a tile of rows.
  __device__ const RowsOfTile* rows_of(int row) const {
    return params.rows.tiles + BackwardTiling::number(p, head.b, head.hk, row);
  }
  // The own rows or keys that have a gradient to store: also keys past a sequence's end, if they have memory.
  __device__ int store_end() const { return C::kOfKeys && p.total_k < 0 ? static_cast<int>(p.sk) : own_end; }

  // The rows or keys of the other side that own ones [from, to) meet.
  __device__ KeyRange32 others_of(int from, int to) const {
    const Divisor& group = params.group;
    to = min(to, own_end);
    if (from >= to) return {0, 0};
    if constexpr (C::kOfKeys) {
      // Both ends of what a row sees rise with its token t: keys [t + first, t + last).
      const int tokens = static_cast<int>(head.len_q), in_group = static_cast<int>(group.by);
      return {min(max(from - bounds.last + 1, 0), tokens) * in_group,
              min(max(to - bounds.first, 0), tokens) * in_group};
    } else {
      return {bounds.first_of(group.quotient(from)), bounds.last_of(group.quotient(to - 1))};
    }
  }
  // The tiles of the other side, counted from the first, that the 64 own rows or keys from `first` on meet.
  __device__ KeyRange32 tiles_of(int first) const {
    const auto [from, to] = others_of(first, first + kBackwardTile);
    if (from >= to) return {0, 0};
    return {(from - other) / kBackwardTile, (to - other + kBackwardTile - 1) / kBackwardTile};
  }
  // Whether each of these rows sees each of these keys. Rows are counted in rows, not tokens.
  __device__ bool all_see(int first_row, int last_row, int first_key, int last_key) const {
    if (last_row >= rows()) return false;
    return bounds.first_of(params.group.quotient(last_row)) <= first_key &&
           bounds.last_of(params.group.quotient(first_row)) > last_key;
  }

 private:
  __device__ BackwardBlock(const BackwardParams& params, const Start& start)
      : params(params),
        p(params.p),
        head(params.p, start.b, start.hk),
        bounds(params.p.score, head, 0),
        own(static_cast<int>(start.own)) {
    own_end = min(own + C::kOwn, C::kOfKeys ? keys() : rows());
    const auto [from, to] = others_of(own, own_end);
    other = from / kBackwardTile * kBackwardTile,
    tiles = from < to ? (to - other + kBackwardTile - 1) / kBackwardTile : 0;
  }
};

// What the producer loads: 64 rows of q and dout, or keys and values, at a time.
template <class C>
struct BackwardLoads {
  const BackwardBlock<C>& block;
  const Ring<C::kStages>& ring;
  const std::uint32_t own, own_full;  // where own rows go, and their barrier

  // By the warpgroup's threads: any rows.
  __device__ void by_threads() const {
    for (int group = 0; group < C::kGroups; ++group)
      copy<C::kOfKeys>(own + group * kBackwardTile * 128, C::kOwnPanel, block.own + kBackwardTile * group);
    copy_commit();
    const auto arrive = [](std::uint32_t barrier) {
      fence_async_proxy();
      barrier_arrive(barrier);
    };
#pragma unroll 1
    for (int n = 0; n < block.tiles; ++n) {
      ring.wait_empty(n);
      const int first = block.other + n * kBackwardTile;
      copy<!C::kOfKeys>(ring.slot(n), C::kOtherPanel, first);
      if constexpr (C::kOfKeys) {
        const auto* const of_rows = reinterpret_cast<const std::byte*>(block.rows_of(first));
        if (threadIdx.x < kTileBytes / 16)
          copy16(ring.slot(n) + C::kRowsAt + 16 * threadIdx.x, of_rows + 16 * threadIdx.x);
      }
      copy_commit();
      copy_wait<1>();
      arrive(n == 0 ? own_full : ring.full(n - 1));
    }
    copy_wait<0>();
    if (block.tiles > 0) arrive(ring.full(block.tiles - 1));
  }

  // The same by TMA, by one thread.
  __device__ void by_tma() const {
    if (block.tiles == 0) return;  // nobody would wait for own rows: the thread block might end before they arrive
    barrier_arrive_expecting(own_full, 2 * C::kOwnBytes);
    for (int group = 0; group < C::kGroups; ++group)
      box<C::kOfKeys>(own + group * kBackwardTile * 128, C::kOwnPanel, block.own + kBackwardTile * group, own_full);
#pragma unroll 1
    for (int n = 0; n < block.tiles; ++n) {
      ring.wait_empty(n);
      const int first = block.other + n * kBackwardTile;
      barrier_arrive_expecting(ring.full(n), 2 * C::kOtherBytes + (C::kOfKeys ? kTileBytes : 0));
      box<!C::kOfKeys>(ring.slot(n), C::kOtherPanel, first, ring.full(n));
      if constexpr (C::kOfKeys)
        bulk_load(ring.slot(n) + C::kRowsAt, block.rows_of(first), kTileBytes, ring.full(n), true);
    }
  }

 private:
  static constexpr int kTileBytes = sizeof(RowsOfTile);

  // Each warp has 16 of the rows.
  template <bool kKeys>
  __device__ void copy(std::uint32_t to, int panel_bytes, int first) const {
    const auto& p = block.p;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, number = first + warp_row + lane;
    const bool exists = lane < 16 && number < (kKeys ? block.keys() : block.rows());
    const Row row = row_of(block.head, kKeys || !exists ? 0 : number);
    const auto copy_tensor = [&](std::uint32_t place, const void* x, const Strides& s, std::int64_t size, bool vector) {
      const std::int64_t at = kKeys ? block.head.key_at(s, number) : row_at(s, block.head, row);
      load_rows<C::kSize, 4>(16, place + warp_row * 128, panel_bytes, x, exists ? at : -1, s.d, static_cast<int>(size),
                             vector, 0);
    };
    const std::uint32_t second = to + C::kPanels * panel_bytes;
    if constexpr (kKeys) {
      copy_tensor(to, p.k, p.k_stride, p.d, block.params.kv_vector);
      copy_tensor(second, p.v, p.v_stride, p.dv, block.params.kv_vector);
    } else {
      copy_tensor(to, p.q, p.q_stride, p.d, block.params.q_vector);
      copy_tensor(second, p.dout, p.dout_stride, p.dv, block.params.dout_vector);
    }
  }
  template <bool kKeys>
  __device__ void box(std::uint32_t to, int panel_bytes, int first, std::uint32_t barrier) const {
    const auto& params = block.params;
    const auto& p = params.p;
    const int hk = static_cast<int>(block.head.hk);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel, to += panel_bytes) {
      if constexpr (kKeys) {
        const int b = p.total_k < 0 ? static_cast<int>(block.head.b) : 0,
                  row = static_cast<int>(block.head.k_first) + first;
        tma_load(to, &params.k, panel * 64, row, hk, b, barrier, true);
        tma_load(to + C::kPanels * panel_bytes, &params.v, panel * 64, row, hk, b, barrier, true);
      } else {
        const int b = p.total_q < 0 ? static_cast<int>(block.head.b) : 0,
                  token = static_cast<int>(block.head.q_first) + params.group.quotient(first);
        tma_load(to, &params.q, panel * 64, 0, token, hk, b, barrier);
        tma_load(to + C::kPanels * panel_bytes, &params.dout, panel * 64, 0, token, hk, b, barrier);
      }
    }
  }
};

// The gradients of 64 own rows or keys, as accumulators of a warpgroup.
template <class C>
struct GradientRows {
  const BackwardBlock<C>& block;
  const int first;                                                                // of the 64
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // row: and row + 8
  bool broken[2] = {};                                                            // not finite

  template <int kCount>
  __device__ void put(const Gradient& to, const float (&x)[kCount], float scale, int size) {
    const bool odd = lane % 2, whole = to.type != DType::f32 && size == 2 * kCount && is_vector(to.data, to.stride, 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int number = first + row + 8 * h;
      const bool exists = to && number < block.store_end();
      const auto low = [&](int column) { return x[column / 2 + 2 * h] * scale; };
      const auto high = [&](int column) { return x[column / 2 + 2 * h + 1] * scale; };
      bool finite = true;
#pragma unroll
      for (int column = 0; column < 2 * kCount; column += 8)
        finite &= is_finite(low(column)) && is_finite(high(column));
      broken[h] |= exists && !finite;
      std::int64_t at = 0;
      if (exists) {
        if constexpr (C::kOfKeys) at = block.head.key_at(to.stride, number);
        else at = row_at(to.stride, block.head, row_of(block.head, number));
      }
      if (whole) {
        // Neighbouring lanes exchange pairs, so that each stores four columns: even lanes from `column` on, odd lanes
        // from column + 8.
        const auto word = [&](int column) {
          return to.type == DType::f16 ? pack<__half>(low(column), high(column))
                                       : pack<__nv_bfloat16>(low(column), high(column));
        };
        auto* const start = static_cast<std::uint16_t*>(to.data) + at + lane % 4 * 2;
#pragma unroll
        for (int column = 0; column < 2 * kCount; column += 16) {
          const std::uint32_t here = word(column), there = word(column + 8);
          const std::uint32_t got = __shfl_xor_sync(~0u, odd ? here : there, 1);
          const uint2 four = odd ? make_uint2(got, there) : make_uint2(here, got);
          if (exists) *reinterpret_cast<uint2*>(start + column + (odd ? 6 : 0)) = four;
        }
      } else if (exists) {
#pragma unroll
        for (int column = 0; column < 2 * kCount; column += 8) {
          const int c = column + lane % 4 * 2;
          if (c < size) cuda::store(to.data, to.type, at + c * to.stride.d, low(column));
          if (c + 1 < size) cuda::store(to.data, to.type, at + (c + 1) * to.stride.d, high(column));
        }
      }
    }
  }

  // Marks those that are not finite.
  __device__ void mark(const BackwardRows& rows) const {
    const unsigned marked = rows_of_warp(broken);
    if (lane != 0 || first >= block.store_end()) return;
    const std::int64_t tile = C::kOfKeys ? BackwardBlocking::number(block.head, first)
                                         : BackwardTiling::number(block.p, block.head.b, block.head.hk, first);
    auto* const masks = reinterpret_cast<std::uint16_t*>(C::kOfKeys ? rows.key_masks : rows.row_masks);
    masks[tile * 4 + threadIdx.x / 32 % 4] = static_cast<std::uint16_t>(marked);
  }
};

// A math warpgroup: the gradients of its 64 own rows or keys.
template <class C>
struct BackwardMath {
  using T = typename C::Element;
  static constexpr int kSums = C::kSize / 2;
  static constexpr bool kOfKeys = C::kOfKeys;

  const BackwardBlock<C>& block;
  const Ring<C::kStages>& ring;
  const std::uint32_t own;  // the first own row of the warpgroup in shared memory
  const int first;          // and its number
  const std::uint32_t ds;   // the place of its dS
  const int lane = threadIdx.x % 32, own_row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // own_row: and own_row + 8

  float sums[kSums], value_sums[kOfKeys ? kSums : 1];  // dK and dV, or dQ
  float lse[2], delta[2], dp_factor[2];                // of own rows
  std::uint32_t weights[16], derivatives[16];

  __device__ static void multiply(float (&to)[32], std::uint32_t a, std::uint32_t b) {
#pragma unroll
    for (int i = 0; i < C::kSize / 16; ++i) {
      const int panel = i / 4, step = i % 4 * 2;
      wgmma_abt<T>(to, matrix_at(a) + panel * (C::kOwnPanel / 16) + step,
                   matrix_at(b) + panel * (C::kOtherPanel / 16) + step, i > 0);
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
    return own_row + 8 * (i / 2 % 2);
  }
  __device__ int other_of(int i) const {
    return i / 4 * 8 + lane % 4 * 2 + i % 2;
  }

  // Bit i: the lane's i-th pair is hidden.
  __device__ std::uint32_t hidden(int n) const {
    const int other = block.other + n * kBackwardTile, last = kBackwardTile - 1;
    if (kOfKeys ? block.all_see(other, other + last, first, first + last)
                : block.all_see(first, first + last, other, other + last))
      return 0;
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = kOfKeys ? other + other_of(i) : first + own_of(i),
                key = kOfKeys ? first + own_of(i) : other + other_of(i);
      const int token = block.params.group.quotient(row);
      const bool sees = row < block.rows() && key >= block.bounds.first_of(token) && key < block.bounds.last_of(token);
      bits |= static_cast<std::uint32_t>(!sees) << i;
    }
    return bits;
  }

  // s becomes P.
  __device__ void weigh(float (&s)[32], std::uint32_t hides, std::uint32_t of_rows) {
    const float scale = block.p.score.scale_log2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 of_pair;
      if constexpr (kOfKeys) of_pair = load8(of_rows + 4 * other_of(4 * j));
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        const float own_lse = kOfKeys ? (i % 2 ? of_pair.y : of_pair.x) : lse[i / 2 % 2];
        // No weight is above 1 whatever rounding errors the score and lse have.
        s[i] = exp2_approx(min_or_nan(fmaf(s[i], scale, -own_lse), 0));
      }
    }
    if (hides != 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (hides >> i & 1) s[i] = 0;
    }
  }
  // dp becomes dS.
  __device__ void derive(const float (&s)[32], float (&dp)[32], std::uint32_t hides, std::uint32_t of_rows) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float4 of_pair;
      if constexpr (kOfKeys) of_pair = load16(of_rows + 4 * kBackwardTile + 8 * other_of(4 * j));
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        const float of_delta = kOfKeys ? (i % 2 ? of_pair.z : of_pair.x) : delta[i / 2 % 2],
                    factor = kOfKeys ? (i % 2 ? of_pair.w : of_pair.y) : dp_factor[i / 2 % 2];
        dp[i] = s[i] * fmaf(dp[i], factor, -of_delta);
      }
    }
    if (hides != 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (hides >> i & 1) dp[i] = 0;
    }
  }
  // Adds tile n's part to the sums; asynchronous.
  __device__ __forceinline__ void add_products(int n) {
    pin(derivatives), pin(sums);
    if constexpr (kOfKeys) pin(weights), pin(value_sums);
    wgmma_fence();
    if constexpr (kOfKeys) add_product(value_sums, weights, ring.slot(n) + C::kOtherBytes);
    add_product(sums, derivatives, ring.slot(n));
    if constexpr (C::kKeepsDs) keep_ds(n);
  }
  // P and dS of tile n, while the tensor cores may be adding products of tile n - 1, unless `is_first`. (Operands are
  // rounded when no product runs: else ptxas makes every product wait for the one before.)
  __device__ __forceinline__ void differentiate(int n, bool is_first) {
    const std::uint32_t tile = ring.slot(n), of_rows = tile + C::kRowsAt;
    ring.wait_full(n);
    float s[32] = {}, dp[32] = {};
    pin(s), pin(dp);
    wgmma_fence();
    multiply(s, own, tile);
    multiply(dp, own + C::kOwnBytes, tile + C::kOtherBytes);
    const std::uint32_t hides = hidden(n);
    wgmma_wait<1>();
    pin(s);
    if (!is_first) ring.release(n - 1);
    weigh(s, hides, of_rows);
    finish_products();
    pin(dp);
    derive(s, dp, hides, of_rows);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      derivatives[i] = pack<T>(dp[2 * i], dp[2 * i + 1]);
      if constexpr (kOfKeys) weights[i] = pack<T>(s[2 * i], s[2 * i + 1]);
    }
  }
  __device__ __forceinline__ void finish_products() {
    wgmma_wait<0>();
    pin(sums);
    if constexpr (kOfKeys) pin(value_sums);
  }
  // Starts to store dS of tile n: each warp its 16 keys.
  __device__ __forceinline__ void keep_ds(int n) const {
    const std::uint32_t from = ds + threadIdx.x / 32 % 4 * 2048, row = from + lane % 16 * 128;
    if (lane == 0) tma_store_wait_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      store_matrices(row + chunk_place<128>(lane % 8, 2 * j + lane / 16) * 16, derivatives[4 * j],
                     derivatives[4 * j + 1], derivatives[4 * j + 2], derivatives[4 * j + 3]);
    fence_async_proxy();
    __syncwarp();
    if (lane != 0) return;
    bulk_store_past_l2(
        block.ds_tile(first / kBackwardTile, block.other / kBackwardTile + n) + threadIdx.x / 32 % 4 * 2048, from,
        2048);
    tma_store_commit();
  }
  // Passes by tiles [from, to), of which no own row or key sees anything.
  __device__ void skip(int from, int to) const {
#pragma unroll 1
    for (int n = from; n < to; ++n) {
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
    if constexpr (!kOfKeys) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowsOfTile* const tile = first < block.rows() ? block.rows_of(first) : nullptr;
        const RowDelta found = tile ? tile->delta[own_row + 8 * h] : RowDelta{0, 0};
        lse[h] = tile ? tile->lse_log2[own_row + 8 * h] : kInfinity;
        delta[h] = found.delta, dp_factor[h] = found.dp_factor;
      }
    }
    const auto [begin, end] = block.tiles_of(first);
    skip(0, begin);
    if constexpr (C::kOverlaps) {
      if (begin < end) {
        differentiate(begin, true);
#pragma unroll 1
        for (int n = begin + 1; n < end; ++n) {
          add_products(n - 1);
          differentiate(n, false);
        }
        add_products(end - 1);
        finish_products();
        ring.release(end - 1);
      }
    } else {
#pragma unroll 1
      for (int n = begin; n < end; ++n) {
        differentiate(n, true);
        add_products(n);
        finish_products();
        ring.release(n);
      }
    }
    if constexpr (C::kKeepsDs) tma_store_wait_read();
    skip(max(begin, end), block.tiles);
  }

  // Stores the warpgroup's gradients, and marks those that are not finite.
  __device__ void store() const {
    const auto& p = block.p;
    GradientRows<C> rows{block, first};
    if constexpr (kOfKeys) {
      rows.put(p.grad_k, sums, p.scale, static_cast<int>(p.d));
      rows.put(p.grad_v, value_sums, 1, static_cast<int>(p.dv));
    } else {
      rows.put(p.grad_q, sums, p.scale, static_cast<int>(p.d));
    }
    rows.mark(block.params.rows);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) attention_backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[2 * C::kStages + 1];
  std::uint32_t data = (shared_address(shared) + 1023) / 1024 * 1024;  // the swizzle's unit
  pin(data);
  const Ring<C::kStages> ring{shared_address(barriers), data + 2 * C::kOwnBytes, C::kPlaceBytes};
  const std::uint32_t own_full = ring.barriers + 16 * C::kStages;
  if (threadIdx.x == 0) {
    const int writers = params.tma ? 1 : 128;
    ring.init(writers, 4 * C::kGroups);
    barrier_init(own_full, writers);
    if (params.tma)
      for (const CUtensorMap* map : {&params.q, &params.k, &params.v, &params.dout}) prefetch_map(map);
    fence_barrier_init();
  }
  __syncthreads();
  launch_dependent_grids();
  wait_on_dependent_grids();
  const BackwardBlock<C> block(params);
  if (block.own >= block.store_end()) return;
  if (threadIdx.x < 128) {
    registers_decrease<C::kLoadRegisters>();
    const BackwardLoads<C> loads{block, ring, data, own_full};
    if (!params.tma) loads.by_threads();
    else if (threadIdx.x == 0) loads.by_tma();
  } else {
    registers_increase<C::kMathRegisters>();
    const int group = uniform(threadIdx.x / 128 - 1);
    BackwardMath<C> math{block, ring, data + group * kBackwardTile * 128, block.own + group * kBackwardTile,
                         data + C::kDsAt + group * kDsTileBytes};
    math.run(own_full);
    math.store();
  }
}

}  // namespace rapt::cuda
