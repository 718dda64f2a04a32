// Attention of 16-bit types on Hopper's tensor cores: FlashAttention-3's schedule. One block per multiprocessor goes
// through tiles of query rows; its first warpgroup fills rings of K and V blocks in shared memory, and each of the
// others does 64 rows of the tile. S = Q K^T of one key block runs while the softmax of the block before feeds O += P
// V. (Warpgroups taking turns, at products or at exponentials, were up to 5 % slower on an H200.)
//
// Keys are cut into blocks at multiples of the block size from key 0 and taken from the last to the first. A block that
// is masked for a row leaves what the row has unchanged to the bit, so that a row's result is its own.
//
// Masked weights are 0, but 0 times NaN is NaN: results that are not finite are not trusted. Such rows raise a
// flag, and attention_simt does them again.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/schedule.cuh"

namespace rapt::cuda {
namespace {

constexpr int kStages = 2;             // blocks of K and of V at a time
constexpr float kHugeScore = 0x1p20f;  // past it a weight would lose digits to the score's size

// The kernel for elements T and head sizes up to kSize.
template <class T, int kSize_, bool kTma_, bool kModified_>
struct Config {
  using Element = T;
  static constexpr int kSize = kSize_;
  static constexpr bool kTma = kTma_;            // else K and V are loaded by the threads of the first warpgroup
  static constexpr bool kModified = kModified_;  // scores need more than a scale
  // Small heads have registers for a third warpgroup, if nothing else needs them.
  static constexpr int kGroups = kSize == 64 && kTma && !kModified ? 3 : 2, kThreads = 128 * (kGroups + 1);
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : kTma ? 56 : 72;
  static constexpr int kMathRegisters = kGroups == 3 ? 160 : kTma ? 224 : 216;
  static constexpr int kListers = kTma ? 96 : 128;  // threads that put tiles into shared memory
  static constexpr int kRows = kGroupRows * kGroups, kKeys = kSize > 128 ? 64 : 128;
  // A row's maximum moves only when it grows by more: weights are then up to 2^kSlack, and O is rarely rescaled.
  static constexpr float kSlack = 8;
  // Weights are 2^kShift times as large, so that fp16 has more of the small ones.
  static constexpr float kShift = std::is_same_v<T, __half> ? 7 : 0;
  // Where all keys together weigh less beside a sink, their weights are no longer as exact as T.
  static constexpr float kDrowned = std::is_same_v<T, __half> ? 0x1p-16f : 0x1p-20f;
  static constexpr int kRowsBytes = kRows * kSize * 2, kBlockBytes = kKeys * kSize * 2;
  static constexpr int kTilesOfQ = kSize == 256 ? 1 : 2;  // that there is room for: the one at work, the next
  static constexpr int kSharedBytes = kTilesOfQ * kRowsBytes + 2 * kStages * kBlockBytes + 1024;
  using Tiles = Tiling<kRows>;
};

struct Call : Grid {
  CUtensorMap k, v;                      // if TMA loads them
  float inner, outer;                    // scales of scores, before and after the modifiers; Q takes the sign
  bool q_vector, kv_vector, out_vector;  // 16 bytes at a time
  std::uint16_t* redo;                   // of 16 rows each: a bit for each that attention_simt must do
};

using Blocks = Ring<kStages>;
template <class C>
using TilesOfQ = Ring<C::kTilesOfQ>;

// Tile i's rows of Q, by the threads that listed it.
template <class C>
__device__ void load_q(const Call& call, const Listed& listed, const Tile<C>* tiles, const TilesOfQ<C>& q, unsigned i) {
  const AttentionParams& p = call.p;
  const Tile<C>& tile = tiles[i % kTiles];
  listed.wait_full(i);
  q.wait_empty(i);
#pragma unroll 1
  for (int row = (threadIdx.x - (128 - C::kListers)) / 32 * 16; row < C::kRows; row += C::kListers / 2)
    load_rows<C::kSize, 2>(16, q.place(i) + row * 128, C::kRows * 128, p.q, tile.of_row[row + threadIdx.x % 16].q,
                           p.q_stride.d, static_cast<int>(p.d), call.q_vector, p.score.scale_log2 < 0 ? 0x8000 : 0);
  copy_commit();
  copy_wait<0>();
  fence_async_proxy();
  barrier_arrive(q.full(i));
}

// Where TMA loads K and V: one thread.
template <class C>
__device__ void load_by_tma(const Call& call, const Blocks& k, const Blocks& v) {
  TileScheduler<C> scheduler{call};
  Place tile;
  for (unsigned n = 0; scheduler.next(tile);) {
    const bool ragged = call.p.total_k >= 0;
    int key = static_cast<int>(tile.key) + (tile.blocks - 1) * C::kKeys;
    if (ragged) key += static_cast<int>(Head(call.p, tile.b, tile.hk).k_first);
    for (int block = tile.blocks; block > 0; --block, ++n, key -= C::kKeys) {
      const auto load = [&](const Blocks& ring, const CUtensorMap& map) {
        ring.wait_empty(n);
        barrier_arrive_expecting(ring.full(n), C::kBlockBytes);
#pragma unroll
        for (int panel = 0; panel < C::kSize / 64; ++panel)
          tma_load(ring.place(n) + panel * C::kKeys * 128, &map, panel * 64, key, tile.hk, ragged ? 0 : tile.b,
                   ring.full(n));
      };
      load(k, call.k);
      load(v, call.v);
    }
  }
}

// Both by all threads of a warpgroup, for any layout of K and V. Only keys that some row sees are read.
template <class C>
__device__ void load_by_threads(const Call& call, const Listed& listed, Tile<C>* tiles, const TilesOfQ<C>& q,
                                const Blocks& k, const Blocks& v) {
  constexpr int kEach = C::kKeys / 4;  // rows of a warp
  const AttentionParams& p = call.p;
  const int first = threadIdx.x / 32 * kEach, lane = threadIdx.x % 32;
  Lister<C> lister{call, listed, tiles};
  bool more = lister.list(0);
  if (more) load_q<C>(call, listed, tiles, q, 0);
  for (unsigned i = 0, n = 0; more; ++i) {
    const Place& tile = tiles[i % kTiles];
    more = lister.list(i + 1);  // a tile early, so that nobody waits for it

    const Head head(p, tile.b, tile.hk);
    std::uint32_t filling = 0;  // barrier of the block whose copies are under way
    for (int block = tile.blocks - 1; block >= 0; --block, ++n) {
      const std::int64_t key = tile.key + block * C::kKeys + first + lane;
      const bool there = key >= tile.begin && key < tile.end;
#pragma unroll 1
      for (int values = 0; values < 2; ++values) {
        const Strides stride = values ? p.v_stride : p.k_stride;
        const Blocks ring = values ? v : k;
        ring.wait_empty(n);
        load_rows<C::kSize, 2>(kEach, ring.place(n) + first * 128, C::kKeys * 128, values ? p.v : p.k,
                               there ? head.key_at(stride, key) : -1, stride.d, static_cast<int>(values ? p.dv : p.d),
                               call.kv_vector, 0);
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
    if (more) load_q<C>(call, listed, tiles, q, i + 1);
  }
}

// A math warpgroup's state.
template <class C>
struct Rows {
  static constexpr int kScores = C::kKeys / 2, kOut = C::kSize / 2;

  const Call& call;
  const int lane, own, column;  // own: first row of the warp
  float o[kOut];
  std::uint32_t weights[kScores / 2] = {};  // of the block before the one in s, as operand A
  float m[2], l[2], scale[2];  // maximum and sum, the latter of the lane's columns; what the maximum's move makes of O
  int all_from, all_to;        // keys that all rows of the warp see, counted like `first`

  __device__ Rows(const Call& call)
      : call(call), lane(threadIdx.x % 32), own(threadIdx.x / 32 * 16 - kGroupRows), column(lane % 4 * 2) {}

  __device__ void begin(const Tile<C>& tile) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] = 0;
    const auto& both = tile.of_row[own + lane % 16];
    all_from = __reduce_max_sync(~0u, both.first), all_to = __reduce_min_sync(~0u, both.last);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile.of_row[own + lane / 4 + 8 * h];
      m[h] = row.sink;
      l[h] = lane % 4 == 0 && m[h] != -kInfinity ? exp2f(C::kShift) : 0.f;
    }
  }

