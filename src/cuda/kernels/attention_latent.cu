// Attention of heads too wide for attention_wgmma, made for latent attention (MLA): keys of up to 576 columns, whose
// first up to 512 may be their values, and rows of many heads that share them. On Hopper's tensor cores, by FlashMLA's
// schedule: a thread block takes 64 rows, and its two math warpgroups the left and the right half of O's columns, which
// no warpgroup alone has registers for. Blocks of 64 keys, of which shared memory has two, are the one's and the
// other's in turn: a block's owner computes
//   S = Q K^T,  m = max(m, max S),  P = 2^(S - m),
// hands P and m to the other through shared memory, and then both add P V, each of its columns. While one has its
// softmax, the other multiplies. The first warpgroup fills the two places with keys, half of their columns as soon as
// the half before has been used; values in memory of their own take turns with keys.
//
// The keys of a sequence are split among the thread blocks of a cluster, which merge their results through shared
// memory, and long sequences among clusters, whose results attention_combine merges. How, follows from the sequence's
// keys, rows and kv heads alone. A block of keys that is masked for a row leaves what the row has unchanged to the bit.
//
// As everywhere on tensor cores, results that are not finite, or of huge scores, are not trusted: such rows are
// computed once more, key by key.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "cuda/hopper/host.cuh"
#include "cuda/hopper/rows.cuh"
#include "cuda/hopper/split_block.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

constexpr int kRows = kLatentRows, kKeys = kLatentKeys;
constexpr int kPanels = 9, kLeftPanels = 4;  // of 64 columns; those of a place's left half, the others are the right's
constexpr int kPanelBytes = kKeys * 128;
constexpr int kThreads = 384, kMathWarps = 8, kMathThreads = 32 * kMathWarps;
constexpr int kLoadRegisters = 72, kMathRegisters = 216;
constexpr int kBlockBytes = kPanels * kPanelBytes;
constexpr int kSharedBytes = 3 * kBlockBytes + kPanelBytes + 1024;  // Q, two places for keys, P
constexpr float kSlack = 8;  // a row's maximum moves only when it grows by more, as in attention_wgmma
constexpr float kHugeScore = 0x1p20f;
constexpr int kOutPitch = (kLatentMaxValueHeadSize + 8) * 4;  // bytes; rows next to each other meet different banks
static_assert(kRows * kOutPitch <= 2 * kBlockBytes);
static_assert(kLoadRegisters + 2 * kMathRegisters <= 3 * (65536 / kThreads / 8 * 8));

// How the keys of a sequence are split: the fewer for a thread block, the faster is a sequence alone and the slower are
// many. Many rows have work for many thread blocks without that.
struct Sharing {
  int cluster, most_keys;  // thread blocks of a cluster, and keys of each
};
Sharing sharing_of(std::int64_t rows) {
  if (rows <= kFewRows) return {2, 1024};
  if (rows <= 1024) return {2, 2048};
  return {1, 1 << 30};
}
constexpr int kMaxCluster = 2;
// Named barriers: of each math warpgroup, of weights for each, of all math threads.
constexpr int kGroupBarrier = 1, kWeightsBarrier = 3, kMathBarrier = 5;
constexpr int kLeastKeys = 256;  // of a thread block, unless its cluster's are fewer

struct LatentParams {
  AttentionParams p;
  Partials partials;
  SplitGrid grid;
  CUtensorMap q, k, v;
  Divisor of_cluster, page_size;  // thread blocks; keys
  int box;                        // keys of a tensor map's box; 0: keys are loaded by threads
  bool apart;                     // values are not columns of keys
  bool q_by_tma;
  bool modified, keep;                   // keep: keys are read by several tiles of rows
  bool q_vector, kv_vector, out_vector;  // 16 bytes at a time
  std::uint64_t* fallback_rows;          // a bit for each of 64 rows; null: attention_combine finishes rows
};

// What a thread block of a cluster has of its split: keys are counted from the split's first.
struct Share {
  int sharers;                // thread blocks that have keys, or one
  int first = 0, blocks = 0;  // the first key of its blocks, and how many these are
  int end = 0;                // of the keys that any row sees

