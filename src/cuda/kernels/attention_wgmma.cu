// Attention of 16-bit types on Hopper's tensor cores: FlashAttention-3's schedule. One block per multiprocessor goes
// through tiles of query rows; its first warpgroup fills rings of K and V blocks in shared memory, and each of the
// others does 64 rows of the tile. S = Q K^T of one key block runs while the softmax of the block before feeds O += P
// V, and named barriers keep the warpgroups out of step, so that one's exponentials run beside the other's products.
//
// Keys are cut into blocks at multiples of the block size from key 0 and taken from the last to the first. A block that
// is masked for a row leaves what the row has unchanged to the bit, so that a row's result is its own.
//
// Masked weights are 0, but 0 times NaN is NaN: results that are not finite are not trusted. Such warps raise a flag,
// and attention_simt does the flagged tiles again.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/score.cuh"

namespace rapt::cuda {
namespace {

constexpr int kGroupRows = kSimtRows;  // a flag is of one warpgroup's rows
constexpr int kStages = 2;             // blocks of K and of V at a time
constexpr int kTiles = 3;              // the one whose output is complete, the one at work and the next
static_assert(kGroupRows == 64, "the rows of a wgmma");
constexpr float kHugeScore = 0x1p20f;  // past it a weight would lose digits to the score's size

// Rows of one kv head, and the blocks of keys that any of them sees: at least one, even if they see none.
struct Place {
  int b, hk, row, rows;          // rows [row, rows), of which the tile has C::kRows
  int blocks = 0, there;         // there: of the keys that the last block has room for
  std::int64_t key, begin, end;  // the first block's first key; the keys that any row sees
};

// The kernel for elements T and head sizes up to kSize.
template <class T, int kSize_, bool kTma_, bool kTerms_>
struct Config {
  using Element = T;
  static constexpr int kSize = kSize_;
  static constexpr bool kTma = kTma_;      // else K and V are loaded by the threads of the first warpgroup
  static constexpr bool kTerms = kTerms_;  // scores need more than a scale
  // Small heads have registers for a third warpgroup, if nothing else needs them.
  static constexpr int kGroups = kSize == 64 && kTma && !kTerms ? 3 : 2, kThreads = 128 * (kGroups + 1);
  static constexpr int kLoadRegisters = kTma ? 56 : 72;
  static constexpr int kMathRegisters = kGroups == 3 ? 152 : kTma ? 224 : 216;
  static constexpr int kListers = kTma ? 96 : 128;  // threads that put tiles into shared memory
  static constexpr int kRows = kGroupRows * kGroups, kKeys = kSize == 64 ? 112 : kSize == 128 ? 128 : 64;
  // What the warpgroups take turns at: issuing products where exponentials take as long as these, else exponentials.
  static constexpr bool kTurnsAtProducts = kSize == 64;
  // A row's maximum moves only when it grows by more: weights are then up to 2^kSlack, and O is rarely rescaled.
  static constexpr float kSlack = kTurnsAtProducts ? 0 : 8;
  // Weights are 2^kShift times as large, so that fp16 has more of the small ones.
  static constexpr float kShift = std::is_same_v<T, __half> ? 7 : 0;
  static constexpr int kRowsBytes = kRows * kSize * 2, kBlockBytes = kKeys * kSize * 2;
  static constexpr int kSharedBytes = kRowsBytes + 2 * kStages * kBlockBytes + 1024;
  using Tiles = Tiling<kRows>;
};

struct Call {
  AttentionParams p;
  CUtensorMap k, v;                      // if TMA loads them
  float scale;                           // of scores, never negative: Q takes the sign
  bool q_vector, kv_vector, out_vector;  // 16 bytes at a time
  int heads, tiles;                      // as Tiling numbers them
  int section;                           // heads that are done together, for K and V to stay in L2
  std::uint8_t* redo;
};

using Blocks = Ring<kStages>;
using Listed = Ring<kTiles>;

// Row r with divisions of 32 bits.
__device__ Row row_of(const Head& head, int r) {
  const unsigned group = static_cast<unsigned>(head.p.group), token = static_cast<unsigned>(r) / group;
  return Row(head, token, head.hk * group + (static_cast<unsigned>(r) - token * group));
}

// The tiles of a thread block in order.
template <class C>
struct Schedule {
  const Call& call;
  unsigned round = 0;