  // From scores of keys [key, ...), counted like `first`, to weights. `use_up` is for the weights before to be used up;
  // it is called halfway through the exponentials, which leave the processor time for other things.
  template <class UseUp>
  __device__ void softmax(float (&s)[kScores], const Tile<C>& tile, int key, UseUp use_up) {
    if constexpr (C::kModified) {
      // Registers have no index: each time the first four are done, and all move up.
#pragma unroll 1
      for (int j = column; j < C::kKeys; j += 8) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = key + j + i % 2;
          const auto& row = tile.of_row[own + lane / 4 + i / 2 * 8];
          four[i] = at < row.first || at >= row.last
                        ? -kInfinity
                        : finish_score(call.p.score, {tile.b, row.q_head, row.token, tile.key + at}, row.nearest,
                                       s[i] * call.inner);
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = i + 4 < kScores ? s[i + 4] : four[i + 4 - kScores];
      }
    } else if (key < all_from || key + C::kKeys > all_to) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto& row = tile.of_row[own + lane / 4 + 8 * h];
        const int from = row.first - key - column, to = row.last - key - column;
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
          const int at = i / 2 * 8 + i % 2;
          float& score = s[i / 2 * 4 + 2 * h + i % 2];
          score = at < from || at >= to ? -kInfinity : score;
        }
      }
    }
    const float factor = call.outer;
    float minus[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = over_row(max_of_row(s, h), Max()) * factor;
      const float before = m[h];
      if (top > before + C::kSlack) m[h] = top;
      minus[h] = C::kShift - reference(m[h]);
      scale[h] = exp2_approx(before - reference(m[h]));
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
      if (i == kHalf) use_up();
#pragma unroll
      for (int n = i; n < i + 4; ++n) s[n] = exp2_approx(fmaf(s[n], factor, minus[n / 2 % 2]));
      if (i > 0) add(i - 4);
      if (i >= kHalf) pack_four(i - kHalf);
      pin(sum);  // or the compiler does one kind of thing after the other
    }
    add(kScores - 4);
