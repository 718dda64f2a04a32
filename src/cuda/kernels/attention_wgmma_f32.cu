// Attention of fp32 on Hopper's 16-bit tensor cores, as exact as fp32: every operand is the sum of two planes of fp16,
// hi + lo with 22 bits, and of the four products of planes the three that count are done. Numbers are scaled by powers
// of two beforehand, so that the range of fp16 is none, and every block's P V starts from zero and is added to O in
// fp32: tensor cores round sums towards zero, which adds up over long ones.
//
// A first kernel writes the planes of Q, K and V as shared memory is to hold them; in the second, which has the
// schedule of attention_wgmma, one thread loads them by bulk copies. A step issues P V of the block before and Q K^T
// of this one; up to 128 columns the two other warpgroups take turns at that, so that one's softmax runs beside the
// other's products.
//
// Past 128 columns (kLarge) P V is done a part of the columns at a time, since registers hold little beside O, and
// shared memory has room for one block of K and of V: the next K comes while P V is at work, the next V during Q K^T.
// Scores are then sums of two, since tensor cores lose more to rounding in long ones.
//
// What 22 bits and powers of two do not carry is noted row by row, and attention_simt does those rows again.
#include <cuda_runtime.h>

#include <cmath>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/planes.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/schedule.cuh"

namespace rapt::cuda {
namespace {

// Rows are done again if:
constexpr float kHugeScore = 0x1p8f;      // a score that counts is this large, in log2 units: fp32 has two more bits
constexpr float kCoarseScore = 0x1p-15f;  // scales of a row of Q and of K have this product: see Rows::store()

// The kernels for head sizes up to kSize.
template <int kSize_, bool kModified_>
struct Config {
  static constexpr int kSize = kSize_;
  static constexpr bool kModified = kModified_;  // scores need more than a scale
  static constexpr int kGroups = 2, kThreads = 128 * (kGroups + 1);
  static constexpr bool kLarge = kSize > 128;
  static constexpr int kLoadRegisters = kLarge ? 40 : 56, kMathRegisters = kLarge ? 232 : 224;
  static_assert(kLoadRegisters + kGroups * kMathRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "or warpgroups wait for registers for ever: there are no more than the launch took");
  static constexpr int kListers = 96;  // threads that put tiles into shared memory
  static constexpr int kRows = kGroupRows * kGroups, kKeys = kSize == 64 ? 128 : kSize == 256 ? 32 : 64;
  static constexpr int kStages = kLarge ? 1 : 2;                  // blocks of K and of V at a time
  static constexpr int kPart = kLarge ? 64 : kSize;               // columns of P V at a time
  static constexpr int kGroupBytes = 2 * kGroupRows * kSize * 2;  // both planes of a warpgroup's rows of Q
  static constexpr int kBlockBytes = 2 * kKeys * kSize * 2;
  static constexpr int kScales = kKeys + 4;  // of a block: of the rows of K, of V, and three for 16 bytes
  static constexpr int kAllScales = kStages * kScales + kRows;  // of the stages, then of Q
  static constexpr int kSharedBytes = kGroups * kGroupBytes + 2 * kStages * kBlockBytes + kAllScales * 4 + 1024;
  using Tiles = Tiling<kRows>;
  using Blocks = Blocking<kKeys>;
};

struct Call : Planes {
  float scale;          // of scores; Q takes the sign
  bool late;            // it counts after the modifiers
  bool out_vector;      // 16 bytes at a time
  std::uint16_t* redo;  // of 16 rows each: a bit for each that attention_simt must do
};

template <class C>
using Stages = Ring<C::kStages>;
using Own = Ring<1>;  // a warpgroup's Q

// Where a tile's Q, and K and V of its first block, lie among the planes.
struct Numbers {
  int tile, block;
};
template <class C>
__device__ Numbers numbers_of(const AttentionParams& p, const Place& place) {
  const Head head(p, place.b, place.hk);
  // Rows that see no key have a block all the same.
  const std::int64_t key = place.end > place.begin ? place.key : C::Blocks::origin(head);
  return {static_cast<int>(C::Tiles::number(p, place.b, place.hk, place.row)),
          static_cast<int>(C::Blocks::number(head, key))};
}

// Q, K and V to shared memory: one thread.
template <class C>
__device__ void load(const Call& call, const Listed& listed, const Tile<C>* tiles, const Own (&q)[C::kGroups],
                     const Stages<C>& k, const Stages<C>& v, std::uint32_t scales) {
  for (int t = 0, n = 0;; ++t) {
    listed.wait_full(t);
    const Tile<C>& tile = tiles[t % kTiles];  // nobody is done with it before all of it is loaded
    if (tile.blocks == 0) break;
    const Numbers numbers = numbers_of<C>(call.p, tile);
#pragma unroll 1
    for (int i = tile.blocks - 1; i >= 0; --i, ++n) {
      const std::int64_t block = std::int64_t{numbers.block} + i;
      k.wait_empty(n);
      barrier_arrive_expecting(k.full(n), C::kBlockBytes + C::kScales * 4);
      bulk_load(scales + n % C::kStages * (C::kScales * 4), call.scales + block * C::kScales, C::kScales * 4, k.full(n),
                true);
      bulk_load(k.place(n), call.k + block * C::kBlockBytes, C::kBlockBytes, k.full(n), true);
      for (int group = 0; group < C::kGroups && i == tile.blocks - 1; ++group) {
        const Own& own = q[group];
        own.wait_empty(t);
        barrier_arrive_expecting(own.full(t), C::kGroupBytes + kGroupRows * 4);
        const std::int64_t from = std::int64_t{numbers.tile} * C::kGroups + group;
        bulk_load(scales + (C::kStages * C::kScales + group * kGroupRows) * 4, call.q_scale + from * kGroupRows,
                  kGroupRows * 4, own.full(t), false);
        bulk_load(own.place(t), call.q + from * C::kGroupBytes, C::kGroupBytes, own.full(t), false);
      }
      v.wait_empty(n);
      barrier_arrive_expecting(v.full(n), C::kBlockBytes);
      bulk_load(v.place(n), call.v + block * C::kBlockBytes, C::kBlockBytes, v.full(n), true);
    }
  }
}

// A math warpgroup's state.
template <class C>
struct Rows {
  static constexpr int kScores = C::kKeys / 2, kOut = C::kSize / 2, kPart = C::kPart / 2;