  // False: no more, and the tile has no blocks.
  __device__ bool next(Place& tile) {
    const AttentionParams& p = call.p;
    for (;; ++round) {
      // The longest first, for causal: tiles from the last of their heads on; every other round backwards, which gives
      // each thread block as much.
      const unsigned i = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      const unsigned heads = call.heads, tiles = call.tiles, section = call.section;
      tile.blocks = 0;
      if (round * gridDim.x >= heads * tiles) return false;
      if (i >= heads * tiles) continue;
      const unsigned first = i / (section * tiles) * section, in_section = i - first * tiles;
      const unsigned here = min(section, heads - first), down = in_section / here;
      const auto found =
          C::Tiles::find(p, static_cast<int>(first + (in_section - down * here)), static_cast<int>(tiles - 1 - down));
      const Head head(p, found.b, found.hk);
      tile.b = static_cast<int>(found.b), tile.hk = static_cast<int>(found.hk);
      tile.row = static_cast<int>(found.row), tile.rows = static_cast<int>(head.len_q * p.group);
      if (tile.row >= tile.rows) continue;
      // Neither end of what a row sees moves down from row to row, but rows past the mask's see nothing.
      const Row top = row_of(head, tile.row), bottom = row_of(head, min(tile.row + C::kRows, tile.rows) - 1);
      const std::int64_t token = min(bottom.token, p.term_rows - 1);
      tile.begin = top.first, tile.end = token < top.token ? 0 : Row(head, token, 0).last;
      const std::int64_t block = tile.begin / C::kKeys;
      tile.key = block * C::kKeys;
      tile.blocks = tile.end > tile.begin ? static_cast<int>(ceil_div(tile.end, C::kKeys) - block) : 1;
      const std::int64_t left = head.high - tile.key - (tile.blocks - 1) * C::kKeys;
      tile.there = static_cast<int>(clamp(left, 0, C::kKeys));
      ++round;
      return true;
    }
  }
};

// A tile with what its rows need, worked out once and in shared memory: registers are for what is hot.
template <class C>
struct Tile : Place {
  struct {
    std::int64_t q, out, lse;  // where it begins; negative: it does not exist
    int token, q_head;
    int first, last;  // the keys it sees, from `key` on
    float sink;
  } of_row[C::kRows];
  std::int64_t offset;

  // By `threads` threads.
  __device__ void fill(const AttentionParams& p, const Place& place, int thread, int threads) {
    if (thread == 0) static_cast<Place&>(*this) = place;
    if (place.blocks == 0) return;
    const Head head(p, place.b, place.hk);
    if (thread == 0) offset = head.offset;
    for (int i = thread; i < C::kRows; i += threads) {
      const int r = place.row + i, end = r < place.rows ? place.blocks * C::kKeys : 0;
      const Row at = row_of(head, min(r, place.rows - 1));
      auto& row = of_row[i];
      row.q = end ? row_at(p.q_stride, head, at) : -1;
      row.out = end ? row_at(p.out_stride, head, at) : -1;
      row.lse = end && p.lse ? row_at(p.lse_stride, head, at) : -1;
      row.token = static_cast<int>(at.token), row.q_head = static_cast<int>(at.q_head);
      row.first = static_cast<int>(clamp(at.first - place.key, 0, end));
      row.last = static_cast<int>(clamp(at.last - place.key, 0, end));
      row.sink = sink_of(head, at);
    }
  }
};

// Where TMA loads K and V: one thread.
template <class C>
__device__ void load_by_tma(const Call& call, const Blocks& k, const Blocks& v) {
  Schedule<C> schedule{call};
  Place tile;
  for (int n = 0; schedule.next(tile);) {
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

// The tiles meanwhile: other warps.
template <class C>
__device__ void list_tiles(const Call& call, const Listed& listed, Tile<C>* tiles) {
  Schedule<C> schedule{call};
  Place tile;
  bool more = true;
  for (int i = 0; more; ++i) {
    more = schedule.next(tile);
    listed.wait_empty(i);
    tiles[i % kTiles].fill(call.p, tile, threadIdx.x - 32, C::kListers);
    barrier_arrive(listed.full(i));
  }
}

// Both by all threads of a warpgroup, for any layout of K and V. Only keys that some row sees are read.
template <class C>
__device__ void load_by_threads(const Call& call, const Listed& listed, Tile<C>* tiles, const Blocks& k,
                                const Blocks& v) {
  constexpr int kEach = (C::kKeys + 63) / 64 * 16;  // rows of a warp, of the last maybe fewer
  const AttentionParams& p = call.p;
  const int first = threadIdx.x / 32 * kEach, lane = threadIdx.x % 32;
  Schedule<C> schedule{call};
  // Lists tile i; a tile early, so that nobody waits for it.
  const auto list = [&](int i) {
    Place place;
    schedule.next(place);
    listed.wait_empty(i);
    tiles[i % kTiles].fill(p, place, threadIdx.x, C::kListers);
    barrier_arrive(listed.full(i));
  };
  list(0);
  for (int i = 0, n = 0;; ++i) {
    listed.wait_full(i);
    const Place& tile = tiles[i % kTiles];
    if (tile.blocks == 0) break;
    list(i + 1);

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
        load_rows<C::kSize, 2>(min(kEach, C::kKeys - first), ring.place(n) + first * 128, C::kKeys * 128,
                               values ? p.v : p.k, there ? head.key_at(stride, key) : -1, stride.d,
                               static_cast<int>(values ? p.dv : p.d), call.kv_vector, 0);
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
  }
}

// The 4 x 4 words of four neighbouring lanes: word j of lane i becomes word i of lane j.
__device__ void transpose(std::uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & bit) continue;
      const bool upper = lane & bit;
      const std::uint32_t got = __shfl_xor_sync(~0u, upper ? words[n] : words[n | bit], bit);
      (upper ? words[n] : words[n | bit]) = got;
    }
}

// Over the four lanes that share rows.
template <class Combine>
__device__ float over_row(float x, Combine combine) {
  x = combine(x, __shfl_xor_sync(~0u, x, 1));
  return combine(x, __shfl_xor_sync(~0u, x, 2));
}

// A math warpgroup's state. Of the 64 rows, warp w has rows 16 w and on, and lane i of it rows i / 4 and i / 4 + 8:
// element 4 j + 2 h + b of a product is in the h-th of them and column 8 j + 2 (i % 4) + b.
template <class C>
struct Rows {
  static constexpr int kScores = C::kKeys / 2, kOut = C::kSize / 2;