  __device__ Share(const SplitBlock& block, int cluster, int rank) {
    const int even = (block.keys + cluster - 1) / cluster;
    const int size = max((even + kKeys - 1) / kKeys * kKeys, kLeastKeys);
    sharers = max((block.keys + size - 1) / size, 1);
    const int begin = max(block.begin, size * rank);
    end = min(block.end, size * (rank + 1));
    if (end <= begin) return;
    first = begin / kKeys * kKeys, blocks = (end - first + kKeys - 1) / kKeys;
  }
  // Blocks come from the last to the first.
  __device__ int key_of(int i) const { return first + (blocks - 1 - i) * kKeys; }
  // Which warpgroup has block i: by its keys' place in the sequence, or the sums of a row's weights would depend on
  // what other rows see.
  __device__ int owner_of(int i) const { return key_of(i) / kKeys % 2; }
};

// Places for keys or values: position n of what comes is in place n % 2. It comes in four parts of its columns, each
// with a barrier, and goes in halves.
struct Places {
  std::uint32_t barriers, data;

  static constexpr int kParts = 4, kBarriers = 2 * (kParts + 2) + 1;
  __host__ __device__ static constexpr int begin(int part) { return 2 * part; }  // panels
  __host__ __device__ static constexpr int end(int part) { return part == kParts - 1 ? kPanels : 2 * part + 2; }

  __device__ std::uint32_t q_full() const { return barriers + (kBarriers - 1) * 8; }
  __device__ std::uint32_t slot(int n) const { return data + n % 2 * kBlockBytes; }
  __device__ std::uint32_t full(int n, int part) const { return barriers + (n % 2 * (kParts + 2) + part) * 8; }
  __device__ std::uint32_t empty(int n, int half) const { return full(n, kParts + half); }
  __device__ void wait_full(int n, int part) const { barrier_wait(full(n, part), n / 2 % 2); }
  __device__ void wait_empty(int n, int half) const { barrier_wait(empty(n, half), n / 2 % 2 ^ 1); }
  __device__ bool is_empty(int n, int half) const { return barrier_is_done(empty(n, half), n / 2 % 2 ^ 1); }
  __device__ void wait_full_half(int n, int half) const { wait_full(n, 2 * half), wait_full(n, 2 * half + 1); }
  // By a warpgroup.
  __device__ void release(int n, int half) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(n, half));
  }
};

struct Shared {
  std::uint64_t barriers[Places::kBarriers];
  SplitRows<kRows> rows;
  float m[kRows];     // of the last block whose weights are there
  float l[2][kRows];  // of either warpgroup, at the end
};
// Where Q was, at the end. Of the rows that the thread block merges: what each thread block's sums are multiplied by,
// and what makes results of them.
struct Results {
  float m[kRows], l[kRows];
  std::uint32_t bad[kRows];  // of the cluster's first block: rows that are not trusted
  float factor[kRows][kMaxCluster], top[kRows], sum[kRows], half[kRows], inverse[kRows];
  std::int64_t out[kRows];
};

// By one warp, where tensor maps describe the keys; and Q, where one describes it.
__device__ void load_by_tma(const LatentParams& params, const SplitBlock& block, const Share& share,
                            const Places& places, std::uint32_t q) {
  const AttentionParams& p = params.p;
  const int lane = threadIdx.x % 32, boxes = kKeys / params.box;
  const bool paged = p.page_size > 0, in_table = paged && !p.ring;
  const int b = static_cast<int>(block.head.b), hk = static_cast<int>(block.head.hk);
  const auto first =
      static_cast<unsigned>(p.ring ? block.first_key % p.page_size : block.head.k_first + block.first_key);
  // The lane's box of a block, and where it lies.
  struct Box {
    int row = 0, entry = 0;
    bool exists = false;
  };
  const auto find = [&](int i) {
    const int key = i < share.blocks ? share.key_of(i) + lane * params.box : share.end;
    Box box{0, p.total_k >= 0 ? 0 : b, lane < boxes && key < share.end};
    if (!box.exists) return box;
    const unsigned place = first + key;
    box.row = static_cast<int>(paged ? params.page_size.remainder(place) : place);
    if (!in_table) return box;
    const std::int64_t page =
        p.pages.element(b * p.pages_stride_b + std::int64_t{params.page_size.quotient(place)} * p.pages.stride);
    box.entry = static_cast<int>(clamp_to(page, 0, p.page_count - 1));
    return box;
  };
  if (params.q_by_tma && lane == 0) {
    const unsigned row = block.row_begin, token = block.grid.group.quotient(row);
    barrier_arrive_expecting(places.q_full(), kBlockBytes);
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel)
      tma_load(q + panel * kPanelBytes, &params.q, panel * 64, static_cast<int>(row - token * block.grid.group.by),
               static_cast<int>(token), hk, b, places.q_full());
  }
  Box next = find(0);