#pragma unroll
    for (int i = kScores - kHalf; i < kScores; i += 4) pack_four(i);
#pragma unroll
    for (int h = 0; h < 2; ++h) l[h] = fmaf(l[h], scale[h], sum[2 * h] + sum[2 * h + 1]);
  }

  __device__ void rescale() {
    // Times exactly 1 in most blocks.
    if (!__any_sync(~0u, scale[0] != 1 || scale[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] *= scale[i / 2 % 2];
  }

  // Results of the tile.
  __device__ void store(const Tile<C>& tile) {
    const AttentionParams& p = call.p;
    bool bad[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile.of_row[own + lane / 4 + 8 * h];
      l[h] = over_row(l[h], Sum());
      float nothing[4] = {l[h] * 0};  // or NaN
#pragma unroll
      for (int i = 2 * h; i < kOut; i += 4) {
        float& part = nothing[i / 4 % 4];
        part = fmaf(o[i], 0, fmaf(o[i + 1], 0, part));
      }
      const float sink = exp2_approx(row.sink - reference(m[h]) + C::kShift);
      const bool drowned = row.first < row.last && sink > 0 && l[h] <= fmaf(sink, C::kDrowned, sink);
      bad[h] = row.out >= 0 && !(nothing[0] + nothing[1] + nothing[2] + nothing[3] == 0 && !drowned &&
                                 (m[h] == -kInfinity || fabsf(m[h]) < kHugeScore));
      if (row.lse >= 0 && lane % 4 == 0) p.lse[row.lse] = lse_of(m[h] - C::kShift, l[h], row.alibi_shift);
      const float inverse = l[h] == 0 ? 0.f : __fdividef(1, l[h]);
#pragma unroll
      for (int i = 2 * h; i < kOut; i += 4) o[i] *= inverse, o[i + 1] *= inverse;
    }
    mark_rows(call.redo, p, tile, own, bad);
    store_rows(p, call.out_vector, tile, own, o);
  }
};

// A math warpgroup.
template <class C>
__device__ void attend(const Call& call, const Listed& listed, const Tile<C>* tiles, const TilesOfQ<C>& q,
                       const Blocks& k, const Blocks& v, int group) {
  using T = typename C::Element;
  Rows<C> rows(call);
  unsigned t = 0;  // tiles so far
  const auto has_blocks = [&] {
    listed.wait_full(t);
    return uniform(tiles[t % kTiles].blocks) > 0;
  };
  bool more = has_blocks();
  if (!more) return;

  int block = 0;       // of the tile, whose scores these are
  bool starts = true;  // it is its tile's first, or there is no more; O is complete once the weights are used
  std::uint32_t q_matrix = 0;
  for (unsigned n = 0;; ++n) {  // K and V blocks so far; V's are one behind
    if (starts && more) {
      q.wait_full(t);
      q_matrix = matrix_at(q.place(t) + group * kGroupRows * 128);
    }
    if (more) k.wait_full(n);
    if (n > 0) v.wait_full(n - 1);

    // S = Q K^T of the next block, then O += P V of this one. The first and the last time one of them is for nothing.
    const std::uint32_t k_matrix = matrix_at(k.place(n));
    const std::uint32_t v_matrix = matrix_at(v.place(n - 1), C::kKeys * 128);
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
        rows.store(tiles[(t - 1) % kTiles]);
        __syncwarp();
        listed.release(t - 1);
      }
      if (!more) break;
      const Tile<C>& tile = tiles[t % kTiles];
      rows.begin(tile);
      block = uniform(tile.blocks);
      if (const int there = uniform(tile.there); C::kTma && there < C::kKeys) {
        v.wait_full(n);
        zero_rows<C::kSize, C::kKeys>(v.place(n), there);
        named_sync(1 + group, 128);
      }
    }
    const Tile<C>& tile = tiles[t % kTiles];
    const bool ends = --block == 0;
    if (ends) {
      q.release(t++);
      more = has_blocks();
    }
    if constexpr (C::kModified && C::kSize == 256) wgmma_wait<0>();  // the weights' registers are wanted
    rows.softmax(s, tile, block * C::kKeys, [&] {
      if (starts) return;
      wgmma_wait<0>();
      pin(rows.o);
      v.release(n - 1);
      rows.rescale();
    });
    starts = ends;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma(const __grid_constant__ Call call) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[4 * kStages + 2 * kTiles + 2 * C::kTilesOfQ];
  __shared__ Tile<C> tiles[kTiles];
  const std::uint32_t first = shared_address(barriers);
  std::uint32_t data = (shared_address(shared) + 1023) / 1024 * 1024;  // the swizzle's unit
  pin(data);
  const Blocks k{first, data, C::kBlockBytes};
  const Blocks v{first + 16 * kStages, k.data + kStages * C::kBlockBytes, C::kBlockBytes};
  const Listed listed{first + 32 * kStages};
  const TilesOfQ<C> q{listed.barriers + 16 * kTiles, v.data + kStages * C::kBlockBytes, C::kRowsBytes};
  let_next_start();
  if (threadIdx.x == 0) {
    k.init(C::kTma ? 1 : 128, 4 * C::kGroups);
    v.init(C::kTma ? 1 : 128, 4 * C::kGroups);
    listed.init(C::kListers, 4 * C::kGroups);
    q.init(C::kListers, 4 * C::kGroups);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_decrease<C::kLoadRegisters>();
    if constexpr (!C::kTma) {
      load_by_threads<C>(call, listed, tiles, q, k, v);
    } else if (threadIdx.x == 0) {
      load_by_tma<C>(call, k, v);
    } else if (threadIdx.x >= 32) {
      Lister<C> lister{call, listed, tiles};
      for (unsigned i = 0; lister.list(i); ++i) load_q<C>(call, listed, tiles, q, i);
    }
  } else {
    registers_increase<C::kMathRegisters>();
    attend<C>(call, listed, tiles, q, k, v, uniform(threadIdx.x / 128 - 1));
  }
}