  const Call& call;
  const int lane, own, column;  // own: first row of the warp
  float o[kOut];
  std::uint32_t weights[kScores / 2] = {};  // of the block before the one in s, as operand A
  float m[2], l[2], scale[2];  // maximum and sum, the latter of the lane's columns; what the maximum's move makes of O

  __device__ Rows(const Call& call)
      : call(call), lane(threadIdx.x % 32), own(threadIdx.x / 32 * 16 - kGroupRows), column(lane % 4 * 2) {}

  // Begins to load the tile's Q.
  __device__ void load_q(const Tile<C>& tile, std::uint32_t q) const {
    const AttentionParams& p = call.p;
    load_rows<C::kSize, 1>(16, q + own * 128, C::kRows * 128, p.q, tile.of_row[own + lane % 16].q, p.q_stride.d,
                           static_cast<int>(p.d), call.q_vector, p.score.scale_log2 < 0 ? 0x8000 : 0);
    copy_commit();
  }

  __device__ void begin(const Tile<C>& tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile.of_row[own + lane / 4 + 8 * h];
      m[h] = row.sink;
      l[h] = lane % 4 == 0 && m[h] != -infinity() ? exp2f(C::kShift) : 0.f;
    }
  }

  // From scores of keys [key, ...), counted like `first`, to weights in their place. Between the turns, exponentials.
  template <class Begin, class End>
  __device__ void softmax(float (&s)[kScores], const Tile<C>& tile, int key, Begin begin_turn, End end_turn) {
    int from[2], to[2];  // the columns that rows see, as if the lane's first were 0
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile.of_row[own + lane / 4 + 8 * h];
      from[h] = row.first - key - column, to[h] = row.last - key - column;
    }
    if constexpr (C::kTerms) {
      // Registers have no index: each time the first four are done, and all move up.
#pragma unroll 1
      for (int j = 0; j < C::kKeys; j += 8) {
        float four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = j + i % 2;
          const auto& row = tile.of_row[own + lane / 4 + i / 2 * 8];
          four[i] = at < from[i / 2] || at >= to[i / 2]
                        ? -infinity()
                        : finish_score(call.p.score, tile.b, row.q_head, row.token, tile.offset,
                                       tile.key + key + column + at, s[i] * call.scale);
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = i + 4 < kScores ? s[i + 4] : four[i + 4 - kScores];
      }
    } else if (max(from[0], from[1]) > -column || min(to[0], to[1]) < C::kKeys - column) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int at = i / 4 * 8 + i % 2, h = i / 2 % 2;
        s[i] = at < from[h] || at >= to[h] ? -infinity() : s[i];
      }
    }
    const float factor = C::kTerms ? 1 : call.scale;
    float minus[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -infinity();
#pragma unroll
      for (int i = 2 * h; i < kScores; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
      top = over_row(top, [](float a, float b) { return fmaxf(a, b); }) * factor;
      const float before = m[h];
      if (top > before + C::kSlack) m[h] = top;
      minus[h] = C::kShift - reference(m[h]);
      scale[h] = exp2_approx(before - reference(m[h]));
      l[h] *= scale[h];
    }
    begin_turn();
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = exp2_approx(fmaf(s[i], factor, minus[i / 2 % 2]));
      l[i / 2 % 2] += s[i];
    }
    end_turn();
  }

  __device__ void rescale() {
    // Times exactly 1 in most blocks.
    if (C::kSlack > 0 && !__any_sync(~0u, scale[0] != 1 || scale[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] *= scale[i / 2 % 2];
  }

  __device__ void pack_weights(const float (&s)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights[i] = pack<typename C::Element>(s[2 * i], s[2 * i + 1]);
  }

  // Results of the tile.
  __device__ void store(const Tile<C>& tile) {
    const AttentionParams& p = call.p;
    bool good = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& row = tile.of_row[own + lane / 4 + 8 * h];
      l[h] = over_row(l[h], [](float a, float b) { return a + b; });
      float nothing = l[h] * 0;  // or NaN
#pragma unroll
      for (int i = 2 * h; i < kOut; i += 4) nothing = fmaf(o[i], 0, fmaf(o[i + 1], 0, nothing));
      good &= row.out < 0 || (nothing == 0 && (m[h] == -infinity() || fabsf(m[h]) < kHugeScore));
      if (row.lse >= 0 && lane % 4 == 0) p.lse[row.lse] = lse_of(m[h] - C::kShift, l[h]);
      const float inverse = l[h] == 0 ? 0.f : __fdividef(1, l[h]);
#pragma unroll
      for (int i = 2 * h; i < kOut; i += 4) o[i] *= inverse, o[i + 1] *= inverse;
    }
    good = __all_sync(~0u, good);
    const int group_row = tile.row + own / kGroupRows * kGroupRows;
    if (lane == 0 && group_row < tile.rows)
      call.redo[4 * Tiling<kGroupRows>::number(p, tile.b, tile.hk, group_row) + own / 16 % 4] = !good;

    const int dv = static_cast<int>(p.dv);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t out = tile.of_row[own + lane / 4 + 8 * h].out;
      if (p.out_type == DType::f32) {
#pragma unroll
        for (int j = 0; j < C::kSize / 8; ++j) {
          const int at = 8 * j + column;
          float* to = static_cast<float*>(p.out) + out + at * p.out_stride.d;
          if (out < 0 || at >= dv) continue;
          if (call.out_vector && at + 1 < dv) {
            *reinterpret_cast<float2*>(to) = make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]);
            continue;
          }
          to[0] = o[4 * j + 2 * h];
          if (at + 1 < dv) to[p.out_stride.d] = o[4 * j + 2 * h + 1];
        }
        continue;
      }
      // 16-bit: lanes trade columns for eight in a row each.