#pragma unroll 1
  for (int i = 0; i < share.blocks; ++i) {
    const Box own = next;
    next = find(i + 1);  // before it is wanted: it may be in a table
    const int bytes = __popc(__ballot_sync(~0u, own.exists)) * params.box * 128;
#pragma unroll 1
    for (int values = 0; values < (params.apart ? 2 : 1); ++values) {
      const int n = params.apart ? 2 * i + values : i;
      const CUtensorMap* const map = values ? &params.v : &params.k;
#pragma unroll 1
      for (int part = 0; part < Places::kParts; ++part) {
        const int panel = Places::begin(part), end = Places::end(part);
        if (part % 2 == 0) places.wait_empty(n, part / 2);
        if (lane == 0) barrier_arrive_expecting(places.full(n, part), bytes * (end - panel));
        __syncwarp();
        if (own.exists)
#pragma unroll 1
          for (int at = panel; at < end; ++at)
            tma_load(places.slot(n) + at * kPanelBytes + lane * params.box * 128, map, at * 64, own.row, hk, own.entry,
                     places.full(n, part), params.keep);
        __syncwarp();
      }
    }
  }
}

// Panels [begin, end) of `rows` rows, by one warp: see load_rows().
__device__ __forceinline__ void load_panels(int rows, std::uint32_t to, const void* x, std::int64_t at,
                                            std::int64_t stride, int size, bool vector, int begin, int end) {
#pragma unroll 1
  for (int panel = begin; panel < end; ++panel)
    load_rows<64, 1>(rows, to + panel * kPanelBytes, 0, static_cast<const std::uint16_t*>(x) + panel * 64 * stride, at,
                     stride, size - panel * 64, vector, 0);
}

// By a warpgroup, whatever the keys' layout. Only keys that some row sees are read.
__device__ void load_by_threads(const LatentParams& params, const SplitBlock& block, const Share& share,
                                const Places& places) {
  constexpr int kWarpRows = kKeys / 4;
  const AttentionParams& p = params.p;
  const int first = threadIdx.x / 32 * kWarpRows, lane = threadIdx.x % 32;
  std::uint32_t filling = 0;  // the first barrier of the half whose copies are under way
  const auto filled = [&] {
    fence_async_proxy();
    barrier_arrive(filling), barrier_arrive(filling + 8);
    filling = 0;
  };
#pragma unroll 1
  for (int i = 0; i < share.blocks; ++i) {
    const int key = share.key_of(i) + first + lane;
    const bool exists = key >= block.begin && key < share.end && lane < kWarpRows;
#pragma unroll 1
    for (int values = 0; values < (params.apart ? 2 : 1); ++values) {
      const int n = params.apart ? 2 * i + values : i;
      const Strides stride = values ? p.v_stride : p.k_stride;
      const std::int64_t at = exists ? block.head.key_at(stride, block.first_key + key) : -1;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        if (!places.is_empty(n, half)) {
          if (filling) {  // or its readers, and those of this place, wait for ever
            copy_wait<0>();
            filled();
          }
          places.wait_empty(n, half);
        }
        load_panels(kWarpRows, places.slot(n) + first * 128, values ? p.v : p.k, at, stride.d,
                    static_cast<int>(values ? p.dv : p.d), params.kv_vector, half ? kLeftPanels : 0,
                    half ? kPanels : kLeftPanels);
        copy_commit();
        if (filling) {
          copy_wait<1>();
          filled();
        }
        filling = places.full(n, 2 * half);
      }
    }
  }
  copy_wait<0>();
  if (filling) filled();
}

// Q, by the math warps.
__device__ void load_q(const LatentParams& params, const SplitBlock& block, const Shared& shared, std::uint32_t q) {
  constexpr int kWarpRows = kRows / kMathWarps;
  const AttentionParams& p = params.p;
  const int first = (threadIdx.x / 32 - 4) * kWarpRows, lane = threadIdx.x % 32;
  const bool exists = lane < kWarpRows && block.row_begin + first + lane < block.row_count;
  const std::int64_t at = exists ? shared.rows.row_at(block.head, first + lane, p.q_stride) : -1;
  load_panels(kWarpRows, q + first * 128, p.q, at, p.q_stride.d, static_cast<int>(p.d), params.q_vector, 0, kPanels);
  copy_commit();
  copy_wait<0>();
  fence_async_proxy();
}