// Whether K and V can be loaded by TMA: not paged, rows contiguous, and all aligned to 16 bytes. It is only faster.
bool can_tma(const AttentionParams& p) {
  const bool ragged = p.total_k >= 0;
  // A tensor map has no stride of 0.
  const auto fits = [&](const void* data, const Strides& s) {
    const auto good = [](std::int64_t size, std::int64_t stride) {
      return size == 1 || (stride > 0 && stride < std::int64_t{1} << 39);
    };
    return is_vector(data, s, 2) && good(ragged ? p.total_k : p.sk, s.s) && good(p.hk, s.h) &&
           (ragged || good(p.b, s.b));
  };
  return p.page_size == 0 && (ragged ? p.total_k : p.sk) > 0 && fits(p.k, p.k_stride) && fits(p.v, p.v_stride);
}

// K or V for TMA in boxes of `keys` rows of 64 columns. False: the driver does not take it.
bool make_map(CUtensorMap& map, const AttentionParams& p, const void* data, const Strides& s, std::int64_t size,
              int keys) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess) cudaGetLastError();  // without it K and V are loaded another way
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) found = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  if (!encode) return false;
  const bool ragged = p.total_k >= 0;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(size), static_cast<cuuint64_t>(ragged ? p.total_k : p.sk),
                               static_cast<cuuint64_t>(p.hk), static_cast<cuuint64_t>(ragged ? 1 : p.b)};
  const std::int64_t steps[3] = {s.s, s.h, s.b};
  cuuint64_t bytes[3], dense = (sizes[0] * 2 + 15) / 16 * 16;  // what a dimension of 1 says counts for nothing
  for (int i = 0; i < 3; dense = bytes[i] * sizes[i + 1], ++i)
    bytes[i] = sizes[i + 1] == 1 ? dense : static_cast<cuuint64_t>(steps[i]) * 2;
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(keys), 1, 1}, ones[4] = {1, 1, 1, 1};
  return encode(&map, p.kv_type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                const_cast<void*>(data), sizes, bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class C>
cudaError_t launch(Call& call, cudaStream_t stream) {
  const int blocks = plan_grid<C>(call, 2 * (call.p.d + call.p.dv));
  return launch_kernel(false, wgmma<C>, blocks, C::kThreads, C::kSharedBytes, stream, call);
}

template <class T, int kSize>
cudaError_t launch(Call& call, cudaStream_t stream) {
  const AttentionParams& p = call.p;
  // Without a scale, masked scores would be -inf * 0.
  if (has_modifiers(p.score) || p.score.scale_log2 == 0) return launch<Config<T, kSize, false, true>>(call, stream);
  using Tma = Config<T, kSize, true, false>;
  if (can_tma(p) && make_map(call.k, p, p.k, p.k_stride, p.d, Tma::kKeys) &&
      make_map(call.v, p, p.v, p.v_stride, p.dv, Tma::kKeys))
    return launch<Tma>(call, stream);
  return launch<Config<T, kSize, false, false>>(call, stream);
}

template <class T>
cudaError_t launch_sized(Call& call, cudaStream_t stream) {
  const std::int64_t size = std::max(call.p.d, call.p.dv);
  if (size <= 64) return launch<T, 64>(call, stream);
  if (size <= 128) return launch<T, 128>(call, stream);
  if (size <= 192) return launch<T, 192>(call, stream);
  return launch<T, 256>(call, stream);
}

}  // namespace