#pragma unroll
      for (int j = 0; j < C::kSize / 8; j += 4) {
        std::uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float low = o[4 * (j + n) + 2 * h], high = o[4 * (j + n) + 2 * h + 1];
          words[n] = p.out_type == DType::f16 ? pack<__half>(low, high) : pack<__nv_bfloat16>(low, high);
        }
        transpose(words, lane);
        const int at = 8 * (j + lane % 4);
        auto* to = static_cast<std::uint16_t*>(p.out) + out + at * p.out_stride.d;
        if (out < 0) continue;
        if (call.out_vector && at + 8 <= dv) {
          *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
          continue;
        }
#pragma unroll
        for (int n = 0; n < 8; ++n)
          if (at + n < dv) to[n * p.out_stride.d] = static_cast<std::uint16_t>(words[n / 2] >> n % 2 * 16);
      }
    }
  }
};

// A math warpgroup.
template <class C>
__device__ void attend(const Call& call, const Listed& listed, const Tile<C>* tiles, const Blocks& k, const Blocks& v,
                       std::uint32_t q, int group) {
  using T = typename C::Element;
  Rows<C> rows(call);
  const auto sync = [&] { named_sync(8 + group, 128); };
  int t = 0;  // tiles so far
  // Begins to load the Q of tile t; false: there is none.
  const auto load_q = [&] {
    listed.wait_full(t);
    const Tile<C>& tile = tiles[t % kTiles];
    if (tile.blocks == 0) return false;
    rows.load_q(tile, q);
    return true;
  };
  bool more = load_q();
  if (!more) return;

  // Turns go round: barrier 1 + group opens a warpgroup's.
  if (group == C::kGroups - 1) named_arrive(1, 256);
  const auto begin_turn = [&] { named_sync(1 + group, 256); };
  const auto end_turn = [&] { named_arrive(1 + (group + 1) % C::kGroups, 256); };
  const auto pass = [] {};

  const std::uint64_t q_matrix = matrix_descriptor(q + group * kGroupRows * 128);
  int block = 0;           // of the tile, whose scores these are
  bool starts = true;      // it is its tile's first, or there is no more; O is complete once the weights are used
  bool adds = false;       // the weights' block was not its tile's first
  for (int n = 0;; ++n) {  // K and V blocks so far; V's are one behind
    if (more && starts) {
      copy_wait<0>();
      fence_async_proxy();
      sync();
    }
    if (more || !starts) k.wait_full(n);
    if (n > 0) v.wait_full(n - 1);
    if (C::kTma && n > 0 && !adds) {
      const int there = tiles[(starts ? t - 1 : t) % kTiles].there;
      if (there < C::kKeys) {
        zero_rows<C::kSize, C::kKeys>(v.place(n - 1), there);
        sync();
      }
    }

    // S = Q K^T of the next block, then O (+)= P V of this one. The first and the last time one of them is for nothing.
    if constexpr (C::kTurnsAtProducts) begin_turn();
    const std::uint64_t k_matrix = matrix_descriptor(k.place(n));
    const std::uint64_t v_matrix = matrix_descriptor(v.place(n + kStages - 1), C::kKeys * 128);
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
    for (int i = 0; i < C::kKeys / 16; ++i)
      wgmma_ab<T>(rows.o, rows.weights + 4 * i, v_matrix + i * 128, i > 0 || adds);
    wgmma_commit();
    if constexpr (C::kTurnsAtProducts) end_turn();
    wgmma_wait<1>();
    pin(s);
    if (more || !starts) k.release(n);

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
      rows.begin(tiles[t % kTiles]);
      block = tiles[t % kTiles].blocks;
    }
    const Tile<C>& tile = tiles[t % kTiles];
    const bool ends = --block == 0;
    if (ends) {
      sync();  // all have read Q
      ++t;
      more = load_q();
    }
    if constexpr (C::kTerms && C::kSize == 256) wgmma_wait<0>();  // the weights' registers are wanted
    if constexpr (C::kTurnsAtProducts) rows.softmax(s, tile, block * C::kKeys, pass, pass);
    else rows.softmax(s, tile, block * C::kKeys, begin_turn, end_turn);
    if (!starts) {
      wgmma_wait<0>();
      pin(rows.o);
      v.release(n - 1);
      rows.rescale();
    }
    rows.pack_weights(s);
    adds = !starts;
    starts = ends;
  }
  if (group == 0) named_sync(1, 256);  // the last turn is nobody's
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma(const __grid_constant__ Call call) {
  extern __shared__ std::uint8_t shared[];
  __shared__ std::uint64_t barriers[4 * kStages + 2 * kTiles];
  __shared__ Tile<C> tiles[kTiles];
  const std::uint32_t first = shared_address(barriers);
  const std::uint32_t q = (shared_address(shared) + 1023) / 1024 * 1024;  // the swizzle's unit
  const Blocks k{first, q + C::kRowsBytes, C::kBlockBytes};
  const Blocks v{first + 16 * kStages, k.data + kStages * C::kBlockBytes, C::kBlockBytes};
  const Listed listed{first + 32 * kStages};
  if (threadIdx.x == 0) {
    k.init(C::kTma ? 1 : 128, 4 * C::kGroups);
    v.init(C::kTma ? 1 : 128, 4 * C::kGroups);
    listed.init(C::kListers, 4 * C::kGroups);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_decrease<C::kLoadRegisters>();
    if constexpr (!C::kTma) load_by_threads<C>(call, listed, tiles, k, v);
    else if (threadIdx.x == 0) load_by_tma<C>(call, k, v);
    else if (threadIdx.x >= 32) list_tiles<C>(call, listed, tiles);
  } else {
    registers_increase<C::kMathRegisters>();
    attend<C>(call, listed, tiles, k, v, q, threadIdx.x / 128 - 1);
  }
}