// A math warpgroup: `half` of O's columns, and the blocks of keys that are its own.
template <class T>
struct Math {
  static constexpr int kScores = kKeys / 2, kOut = kLatentMaxValueHeadSize / 4;
  // Weights are 2^kShift times as large, so that fp16 has more of the small ones.
  static constexpr float kShift = std::is_same_v<T, __half> ? 7 : 0;

  const LatentParams& params;
  const SplitBlock& block;
  const Share& share;
  const Places& places;
  Shared& shared;
  const std::uint32_t q, p;  // matrices in shared memory
  const int half, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16, column = lane % 4 * 2;
  const int valid;       // keys of the first block that exist
  int all_from, all_to;  // keys that all rows of the warp see
  float o[kOut] = {};
  float m[2] = {-kInfinity, -kInfinity}, l[2] = {};  // l: of the lane's columns of the warpgroup's own blocks

  __device__ Math(const LatentParams& params, const SplitBlock& block, const Share& share, const Places& places,
                  Shared& shared, std::uint32_t q, std::uint32_t p, int half)
      : params(params),
        block(block),
        share(share),
        places(places),
        shared(shared),
        q(q),
        p(p),
        half(half),
        valid(min(share.end - share.key_of(0), kKeys)) {
    all_from = __reduce_max_sync(~0u, shared.rows.from[warp_row + lane % 16]);
    all_to = __reduce_min_sync(~0u, shared.rows.to[warp_row + lane % 16]);
  }
  __device__ int row(int h) const { return warp_row + lane / 4 + 8 * h; }
  __device__ int keys_at(int i) const { return params.apart ? 2 * i : i; }
  __device__ int values_at(int i) const { return params.apart ? 2 * i + 1 : i; }