  const Call& call;
  const int lane, own, column;  // own: first row of the warp
  float o[kOut];
  std::uint32_t hi[kScores / 2] = {}, lo[kScores / 2] = {};  // weights of the block before the one in s, as operand A
  float value_scale = 0;                                     // of that block
  float m[2], l[2], scale[2];  // maximum and sum, the latter of the lane's columns; what the maximum's move makes of O
  float factor[2];             // of scores
  // Largest of what was seen: scales of rows of K, by the lane; scores before modifiers, likewise; scales of blocks of
  // V.
  float key_scale[2], raw[2], top_value_scale[2];

  __device__ Rows(const Call& call)
      : call(call), lane(threadIdx.x % 32), own(threadIdx.x / 32 * 16 - kGroupRows), column(lane % 4 * 2) {}

  __device__ void begin(const Tile<C>& tile, const float* scales) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = own + lane / 4 + 8 * h;
      m[h] = tile.of_row[at].sink;
      l[h] = lane % 4 == 0 && m[h] != -kInfinity ? kOne : 0.f;
      factor[h] = scales[at] * call.scale;
      key_scale[h] = raw[h] = top_value_scale[h] = 0;
    }
  }

  // From products of keys [key, ...), counted like `first`, to scores but for `factor`. `scales` are the block's.
  __device__ void finish_scores(float (&s)[kScores], const Tile<C>& tile, int key, const float* scales) {
    const auto keys = [&](int j) { return *reinterpret_cast<const float2*>(scales + j + column); };
    int from[2], to[2];  // the columns that rows see, as if the lane's first were 0
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile.of_row[own + lane / 4 + 8 * h];
      from[h] = row.first - key - column, to[h] = row.last - key - column;
    }
    if constexpr (C::kModified) {
      // Registers have no index: each time the first four are done, and all move up.
#pragma unroll 1
      for (int j = 0; j < C::kKeys; j += 8) {
        const float2 of_key = keys(j);
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = j + i % 2, h = i / 2;
          const float by = i % 2 ? of_key.y : of_key.x, x = s[i] * by * (call.late ? 1.f : factor[h]);
          const auto& row = tile.of_row[own + lane / 4 + 8 * h];
          four[i] = at < from[h] || at >= to[h]
                        ? -kInfinity
                        : finish_score(call.p.score, {tile.b, row.q_head, row.token, tile.key + key + column + at},
                                       row.nearest, x);
          if (four[i] == -kInfinity) continue;
          key_scale[h] = fmaxf(key_scale[h], by);
          if (!call.late) raw[h] = fmaxf(raw[h], fabsf(x));
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = i + 4 < kScores ? s[i + 4] : four[i + 4 - kScores];
      }
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
      float most = 0;
#pragma unroll
      for (int j = 0; j < C::kKeys; j += 8) {
        const float2 of_key = keys(j);
        most = fmaxf(most, fmaxf(of_key.x, of_key.y));
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j / 2 + i] *= i % 2 ? of_key.y : of_key.x;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) key_scale[h] = fmaxf(key_scale[h], most);
    }
    value_scale = scales[C::kKeys];
  }

  // To weights.
  __device__ void softmax(float (&s)[kScores]) {
    float by[2], minus[2], sum[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -kInfinity;
#pragma unroll
      for (int i = 2 * h; i < kScores; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
      by[h] = C::kModified && !call.late ? 1.f : factor[h];
      top = over_row(top, Max()) * by[h];
      if (top != -kInfinity) top_value_scale[h] = fmaxf(top_value_scale[h], value_scale);
      const float before = m[h];
      if (top > before) m[h] = top;
      minus[h] = kShift - reference(m[h]);
      scale[h] = exp2_approx(before - reference(m[h]));
    }
    pin(s);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int h = i / 2 % 2;
      const float a = exp2_approx(fmaf(s[i], by[h], minus[h])), b = exp2_approx(fmaf(s[i + 1], by[h], minus[h]));
      sum[h] += a + b;
      split(a, b, hi[i / 2], lo[i / 2]);
    }
    pin(hi);  // or the compiler moves the exponentials to the products that need them
    pin(lo);
#pragma unroll
    for (int h = 0; h < 2; ++h) l[h] = fmaf(l[h], scale[h], sum[h]);
  }

  // From column part * C::kPart on.
  __device__ void add(const float (&pv)[kPart], int part) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      float& x = o[part * kPart + i];
      x = fmaf(x, scale[i / 2 % 2], pv[i] * value_scale);
    }
  }

  // Results of the tile.
  __device__ void store(const Tile<C>& tile) {
    const AttentionParams& p = call.p;
    bool bad[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile.of_row[own + lane / 4 + 8 * h];
      l[h] = over_row(l[h], Sum());
      if (row.lse >= 0 && lane % 4 == 0) p.lse[row.lse] = lse_of(m[h], l[h] * (1 / kOne), row.alibi_shift);
      const float about = __fdividef(1, l[h]);  // and a step of Newton's method
      const float inverse = l[h] == 0 ? 0.f : fmaf(about, fmaf(-l[h], about, 1), about) * kOne;
      float nothing = l[h] * 0, smallest = kInfinity, largest = 0;  // nothing: or NaN
#pragma unroll
      for (int i = 0; i < kOut; ++i) {
        if (i / 2 % 2 != h) continue;
        o[i] *= inverse;
        nothing = fmaf(o[i], 0, nothing);
        largest = fmaxf(largest, fabsf(o[i]));
        if (o[i] != 0) smallest = fminf(smallest, fabsf(o[i]));
      }
      // Numbers of V below 2^-3 of their scaled block have lost digits. Sums of many have others beside them; what is
      // mostly one key's is told by its size, and so are rows that are all small.
      const float coarse = top_value_scale[h] * kOne * (kLoError * 0x1p21f);
      const bool small = over_row(largest, Max()) < coarse || (l[h] < 4 * kOne && smallest < coarse);
      // Likewise those of Q and K, 2^-25 off beside up to 2^15: the score by less than the product of both scales
      // times 2^-6, whatever else is in it.
      const bool carried = fabsf(m[h]) < kHugeScore && raw[h] < kHugeScore && key_scale[h] * factor[h] <= kCoarseScore;
      bad[h] = row.out >= 0 && !(nothing == 0 && !small && (m[h] == -kInfinity || carried));
    }
    mark_rows(call.redo, p, tile, own, bad);
    store_rows(p, call.out_vector, tile, own, o);
  }
};