bool is_vector(const void* data, const Strides& s, std::int64_t size) {
  const std::int64_t each = 16 / size;
  return s.d == 1 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && s.b % each == 0 && s.h % each == 0 &&
         s.s % each == 0;
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
    cudaGetLastError();  // without it K and V are loaded another way
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
void launch(Call& call, cudaStream_t stream) {
  const AttentionParams& p = call.p;
  call.heads = static_cast<int>(C::Tiles::heads(p)), call.tiles = static_cast<int>(C::Tiles::tiles(p));
  // Causal: tiles of one length of many heads one after another, of as many as have their K and V in L2.
  constexpr std::int64_t kCached = 64 << 20;
  const std::int64_t head_bytes = (p.total_k >= 0 ? p.total_k : p.sk) * 2 * (p.d + p.dv);
  const bool uneven = p.score.right != kOpen || p.total_q >= 0;
  call.section =
      uneven
          ? static_cast<int>(std::clamp<std::int64_t>(kCached / std::max<std::int64_t>(head_bytes, 1), 1, call.heads))
          : 1;
  int device = 0, blocks = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
  blocks = static_cast<int>(std::min<std::int64_t>(blocks, std::int64_t{call.heads} * call.tiles));
  cudaFuncSetAttribute(wgmma<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  wgmma<C><<<blocks, C::kThreads, C::kSharedBytes, stream>>>(call);
}

template <class T, int kSize>
void launch(Call& call, cudaStream_t stream) {
  const AttentionParams& p = call.p;
  // Without a scale, masked scores would be -inf * 0.
  if (has_terms(p.score) || p.score.scale_log2 == 0) return launch<Config<T, kSize, false, true>>(call, stream);
  using Tma = Config<T, kSize, true, false>;
  if (wgmma_can_tma(p) && make_map(call.k, p, p.k, p.k_stride, p.d, Tma::kKeys) &&
      make_map(call.v, p, p.v, p.v_stride, p.dv, Tma::kKeys))
    launch<Tma>(call, stream);
  else launch<Config<T, kSize, false, false>>(call, stream);
}

template <class T>
void launch_sized(Call& call, cudaStream_t stream) {
  const std::int64_t size = std::max(call.p.d, call.p.dv);
  if (size <= 64) launch<T, 64>(call, stream);
  else if (size <= 128) launch<T, 128>(call, stream);
  else launch<T, 256>(call, stream);
}

}  // namespace

bool wgmma_takes(const AttentionParams& p) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // of what is counted in 32 bits
  return (p.q_type == DType::f16 || p.q_type == DType::bf16) && p.kv_type == p.q_type &&
         std::max(p.d, p.dv) <= kWgmmaMaxSize && std::max(p.sk, p.total_k) < kMost &&
         std::max(p.sq, p.total_q) < kMost / p.group && simt_tiles(p) < kMost && p.b < kMost && p.hk < kMost;
}

bool wgmma_can_tma(const AttentionParams& p) {
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

std::size_t wgmma_workspace(const AttentionParams& p) {
  return static_cast<std::size_t>(simt_tiles(p)) * sizeof(std::uint32_t);
}

void attention_wgmma(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  if (simt_tiles(p) == 0) return;
  Call call{};
  call.p = p;
  call.scale = std::fabs(p.score.scale_log2);
  call.q_vector = p.score.scale_log2 >= 0 && is_vector(p.q, p.q_stride, 2);
  call.kv_vector = is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2);
  call.out_vector = is_vector(p.out, p.out_stride, p.out_type == DType::f32 ? 4 : 2);
  call.redo = reinterpret_cast<std::uint8_t*>(workspace);
  if (p.q_type == DType::f16) launch_sized<__half>(call, stream);
  else launch_sized<__nv_bfloat16>(call, stream);
  attention_simt(p, stream, reinterpret_cast<const std::uint32_t*>(workspace));
}

}  // namespace rapt::cuda