  // Queues S of block i.
  __device__ __forceinline__ void multiply_keys(int i, float (&s)[kScores]) {
    const int n = keys_at(i);
    const std::uint32_t q_matrix = matrix_at(q), k_matrix = matrix_at(places.slot(n));
    if (params.apart && i > 0) {  // the other's keys were here meanwhile: they, too, come and go for both
      places.wait_full_half(n - 2, 0), places.wait_full_half(n - 2, 1);
      release_keys(i - 1);
    }
    pin(s);
#pragma unroll
    for (int step = 0; step < 4 * kPanels; ++step) {
      if (step % 8 == 0 && step / 8 < Places::kParts) {
        places.wait_full(n, step / 8);
        wgmma_fence();
      }
      const int at = step / 4 * (kPanelBytes / 16) + step % 4 * 2;
      wgmma_abt<T>(s, q_matrix + at, k_matrix + at, step > 0);
    }
    wgmma_commit();
  }
  // The warpgroup's half of the values of block i, as a matrix. There may be anything past the last key.
  __device__ __forceinline__ std::uint32_t values_of(int i) {
    const int n = values_at(i);
    const std::uint32_t values = places.slot(n) + half * (kLeftPanels * kPanelBytes);
    places.wait_full_half(n, half);
    if (i == 0 && valid < kKeys && params.box > 0) {
      zero_rows<kLeftPanels * 64, kKeys>(values, valid);
      named_sync(kGroupBarrier + half, 128);
    }
    return matrix_at(values, kPanelBytes);
  }
  __device__ __forceinline__ void rescale(const float (&moved)[2]) {
    const float factor[2] = {exp2_approx(m[0] - shift_of(moved[0])), exp2_approx(m[1] - shift_of(moved[1]))};
    const bool moves = moved[0] != m[0] || moved[1] != m[1];
#pragma unroll
    for (int h = 0; h < 2; ++h) l[h] *= moved[h] != m[h] ? factor[h] : 1, m[h] = moved[h];
    if (!__any_sync(~0u, moves)) return;
    wgmma_wait<0>();  // of scores, perhaps
#pragma unroll
    for (int n = 0; n < kOut; ++n) o[n] *= factor[n / 2 % 2];
  }
  // Queues O += P V of block i, which is the other's.
  __device__ __forceinline__ void take(int i) {
    named_sync(kWeightsBarrier + half, kMathThreads);
    const float moved[2] = {shared.m[row(0)], shared.m[row(1)]};
    rescale(moved);
    const std::uint32_t weights = matrix_at(p), values = values_of(i);
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) wgmma_ab<T>(o, weights + 2 * step, values + step * 128, 1);
    wgmma_commit();
  }
  // Of the warpgroup's own block: scores become weights, here and in shared memory for the other.
  __device__ __forceinline__ void softmax(int i, float (&s)[kScores], float (&moved)[2]) {
    const AttentionParams& a = params.p;
    const int key = share.key_of(i);
#pragma unroll
    for (float& x : s) x *= a.score.scale_log2;
    if (params.modified || key < all_from || key + kKeys > all_to) {
      for_each_four(s, [&](int j, float(&four)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = row(e / 2), at = key + j + column + e % 2;
          if (at < shared.rows.from[r] || at >= shared.rows.to[r]) four[e] = -kInfinity;
          else if (params.modified) four[e] = shared.rows.finish(block.head, r, block.first_key + at, four[e]);
        }
      });
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = over_row(max_of_row(s, h), Max());
      moved[h] = top > m[h] + kSlack ? top : m[h];
      const float neg_m = kShift - shift_of(moved[h]);
#pragma unroll
      for (int n = 2 * h; n < kScores; n += 4)
        s[n] = exp2_approx(s[n] + neg_m), s[n + 1] = exp2_approx(s[n + 1] + neg_m);
    }
  }
  // Hands weights over and queues O += P V of them.
  __device__ __forceinline__ void give(int i, const float (&s)[kScores], const float (&moved)[2]) {
    std::uint32_t weights[kScores / 2];
#pragma unroll
    for (int n = 0; n < kScores; n += 2) weights[n / 2] = pack<T>(s[n], s[n + 1]);
    const std::uint32_t to = p + (warp_row + lane % 16) * 128;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      store_matrices(to + ((2 * step + lane / 16) ^ lane % 8) * 16, weights[4 * step], weights[4 * step + 1],
                     weights[4 * step + 2], weights[4 * step + 3]);
    if (lane % 4 == 0) shared.m[row(0)] = moved[0], shared.m[row(1)] = moved[1];
    fence_async_proxy();
    named_arrive(kWeightsBarrier + (half ^ 1), kMathThreads);
    rescale(moved);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[2] = {};
#pragma unroll
      for (int n = 2 * h; n < kScores; n += 4) sum[n / 4 % 2] += s[n] + s[n + 1];
      l[h] += sum[0] + sum[1];
    }
    const std::uint32_t values = values_of(i);
    pin(o);
    pin(weights);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) wgmma_ab<T>(o, weights + 4 * step, values + step * 128, 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_values(int i) {
    wgmma_wait<0>();
    pin(o);
    places.release(values_at(i), half);
  }
  __device__ __forceinline__ void release_keys(int i) {
    if (!params.apart) return;
    places.release(keys_at(i), 0);
    places.release(keys_at(i), 1);
  }

  // Who has the first block adds the other's weights before it goes on to keys that are still to come, and who has the
  // second multiplies keys before the other's weights are there: so the tensor cores have work while weights are made,
  // and places for keys are soon free again.
  __device__ void run() {
    if (share.blocks == 0) return;
    float s[kScores], moved[2];
    if (share.owner_of(0) == half) {
#pragma unroll 1
      for (int i = 0; i < share.blocks; i += 2) {
        multiply_keys(i, s);
        wgmma_wait<0>();
        pin(s);
        release_keys(i);
        softmax(i, s, moved);
        give(i, s, moved);
        finish_values(i);
        if (i + 1 < share.blocks) {
          take(i + 1);
          finish_values(i + 1);
        }
      }
      return;
    }
    int i = 1;
#pragma unroll 1
    for (; i < share.blocks; i += 2) {
      multiply_keys(i, s);
      take(i - 1);
      wgmma_wait<1>();
      pin(s);
      release_keys(i);
      softmax(i, s, moved);
      finish_values(i - 1);
      give(i, s, moved);
      finish_values(i);
    }
    if (i - 1 < share.blocks) {
      take(i - 1);
      finish_values(i - 1);
    }
  }

  // O to shared memory, for the cluster; m and l, too.
  __device__ void leave(std::uint32_t out, Results& results) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row(h);
      if (half == 0 && lane % 4 == 0) results.l[r] = shared.l[0][r] + shared.l[1][r], results.m[r] = m[h] - kShift;
#pragma unroll
      for (int n = 0; n < kOut / 4; ++n)
        store8(out + r * kOutPitch + (half * 256 + 8 * n + column) * 4, o[4 * n + 2 * h], o[4 * n + 2 * h + 1]);
    }
  }
};