// A math warpgroup.
template <class C>
__device__ void attend(const Call& call, const Listed& listed, const Tile<C>* tiles, const Own& q, const Stages<C>& k,
                       const Stages<C>& v, const float* scales, int group) {
  constexpr int kParts = C::kSize / C::kPart, kSteps = C::kSize / 16 / (C::kLarge ? 2 : 1);
  constexpr int kLow = kGroupRows * C::kSize / 8;  // of descriptors, from hi of Q to lo
  constexpr int kBlockLow = C::kKeys * C::kSize / 8;
  Rows<C> rows(call);
  float s[Rows<C>::kScores] = {}, pv[Rows<C>::kPart] = {};
  listed.wait_full(0);
  bool more = tiles[0].blocks > 0;
  if (!more) return;

  // Turns at issuing products: barrier 1 + group opens a warpgroup's. With one place for a block they would keep it in
  // use for half a step longer.
  if (!C::kLarge && group == C::kGroups - 1) named_arrive(1, 256);
  const std::uint32_t q_matrix = matrix_at(q.place(0));
  int t = 0;               // tiles so far
  int block = 0;           // of the tile, whose scores these are
  bool starts = true;      // it is its tile's first, or there is no more; O is complete once the weights are used
  for (int n = 0;; ++n) {  // K and V blocks so far; V's are one behind
    if (more && starts) q.wait_full(t);
    if (more && !C::kLarge) k.wait_full(n);
    if (n > 0) v.wait_full(n - 1);

    // P V of the block before, then S = Q K^T of this one. The first and the last time one of them is for nothing.
    if constexpr (!C::kLarge) named_sync(1 + group, 256);
    const std::uint32_t k_matrix = matrix_at(k.place(n));
    const std::uint32_t v_matrix = matrix_at(v.place(n + C::kStages - 1), C::kKeys * 128);
    const auto multiply_values = [&](int part) {
#pragma unroll
      for (int product = 0; product < 3; ++product)  // small ones first
#pragma unroll
        for (int i = 0; i < C::kKeys / 16; ++i)
          wgmma_ab<__half>(pv, (product == 1 ? rows.lo : rows.hi) + 4 * i,
                           v_matrix + part * (C::kPart / 64 * C::kKeys * 8) + i * 128 + (product == 0 ? kBlockLow : 0),
                           product + i > 0);
      wgmma_commit();
    };
    const auto multiply_keys = [&](float(&sums)[Rows<C>::kScores], int chain) {
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
    for (int part = 0; part < kParts - 1; ++part) {
      wgmma_fence();
      multiply_values(part);
      wgmma_wait<0>();
      pin(pv);
      rows.add(pv, part);  // the first time to what begin() forgets
      pin(pv);
    }
    if (more && C::kLarge) k.wait_full(n);  // late: if there is one place, it may be on its way
    wgmma_fence();
    multiply_values(kParts - 1);
    multiply_keys(s, 0);
    wgmma_wait<1>();
    pin(pv);
    if constexpr (!C::kLarge) named_arrive(1 + (group + 1) % C::kGroups, 256);
    if (n > 0) {
      v.release(n - 1);
      rows.add(pv, kParts - 1);
    }
    if constexpr (C::kLarge) {  // the other half of the columns, where P V was
      auto& others = reinterpret_cast<float(&)[Rows<C>::kScores]>(pv);
      pin(pv);
      wgmma_fence();
      multiply_keys(others, 1);
      wgmma_wait<0>();
      pin(s);
      pin(pv);
#pragma unroll
      for (int i = 0; i < Rows<C>::kScores; ++i) s[i] += others[i];
    } else {
      wgmma_wait<0>();
      pin(s);
    }

    if (starts) {
      if (n > 0) {
        rows.store(tiles[(t - 1) % kTiles]);
        __syncwarp();
        listed.release(t - 1);
      }
      if (!more) break;
      rows.begin(tiles[t % kTiles], scales + C::kStages * C::kScales);
      block = tiles[t % kTiles].blocks;
    }
    const Tile<C>& tile = tiles[t % kTiles];
    starts = --block == 0;
    rows.finish_scores(s, tile, block * C::kKeys, scales + n % C::kStages * C::kScales);
    fence_async_proxy();  // scales were read by ordinary loads, and bulk copies follow
    __syncwarp();
    k.release(n);
    if (starts) q.release(t);
    rows.softmax(s);
    if (starts) {
      listed.wait_full(++t);
      more = tiles[t % kTiles].blocks > 0;
    }
  }
  if (!C::kLarge && group == 0) named_sync(1, 256);  // the last turn is nobody's
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma_f32(const __grid_constant__ Call call) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[4 * C::kStages + 2 * C::kGroups + 2 * kTiles];
  __shared__ Tile<C> tiles[kTiles];
  const std::uint32_t first = shared_address(barriers), start = shared_address(shared);
  const std::uint32_t data = (start + 1023) / 1024 * 1024;  // the swizzle's unit
  const Stages<C> k{first, data + C::kGroups * C::kGroupBytes, C::kBlockBytes};
  const Stages<C> v{first + 16 * C::kStages, k.data + C::kStages * C::kBlockBytes, C::kBlockBytes};
  const Listed listed{first + 32 * C::kStages};
  const std::uint32_t own = listed.barriers + 16 * kTiles, scales = v.data + C::kStages * C::kBlockBytes;
  const Own q[C::kGroups] = {{own, data}, {own + 16, data + C::kGroupBytes}};
  let_next_start();
  if (threadIdx.x == 0) {
    k.init(1, 4 * C::kGroups);
    v.init(1, 4 * C::kGroups);
    listed.init(C::kListers, 4 * C::kGroups);
    for (const Own& of_group : q) of_group.init(1, 4);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous();
  if (threadIdx.x < 128) {
    registers_decrease<C::kLoadRegisters>();
    if (threadIdx.x == 0) load<C>(call, listed, tiles, q, k, v, scales);
    if (threadIdx.x >= 32) {
      Lister<C> lister{call, listed, tiles};
      for (unsigned i = 0; lister.list(i);) ++i;
    }
  } else {
    registers_increase<C::kMathRegisters>();
    const int group = threadIdx.x / 128 - 1;
    const Own mine{own + group * 16, data + group * C::kGroupBytes};
    attend<C>(call, listed, tiles, mine, k, v, reinterpret_cast<const float*>(shared + (scales - start)), group);
  }
}

// Where things lie in the workspace, and how much of it they take.
template <class C>
std::size_t lay_out(Call& call, std::byte* workspace) {
  const AttentionParams& p = call.p;
  const std::int64_t rows = C::Tiles::heads(p) * C::Tiles::tiles(p) * C::kRows;
  const std::int64_t blocks = C::Blocks::heads(p) * C::Blocks::blocks(p);
  std::size_t bytes = 0;
  const auto place = [&](auto*& to, std::int64_t size) {
    if (workspace) to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(workspace + bytes);
    bytes += static_cast<std::size_t>(size + 127) / 128 * 128;
  };
  place(call.q, rows * C::kSize * 4);
  place(call.k, blocks * C::kBlockBytes);
  place(call.v, blocks * C::kBlockBytes);
  place(call.q_scale, rows * 4);
  place(call.scales, blocks * C::kScales * 4);
  place(call.redo, simt_tiles(p) * 8);
  return bytes;
}

template <class C>
cudaError_t launch(Call& call, std::byte* workspace, cudaStream_t stream) {
  const AttentionParams& p = call.p;
  lay_out<C>(call, workspace);
  cudaError_t status = cudaSuccess;
  if (p.total_q >= 0)
    status = cudaMemsetAsync(call.redo, 0, static_cast<std::size_t>(simt_tiles(p)) * 8, stream);  // some are empty
  if (status != cudaSuccess) return status;
  const int processors = plan_grid<C>(call, 2 * 4 * C::kSize);
  const std::int64_t units =
      std::int64_t{call.heads} * call.tiles * (C::kRows / C::kKeys) + 2 * C::Blocks::heads(p) * C::Blocks::blocks(p);
  status = launch_kernel(false, prepare<Config<C::kSize, false>>, static_cast<unsigned>(units), kPrepareThreads, 0,
                         stream, call);
  if (status != cudaSuccess) return status;
  status = launch_kernel(true, wgmma_f32<C>, processors, C::kThreads, C::kSharedBytes, stream, call);
  if (status != cudaSuccess) return status;
  return attention_simt(p, stream, reinterpret_cast<const std::uint64_t*>(call.redo));
}

// Calls `then` with a call's kSize as a type.
template <class Then>
auto with_size(const AttentionParams& p, Then then) {
  const std::int64_t size = std::max(p.d, p.dv);
  if (size <= 64) return then(std::integral_constant<int, 64>());
  if (size <= 128) return then(std::integral_constant<int, 128>());
  if (size <= 192) return then(std::integral_constant<int, 192>());
  return then(std::integral_constant<int, 256>());
}

}  // namespace

bool wgmma_f32_can_count(const AttentionParams& p) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 28;  // of what is counted in 32 bits
  using Smallest = Config<256, false>::Blocks;
  return std::max(p.sk, p.total_k) < kLimit && std::max(p.sq, p.total_q) < kLimit / p.group && p.b < kLimit &&
         p.hk < kLimit && simt_tiles(p) < kLimit && Smallest::heads(p) < kLimit / Smallest::blocks(p);
}

std::size_t wgmma_f32_workspace(const AttentionParams& p) {
  Call call{};
  call.p = p;
  return with_size(p, [&](auto size) { return lay_out<Config<size, false>>(call, nullptr); });
}

cudaError_t attention_wgmma_f32(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  Call call{};
  call.p = p;
  call.scale = std::fabs(p.score.scale_log2);
  call.late = scales_last(p.score);
  call.q_vector = is_vector(p.q, p.q_stride, 4), call.k_vector = is_vector(p.k, p.k_stride, 4);
  call.v_vector = is_vector(p.v, p.v_stride, 4);
  call.out_vector = is_vector(p.out, p.out_stride, p.out_type == DType::f32 ? 4 : 2);
  return with_size(p, [&](auto size) {
    // Without a scale, masked scores would be -inf * 0.
    if (has_modifiers(p.score) || call.scale == 0) return launch<Config<size, true>>(call, workspace, stream);
    return launch<Config<size, false>>(call, workspace, stream);
  });
}

}  // namespace rapt::cuda