bool wgmma_can_count(const AttentionParams& p) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;  // of what is counted in 32 bits
  return std::max(p.sk, p.total_k) < kLimit && std::max(p.sq, p.total_q) < kLimit / p.group && simt_tiles(p) < kLimit &&
         p.b < kLimit && p.hk < kLimit;
}

std::size_t wgmma_workspace(const AttentionParams& p) {
  return static_cast<std::size_t>(simt_tiles(p)) * sizeof(std::uint64_t);
}

cudaError_t attention_wgmma(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  Call call{};
  call.p = p;
  const float scale = std::fabs(p.score.scale_log2);
  const bool last = scales_last(p.score);
  call.inner = last ? 1 : scale, call.outer = last ? scale : 1;
  call.q_vector = p.score.scale_log2 >= 0 && is_vector(p.q, p.q_stride, 2);
  call.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  call.out_vector = is_vector(p.out, p.out_stride, p.out_type == DType::f32 ? 4 : 2);
  call.redo = reinterpret_cast<std::uint16_t*>(workspace);
  cudaError_t status = cudaSuccess;
  if (p.total_q >= 0) status = cudaMemsetAsync(workspace, 0, wgmma_workspace(p), stream);  // tiles may be empty
  if (status != cudaSuccess) return status;
  status = p.q_type == DType::f16 ? launch_sized<__half>(call, stream) : launch_sized<__nv_bfloat16>(call, stream);
  if (status != cudaSuccess) return status;
  return attention_simt(p, stream, reinterpret_cast<const std::uint64_t*>(workspace));
}

}  // namespace rapt::cuda