// The cluster's results together, by the math warps: each of the sharers merges some rows of all.
__device__ void merge(const LatentParams& params, const SplitBlock& block, Shared& shared, int sharers, int rank,
                      std::uint32_t out, const std::uint8_t* own_out, std::uint32_t results_at, Results& results) {
  constexpr int kFours = kLatentMaxValueHeadSize / 128;
  const AttentionParams& p = params.p;
  const Head& head = block.head;
  const SplitRows<kRows>& of_rows = shared.rows;
  const int rows = min(kRows, block.row_count - block.row_begin), thread = threadIdx.x - 128;
  if (const int row = rank + thread * sharers; row < rows) {
    float m[kMaxCluster], l[kMaxCluster], top = -kInfinity, sum = 0;
#pragma unroll
    for (int i = 0; i < kMaxCluster; ++i) {
      const std::uint32_t there = in_cluster(results_at + row * 4, min(i, sharers - 1));
      m[i] = i < sharers ? cluster_load4(there) : -kInfinity, l[i] = cluster_load4(there + kRows * 4);
      top = fmaxf(top, m[i]);
    }
#pragma unroll
    for (int i = 0; i < kMaxCluster; ++i) {
      const float factor = exp2_approx(m[i] - shift_of(top));
      if (i < sharers) sum = fmaf(l[i], factor, sum);
      results.factor[row][i] = factor;
    }
    results.top[row] = top, results.sum[row] = sum;
    if (params.fallback_rows) {  // what attention_combine makes of an only split, to the bit
      Row found;
      found.token = of_rows.token[row], found.q_head = of_rows.q_head[row];
      const Finish f = finish_row(top, sum, sink_of(head, found), alibi_shift_log2(head, found));
      results.half[row] = f.half, results.inverse[row] = f.sum == 0 ? 0.f : 1 / f.sum;
      results.out[row] = of_rows.row_at(head, row, p.out_stride);
      if (p.lse) p.lse[of_rows.row_at(head, row, p.lse_stride)] = f.lse;
    }
  }
  named_sync(kMathBarrier, kMathThreads);

  const int lane = threadIdx.x % 32, column = 4 * lane, size = static_cast<int>(p.dv);
#pragma unroll 2
  for (int row = rank + thread / 32 * sharers; row < rows; row += kMathWarps * sharers) {
    float4 sum[kFours] = {};
#pragma unroll 1
    for (int i = 0; i < sharers; ++i) {
      const float factor = results.factor[row][i];
      float4 part[kFours];
      if (i == rank) {
#pragma unroll
        for (int n = 0; n < kFours; ++n)
          part[n] = *reinterpret_cast<const float4*>(own_out + row * kOutPitch + lane * 16 + n * 512);
      } else {
        const std::uint32_t there = in_cluster(out + row * kOutPitch + lane * 16, i);
#pragma unroll
        for (int n = 0; n < kFours; ++n) part[n] = cluster_load16(there + n * 512);
      }
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        const float4& x = part[n];
        sum[n].x = fmaf(factor, x.x, sum[n].x), sum[n].y = fmaf(factor, x.y, sum[n].y);
        sum[n].z = fmaf(factor, x.z, sum[n].z), sum[n].w = fmaf(factor, x.w, sum[n].w);
      }
    }
    const float top = results.top[row], l = results.sum[row];
    if (!params.fallback_rows) {
      float* const to = params.partials.at(head, block.row_begin + row, block.split);
      const int m_at = static_cast<int>(Partials::m_at(p));
#pragma unroll
      for (int n = 0; n < kFours; ++n)
        if (column + 128 * n < m_at) *reinterpret_cast<float4*>(to + column + 128 * n) = sum[n];
      if (lane == 0) *reinterpret_cast<float2*>(to + m_at) = make_float2(top, l);
      continue;
    }
    const float half = results.half[row], inverse = results.inverse[row];
    const std::int64_t to = results.out[row];
    float nan_or_0[4] = {l * 0};
    if (half != 1) {
#pragma unroll
      for (float4& x : sum) x = make_float4(x.x * half * half, x.y * half * half, x.z * half * half, x.w * half * half);
    }
    const auto add = [&](int i, float x) { nan_or_0[i] = fmaf(x, 0, nan_or_0[i]); };
    if (params.out_vector) {
      const bool is_half = p.out_type == DType::f16;
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        if (column + 128 * n >= size) break;
        float4& x = sum[n];
        add(0, x.x), add(1, x.y), add(2, x.z), add(3, x.w);
        x.x *= inverse, x.y *= inverse, x.z *= inverse, x.w *= inverse;
        if (p.out_type == DType::f32) {
          *reinterpret_cast<float4*>(static_cast<float*>(p.out) + to + column + 128 * n) = x;
        } else {
          *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(p.out) + to + column + 128 * n) =
              is_half ? make_uint2(pack<__half>(x.x, x.y), pack<__half>(x.z, x.w))
                      : make_uint2(pack<__nv_bfloat16>(x.x, x.y), pack<__nv_bfloat16>(x.z, x.w));
        }
      }
    } else {
      // By way of the row in the thread block's own shared memory, which nobody reads any more.
      const std::uint32_t own = out + row * kOutPitch;
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        store8(own + lane * 16 + n * 512, sum[n].x, sum[n].y);
        store8(own + lane * 16 + n * 512 + 8, sum[n].z, sum[n].w);
      }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < size; i += 32) {
        const float x = load4(own + i * 4);
        add(0, x);
        store(p.out, p.out_type, to + i * p.out_stride.d, x * inverse);
      }
    }
    const float any_nan = nan_or_0[0] + nan_or_0[1] + (nan_or_0[2] + nan_or_0[3]);
    const bool bad = __any_sync(~0u, any_nan != 0) || (top != -kInfinity && fabsf(top) >= kHugeScore);
    if (lane == 0) cluster_store4(in_cluster(results_at + offsetof(Results, bad) + row * 4, 0), bad);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) latent(const __grid_constant__ LatentParams params) {
  extern __shared__ std::uint8_t dynamic[];
  __shared__ Shared shared;
  let_next_start();
  // From the last rows on: of causal ones they see the most keys.
  const unsigned rank = cluster_rank(), cluster = params.grid.blocks - 1 - params.of_cluster.quotient(blockIdx.x);
  const SplitBlock block(params.p, params.partials, params.grid, kRows, cluster);
  if (!block.exists) return;
  const Share share(block, static_cast<int>(params.of_cluster.by), static_cast<int>(rank));
  if (static_cast<int>(rank) >= share.sharers) return;

  const std::uint32_t q = (shared_address(dynamic) + 1023) / 1024 * 1024;  // the swizzle's unit
  const Places places{shared_address(shared.barriers), q + kBlockBytes};
  if (threadIdx.x == 0) {
    const int loaders = params.box > 0 ? 1 : 128;
    for (int n = 0; n < 2; ++n) {
      for (int part = 0; part < Places::kParts; ++part) barrier_init(places.full(n, part), loaders);
      for (int half = 0; half < 2; ++half) barrier_init(places.empty(n, half), params.apart && n == 0 ? 8 : 4);
    }
    barrier_init(places.q_full(), params.q_by_tma ? 1 : kMathThreads);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_decrease<kLoadRegisters>();
    if (params.box == 0) load_by_threads(params, block, share, places);
    else if (threadIdx.x < 32) load_by_tma(params, block, share, places, q);
    return;
  }
  registers_increase<kMathRegisters>();
  shared.rows.find(block, threadIdx.x - 128);
  named_sync(kMathBarrier, kMathThreads);
  if (!params.q_by_tma) {
    load_q(params, block, shared, q);
    barrier_arrive(places.q_full());
  }
  const int half = uniform(threadIdx.x / 128 - 1);
  Math<T> math(params, block, share, places, shared, q, places.data + 2 * kBlockBytes, half);
  barrier_wait(places.q_full(), 0);
  math.run();

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = over_row(math.l[h], Sum());
    if (math.lane % 4 == 0) shared.l[half][math.row(h)] = sum;
  }
  named_sync(kMathBarrier, kMathThreads);  // and nobody reads Q and keys any more
  auto* const results = reinterpret_cast<Results*>(dynamic + (q - shared_address(dynamic)));
  math.leave(places.data, *results);
  cluster_sync();
  merge(params, block, shared, share.sharers, static_cast<int>(rank), places.data,
        dynamic + (places.data - shared_address(dynamic)), q, *results);
  cluster_sync();
  if (params.fallback_rows && rank == 0 && threadIdx.x / 32 == 4) {
    const int rows = block.row_count - block.row_begin, lane = math.lane;
    const unsigned low = __ballot_sync(~0u, lane < rows && results->bad[lane] != 0);
    const unsigned high = __ballot_sync(~0u, lane + 32 < rows && results->bad[lane + 32] != 0);
    const std::int64_t head = block.head.b * params.p.hk + block.head.hk;
    if (lane == 0)
      params.fallback_rows[head * params.grid.tiles.by + block.row_begin / kRows] = low | std::uint64_t{high} << 32;
  }
}

std::int64_t row_tiles(const AttentionParams& p) {
  return ceil_div(p.sq * p.group, kRows);
}
Partials latent_partials(const AttentionParams& p, std::byte* workspace) {
  const Sharing sharing = sharing_of(p.sq * p.group);
  return partials_of(
      p, workspace,
      static_cast<int>(std::min<std::int64_t>(std::int64_t{sharing.cluster} * sharing.most_keys, 1 << 30)));
}

// Of rows of `size` columns of keys or values. False: threads load them.
bool make_map_of(CUtensorMap& map, const AttentionParams& p, const void* data, const Strides& s, std::int64_t size,
                 int box) {
  if (p.page_size == 0) return make_keys_map(map, p, data, s, size, box);
  const std::int64_t entries = p.ring ? p.b : p.page_count;
  return box >= 8 && entries > 0 && is_vector(data, s, 2) &&
         make_map(map, p.kv_type, data, {{size, 1, 64}, {p.page_size, s.s, box}, {p.hk, s.h, 1}, {entries, s.b, 1}});
}

// Of Q, in boxes of a tile's rows.
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
  const unsigned cluster = params.of_cluster.by;
  return launch_clusters(cluster, false, latent<T>, params.grid.blocks * cluster, kThreads, kSharedBytes, stream,
                         params);
}

}  // namespace

std::int64_t latent_items(const AttentionParams& p) {
  return p.b * p.hk * latent_partials(p, nullptr).splits * row_tiles(p) * sharing_of(p.sq * p.group).cluster;
}
std::size_t latent_workspace(const AttentionParams& p) {
  const Partials partials = latent_partials(p, nullptr);
  if (partials.splits > 1) return bytes_of(p, partials);
  return static_cast<std::size_t>(ceil_div(p.b * p.hk * row_tiles(p), 2)) * 16;
}

cudaError_t attention_latent(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  LatentParams params{p, latent_partials(p, workspace)};
  params.grid = SplitGrid(p, params.partials, row_tiles(p));
  params.of_cluster = Divisor(sharing_of(p.sq * p.group).cluster);
  params.page_size = Divisor(p.page_size);
  params.apart = !values_in_keys(p);
  params.modified = has_modifiers(p.score);
  params.keep = params.grid.tiles.by > 2;
  params.q_vector = is_vector(p.q, p.q_stride, 2);
  params.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  params.out_vector = p.dv % 4 == 0 && is_vector(p.out, p.out_stride, p.out_type == DType::f32 ? 4 : 2);
  const int box = static_cast<int>(p.page_size > 0 ? std::gcd(p.page_size, std::int64_t{kKeys}) : kKeys);
  if (make_map_of(params.k, p, p.k, p.k_stride, p.d, box) &&
      (!params.apart || make_map_of(params.v, p, p.v, p.v_stride, p.dv, box)))
    params.box = box, params.q_by_tma = make_queries_map(params.q, p);
  const bool unsplit = params.partials.splits == 1;
  if (unsplit) params.fallback_rows = reinterpret_cast<std::uint64_t*>(workspace);
  const cudaError_t status =
      p.q_type == DType::f16 ? launch<__half>(params, stream) : launch<__nv_bfloat16>(params, stream);
  if (status != cudaSuccess) return status;
  if (unsplit) return attention_recompute(p, params.fallback_rows, stream);
  return attention_combine(p, params.partials, stream);
}

}  // namespace rapt::cuda
