// index_scores_tiles: scores of q in bf16 and k in bf16 or codes of 8 bits on Hopper's tensor cores.
//
//   for each item of a thread block: some queries of a sequence, whose heads are 2 N rows of Q, and a split of the keys
//     load Q and the weights                                         (producers, an item ahead)
//     for each block of 128 keys, of which some query sees one:
//       load K                                                       (producers, by TMA; codes by threads)
//       S = K Q^T, [128 keys, N] for each of two math warpgroups, in halves of 64 keys
//       score[key, query] = sum over the query's heads of relu(S) w, times the key's scale
//
// Keys are the rows of S, so that a thread has N / 4 columns of two keys, and adds up most of a query's heads in
// registers, where their weights are, too. With N = 128 and d = 128, a block is 2048 cycles of the tensor cores, about
// 700 instruction slots of each scheduler for the sums, and 32 KiB from L2.
//
// The order of a score's sums depends on h alone: a thread's columns, lanes 0 + 1 and 2 + 3, both. Padding heads would
// make NaN of an infinite key: sums that are NaN are computed again without them.
#include <algorithm>

#include "cuda/hopper/codes.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/kernels/index_scores.hpp"
#include "cuda/tile/element.cuh"
#include "cuda/tile/launch.cuh"

namespace rapt::cuda {
namespace {

using Element = __nv_bfloat16;

constexpr int kKeys = 128, kHalfKeys = 64;    // of a block; of a product
constexpr int kProducers = 256, kGroups = 2;  // threads; math warpgroups, of 128 threads each
constexpr int kThreads = kProducers + 128 * kGroups;
constexpr int kProducerRegisters = 64, kMathRegisters = 192;
static_assert(kProducers * kProducerRegisters + kGroups * 128 * kMathRegisters <= 65536);

// Of a kernel: columns of d and heads of a query, padded.
template <int kDepth, int kPaddedHeads>
struct Config {
  static constexpr int kD = kDepth, kHeads = kPaddedHeads;
  static constexpr int kColumns = kHeads % 3 == 0 ? 96 : kHeads == 8 ? 64 : 128;  // N: a warpgroup's
  static constexpr int kQueries = kColumns / kHeads;                              // of a warpgroup
  static constexpr int kQueryBytes = kColumns * kD * 2;                           // of a warpgroup
  static constexpr int kKeyBytes = kKeys * kD * 2;
  static constexpr int kQueryPanel = kColumns * 128, kKeyPanel = kKeys * 128;
  static constexpr int kQuerySlots = 2, kKeySlots = 3;
  static constexpr int kWeightsAt = kQuerySlots * kGroups * kQueryBytes + kKeySlots * kKeyBytes;
  static constexpr int kBarriersAt = kWeightsAt + kQuerySlots * kGroups * kColumns * 4;
  static constexpr int kSharedBytes = kBarriersAt + (kQuerySlots + kKeySlots) * 16;
  static_assert(kSharedBytes <= 227 << 10 && kQueryBytes % 1024 == 0 && kColumns % 32 == 0);
  static_assert(kGroups * kQueries <= 32);  // a lane for each query of an item

  using Queries = Ring<kQuerySlots>;
  using Keys = Ring<kKeySlots>;
};

struct TilesParams {
  CUtensorMap q, k;
  IndexScoresParams p;
  IndexQueries queries;
  std::int64_t tiles, items;  // of a sequence's queries; all
  int split_keys;             // of a split, a multiple of kKeys
  int box;                    // keys that TMA loads at a time: a block, or what always lies in one page
  Divisor page_size;
  bool q_by_tma, k_by_tma;
  bool q_vector, k_vector;  // whether threads can copy rows 16 bytes at a time
};

// The items of a thread block. Every other round goes through the thread blocks backwards: items get shorter.
struct ItemNumbers {
  const TilesParams& params;
  std::int64_t index = blockIdx.x, first = 0;  // first: of the round

  __device__ explicit ItemNumbers(const TilesParams& params) : params(params) {}
  __device__ explicit operator bool() const { return index < params.items; }
  __device__ void next() {
    index = 2 * (first + gridDim.x) - 1 - index;
    first += gridDim.x;
  }
};

// What a thread block works on: queries [token, token_end) and keys [split_begin, split_end) of sequence b.
template <class C>
struct Item {
  std::int64_t b, token, token_end;
  int split_begin, split_end;
  int first, last;  // the keys of the split that query token + lane sees
  int begin, end;   // the keys of the split that some query sees

  // The last queries come first: where that differs, they see the most keys. All queries have a split before the next.
  __device__ Item(const TilesParams& params, std::int64_t index) {
    const IndexScoresParams& p = params.p;
    const std::int64_t sequences = params.queries.sequences(), all = params.tiles * sequences;
    const auto split = static_cast<int>(index / all);
    const std::int64_t of_split = index - split * all, tile = of_split / sequences;
    b = params.queries.b_begin + of_split - tile * sequences;
    token = params.queries.token_begin + (params.tiles - 1 - tile) * (kGroups * C::kQueries);
    token_end = min(token + kGroups * C::kQueries, params.queries.token_end);
    split_begin = split * params.split_keys;
    split_end = static_cast<int>(min(std::int64_t{split_begin} + params.split_keys, p.sk));
    const std::int64_t own = token + threadIdx.x % 32;
    const KeyRange seen = own < token_end ? visible_keys(p, b, sequence_of(p, p, b), own) : KeyRange{0, 0};
    first = static_cast<int>(clamp_to(seen.first, split_begin, split_end));
    last = static_cast<int>(clamp_to(seen.last, first, split_end));
    begin = __reduce_min_sync(~0u, first < last ? first : split_end);
    end = __reduce_max_sync(~0u, first < last ? last : begin);
  }
  __device__ int first_block() const { return begin / kKeys * kKeys; }
  __device__ int blocks() const { return (end - first_block() + kKeys - 1) / kKeys; }
  __device__ bool is_empty() const { return begin >= end; }
};

// Loads an item's rows of Q by TMA, by one thread; zeros for heads and queries that do not exist.
template <class C>
__device__ void load_queries_by_tma(const TilesParams& params, const Item<C>& item, std::uint32_t to,
                                    std::uint32_t barrier) {
  const int groups = item.token + C::kQueries < item.token_end ? kGroups : 1;
  barrier_arrive_expecting(barrier, groups * C::kQueryBytes);
  for (int group = 0; group < groups; ++group)
#pragma unroll
    for (int panel = 0; panel < C::kD / 64; ++panel)
      tma_load(to + group * C::kQueryBytes + panel * C::kQueryPanel, &params.q, panel * 64, 0,
               static_cast<int>(item.token) + group * C::kQueries, static_cast<int>(item.b), barrier, false);
}

// The same by the producers.
template <class C>
__device__ void load_queries(const TilesParams& params, const Item<C>& item, std::uint32_t to) {
  const IndexScoresParams& p = params.p;
  for (int row = threadIdx.x / 32 * 32; row < kGroups * C::kColumns; row += kProducers) {
    const int own = row + static_cast<int>(threadIdx.x) % 32, head = own % C::kHeads;
    const std::int64_t token = item.token + own / C::kHeads;
    const std::int64_t at = item.b * p.q_stride.b + token * p.q_stride.s + head * p.q_stride.h;
    load_rows<C::kD, 4>(32, to + row / C::kColumns * C::kQueryBytes + row % C::kColumns * 128, C::kQueryPanel, p.q,
                        token < item.token_end && head < p.h ? at : -1, p.q_stride.d, static_cast<int>(p.d),
                        params.q_vector, 0);
  }
}

// The weights of an item's columns, times the scale.
template <class C>
__device__ void load_weights(const IndexScoresParams& p, const Item<C>& item, float* weights) {
  for (int own = threadIdx.x; own < kGroups * C::kColumns; own += kProducers) {
    const int head = own % C::kHeads;
    const std::int64_t token = item.token + own / C::kHeads;
    const bool exists = token < item.token_end && head < p.h;
    const std::int64_t at = item.b * p.weights_stride.b + token * p.weights_stride.s + head * p.weights_stride.h;
    weights[own] = exists ? p.weights[at] * p.scale : 0.f;
  }
}

// Where key `key` of sequence b is. Without branches that lanes take differently, which wgmma would wait for.
struct KeyRow {
  std::int64_t entry, row;

  __device__ __forceinline__ KeyRow(const TilesParams& params, std::int64_t b, int key) : entry(b), row(key) {
    const IndexScoresParams& p = params.p;
    if (p.page_size == 0) return;
    const unsigned page = params.page_size.quotient(key);
    row = key - static_cast<int>(page * params.page_size.by);
    entry = clamp_to(p.pages.element(b * p.pages_stride_b + page * p.pages.stride), 0, p.page_count - 1);
  }
  __device__ std::int64_t at(const Strides& s) const { return entry * s.b + row * s.s; }
};

// The boxes of key blocks, one for each lane of a warp. A box that no query sees is put past the last row of a page:
// TMA writes zeros for it, and its page need not exist.
struct KeyBox {
  int row, entry;

  template <class C>
  __device__ static KeyBox of(const TilesParams& params, const Item<C>& item, int block) {
    const int key = block + static_cast<int>(threadIdx.x) % 32 * params.box;
    if (params.p.page_size > 0 && (key >= item.end || key + params.box <= item.begin))
      return {static_cast<int>(params.page_size.by), 0};
    const KeyRow first(params, item.b, key);
    return {static_cast<int>(first.row), static_cast<int>(first.entry)};
  }
};

constexpr int kWarpKeys = kKeys / (kProducers / 32);  // of a block, that a warp loads by threads

// Rows of codes on their way from memory to a block of bf16, in registers of a warp. Of 8 rows, each pass has the
// 16-byte chunks of a panel: 8 lanes that store together have all banks.
template <class C>
struct CodeRows {
  static constexpr int kChunks = kWarpKeys / 8 * (C::kD / 64);  // of 16 codes; of a lane
  uint4 chunks[kChunks];

  __device__ static int row_of(int i) { return i / (C::kD / 64) * 8 + static_cast<int>(threadIdx.x) % 32 / 4; }
  __device__ static int chunk_of(int i) { return i % (C::kD / 64) * 4 + static_cast<int>(threadIdx.x) % 4; }

  // `at`: the offset of row lane % kWarpKeys; negative: it is 0.
  __device__ __forceinline__ void load(const TilesParams& params, std::int64_t at, int i) {
    const IndexScoresParams& p = params.p;
    const int chunk = chunk_of(i);
    const std::int64_t start = __shfl_sync(~0u, at, row_of(i));
    chunks[i] = make_uint4(0, 0, 0, 0);
    if (start < 0 || 16 * chunk >= p.d) return;
    chunks[i] = *reinterpret_cast<const uint4*>(static_cast<const std::uint8_t*>(p.k) + start + 16 * chunk);
  }
  __device__ __forceinline__ void load(const TilesParams& params, std::int64_t at) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) load(params, at, i);
  }
  // Stores the rows to the block that begins at `to`, in the layout of cuda/hopper/pipeline.cuh's load_rows(), and
  // loads those of the next block.
  template <DType kType>
  __device__ __forceinline__ void store(std::uint32_t to, const TilesParams& params, std::int64_t next) {
    const Codes<kType> codes{Codes<kType>::kOffset};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      std::uint32_t pairs[4][2];
      const std::uint32_t bytes[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) codes.template widen_in_order<Element>(bytes[n], pairs[n]);
      load(params, next, i);
      const int row = row_of(i), chunk = chunk_of(i);
      const std::uint32_t panel = to + chunk / 4 * C::kKeyPanel + row * 128;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store16(panel + chunk_place<128>(row, chunk % 4 * 2 + half) * 16,
                make_uint4(pairs[2 * half][0], pairs[2 * half][1], pairs[2 * half + 1][0], pairs[2 * half + 1][1]));
    }
  }
};

// Stores -inf for keys [first, last) of the item's queries, by the producers but one warp, which loads by TMA.
template <class C>
__device__ void hide_keys(const IndexScoresParams& p, const Item<C>& item, int first, int last) {
  if (threadIdx.x < 32) return;
  for (std::int64_t token = item.token; token < item.token_end; ++token) {
    float* const row = p.scores + item.b * p.scores_stride.b + token * p.scores_stride.s;
    for (int key = first + static_cast<int>(threadIdx.x) - 32; key < last; key += kProducers - 32)
      row[key * p.scores_stride.d] = -kInfinity;
  }
}

// Loads the blocks of keys of an item, from the n-th of the ring on, by one warp.
template <class C>
__device__ void load_keys_by_tma(const TilesParams& params, const Item<C>& item, const typename C::Keys& k,
                                 unsigned n) {
  const int lane = threadIdx.x % 32;
  KeyBox next = KeyBox::of(params, item, item.first_block());
  for (int key = item.first_block(); key < item.end; key += kKeys, ++n) {
    const KeyBox box = next;
    next = KeyBox::of(params, item, key + kKeys);  // a block ahead: the page table is in device memory
    k.wait_empty(n);
    if (lane == 0) barrier_arrive_expecting(k.full(n), C::kKeyBytes);
    __syncwarp();
    if (lane * params.box < kKeys)
#pragma unroll
      for (int panel = 0; panel < C::kD / 64; ++panel)
        tma_load(k.slot(n) + panel * C::kKeyPanel + lane * params.box * 128, &params.k, panel * 64, box.row, 0,
                 box.entry, k.full(n), true);
    __syncwarp();
  }
}

// The same two columns at a time, for codes that are not aligned to 16 bytes.
template <class C>
__device__ void load_codes(std::uint32_t to, const IndexScoresParams& p, std::int64_t at) {
  const auto* const codes = static_cast<const std::uint8_t*>(p.k);
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kWarpKeys * C::kD / 2; i += 32) {
    const int row = i / (C::kD / 2), column = i % (C::kD / 2) * 2;
    const std::int64_t start = __shfl_sync(~0u, at, row);
    const auto element = [&](int n) -> std::uint32_t {
      if (start < 0 || column + n >= p.d) return 0;
      return __float_as_uint(code_of_byte(codes[start + (column + n) * p.k_stride.d], p.k_type)) >> 16;
    };
    store4(to + column / 64 * C::kKeyPanel + row * 128 + chunk_place<128>(row, column / 8 % 8) * 16 + column % 8 * 2,
           element(0) | element(1) << 16);
  }
}

// Copies of the producers that are on their way, and the barrier of the last ones.
class Copies {
 public:
  // The copies since the call before belong to `barrier`.
  __device__ void add(std::uint32_t barrier) {
    copy_commit();
    if (barrier_) finish<1>();
    barrier_ = barrier;
  }
  __device__ void finish() {
    if (barrier_) finish<0>();
    barrier_ = 0;
  }

 private:
  template <int kPending>
  __device__ void finish() const {
    copy_wait<kPending>();
    fence_async_proxy();
    barrier_arrive(barrier_);
  }
  std::uint32_t barrier_ = 0;
};

// The same in any layout and of any type, by the producers.
template <class C>
__device__ void load_keys(const TilesParams& params, const Item<C>& item, const typename C::Keys& k, unsigned n,
                          Copies& copies) {
  const IndexScoresParams& p = params.p;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * kWarpKeys;
  const auto row_at = [&](int block) {
    const int own = block + warp_row + static_cast<int>(threadIdx.x) % kWarpKeys;
    return own >= item.begin && own < item.end ? KeyRow(params, item.b, own).at(p.k_stride) : -1;
  };
  if (p.k_type != DType::bf16) {
    copies.finish();
    CodeRows<C> rows;
    if (params.k_vector) rows.load(params, row_at(item.first_block()));
    for (int key = item.first_block(); key < item.end; key += kKeys, ++n) {
      const std::uint32_t to = k.slot(n) + warp_row * 128;
      k.wait_empty(n);
      if (params.k_vector)
        with_dtype<set_of(DType::i8) | kFp8Types>(
            p.k_type, [&](auto type) __attribute__((always_inline)) {
              rows.template store<decltype(type)::value>(to, params, row_at(key + kKeys));
            });
      else load_codes<C>(to, p, row_at(key));
      fence_async_proxy();
      barrier_arrive(k.full(n));
    }
    return;
  }
  for (int key = item.first_block(); key < item.end; key += kKeys, ++n) {
    k.wait_empty(n);
    load_rows<C::kD, 8>(kWarpKeys, k.slot(n) + warp_row * 128, C::kKeyPanel, p.k, row_at(key), p.k_stride.d,
                        static_cast<int>(p.d), params.k_vector, 0);
    copies.add(k.full(n));
  }
}

template <class C>
__device__ void produce(const TilesParams& params, const typename C::Queries& q, const typename C::Keys& k,
                        float* weights) {
  const IndexScoresParams& p = params.p;
  Copies copies;
  unsigned i = 0, n = 0;
  for (ItemNumbers numbers(params); numbers; numbers.next()) {
    const Item<C> item(params, numbers.index);
    if (item.is_empty()) {
      hide_keys(p, item, item.split_begin, item.split_end);
      continue;
    }
    q.wait_empty(i);
    load_weights(p, item, weights + i % C::kQuerySlots * (kGroups * C::kColumns));
    if (!params.q_by_tma) load_queries<C>(params, item, q.slot(i)), copies.add(q.full(i));
    else if (threadIdx.x == 0) load_queries_by_tma<C>(params, item, q.slot(i), q.full(i));
    else barrier_arrive(q.full(i));
    ++i;
    if (!params.k_by_tma) {
      load_keys<C>(params, item, k, n, copies);
    } else {
      copies.finish();  // math warps free no slot for keys before they have the queries
      if (threadIdx.x < 32) load_keys_by_tma<C>(params, item, k, n);
    }
    n += item.blocks();
    hide_keys(p, item, item.split_begin, item.first_block());
    hide_keys(p, item, min(item.first_block() + item.blocks() * kKeys, item.split_end), item.split_end);
  }
  copies.finish();
}

// s = K Q^T of 64 keys.
template <class C>
__device__ __forceinline__ void multiply(float (&s)[C::kColumns / 2], std::uint32_t keys, std::uint32_t queries) {
  pin(s);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::kD / 16; ++step) {
    const int panel = step / 4, within = step % 4 * 2;
    wgmma_abt<Element>(s, matrix_at(keys + panel * C::kKeyPanel) + within,
                       matrix_at(queries + panel * C::kQueryPanel) + within, step > 0);
  }
  wgmma_commit();
}

// A lane's part of the scores: the sums over its columns, of two keys and each query.
template <class C, bool kAll>
__device__ __forceinline__ void add_heads(float (&sum)[2][C::kQueries], const float (&s)[C::kColumns / 2],
                                          const float (&weights)[C::kColumns / 4], float floor, int heads) {
  constexpr int kEights = C::kHeads / 8;
#pragma unroll
  for (int query = 0; query < C::kQueries; ++query)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float x = 0;
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const int column = query * kEights + j;
          float raised;  // fmaxf() would drop a NaN
          asm("max.NaN.f32 %0, %1, %2;" : "=f"(raised) : "f"(s[4 * column + 2 * row + b]), "f"(floor));
          if (kAll || 8 * j + static_cast<int>(threadIdx.x) % 4 * 2 + b < heads)
            x = fmaf(raised, weights[2 * column + b], x);
        }
      sum[row][query] = x;
    }
}

// Sums over four lanes: each ends with the key of row lane % 2, and every second query from lane / 2 % 2 on.
template <int kQueries>
__device__ __forceinline__ void add_lanes(const float (&sum)[2][kQueries], float (&score)[(kQueries + 1) / 2]) {
  const bool odd = threadIdx.x % 2, upper = threadIdx.x / 2 % 2;
  float of_row[kQueries];
#pragma unroll
  for (int query = 0; query < kQueries; ++query) {
    const float own = odd ? sum[1][query] : sum[0][query], other = odd ? sum[0][query] : sum[1][query];
    of_row[query] = own + __shfl_xor_sync(~0u, other, 1);
  }
  if constexpr (kQueries == 1) {
    score[0] = of_row[0] + __shfl_xor_sync(~0u, of_row[0], 2);
  } else {
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i) {
      const float own = upper ? of_row[2 * i + 1] : of_row[2 * i], other = upper ? of_row[2 * i] : of_row[2 * i + 1];
      score[i] = own + __shfl_xor_sync(~0u, other, 2);
    }
  }
}

template <class C>
__device__ void compute(const TilesParams& params, const typename C::Queries& q, const typename C::Keys& k,
                        const float* all_weights) {
  constexpr int kScores = (C::kQueries + 1) / 2;
  const IndexScoresParams& p = params.p;
  const int lane = threadIdx.x % 32, group = uniform((static_cast<int>(threadIdx.x) - kProducers) / 128),
            own_query = C::kQueries == 1 ? 0 : lane / 2 % 2;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + lane % 2 * 8;  // of each half
  const bool stores = C::kQueries > 1 || lane / 2 % 2 == 0;
  const float floor = p.relu ? 0 : -kInfinity;
  unsigned i = 0, n = 0;
  for (ItemNumbers numbers(params); numbers; numbers.next()) {
    const Item<C> item(params, numbers.index);
    if (item.is_empty()) continue;
    const std::int64_t token = item.token + group * C::kQueries + own_query;
    float* const out = p.scores + item.b * p.scores_stride.b + token * p.scores_stride.s;
    int first[kScores], last[kScores];
#pragma unroll
    for (int query = 0; query < kScores; ++query) {
      const int from = group * C::kQueries + own_query + 2 * query;
      first[query] = __shfl_sync(~0u, item.first, from), last[query] = __shfl_sync(~0u, item.last, from);
    }
    q.wait_full(i);
    float weights[C::kColumns / 4];
    const float* const from = all_weights + (i % C::kQuerySlots * kGroups + group) * C::kColumns;
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j) {
      const float2 two = *reinterpret_cast<const float2*>(from + 8 * j + lane % 4 * 2);
      weights[2 * j] = two.x, weights[2 * j + 1] = two.y;
    }
    const std::uint32_t queries = q.slot(i) + group * C::kQueryBytes;
    const bool has_queries = item.token + group * C::kQueries < item.token_end;

    if (!has_queries) {
      for (int key = item.first_block(); key < item.end; key += kKeys, ++n) k.wait_full(n), k.release(n);
    } else {
      float low[C::kColumns / 2], high[C::kColumns / 2], scales[2] = {1, 1};  // products of each half of a block
      const auto finish = [&](const float(&s)[C::kColumns / 2], int key, float scale) __attribute__((always_inline)) {
        float sum[2][C::kQueries], score[kScores];
        add_heads<C, true>(sum, s, weights, floor, C::kHeads);
        if (p.h < C::kHeads) {
          bool has_nan = false;
#pragma unroll
          for (int query = 0; query < C::kQueries; ++query)
            has_nan |= sum[0][query] != sum[0][query] || sum[1][query] != sum[1][query];
          if (__any_sync(~0u, has_nan)) add_heads<C, false>(sum, s, weights, floor, static_cast<int>(p.h));
        }
        add_lanes<C::kQueries>(sum, score);
#pragma unroll
        for (int query = 0; query < kScores; ++query)
          if (stores && key < item.split_end && token + 2 * query < item.token_end)
            out[2 * query * p.scores_stride.s + key * p.scores_stride.d] =
                key >= first[query] && key < last[query] ? score[query] * scale : -kInfinity;
      };
      for (int key = item.first_block(); key < item.end; key += kKeys, ++n) {
        const int own = key + row;
        k.wait_full(n);
        multiply<C>(low, k.slot(n), queries);
        multiply<C>(high, k.slot(n) + kHalfKeys * 128, queries);
        if (p.k_scale)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int j = min(max(own + half * kHalfKeys, item.begin), item.end - 1);
            scales[half] = p.k_scale[KeyRow(params, item.b, j).at(p.k_scale_stride)];
          }
        wgmma_wait<1>();
        pin(low);
        finish(low, own, scales[0]);
        wgmma_wait<0>();
        pin(high);
        k.release(n);
        finish(high, own + kHalfKeys, scales[1]);
      }
    }
    __syncwarp();
    q.release(i++);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) index_scores_tiles(const __grid_constant__ TilesParams params) {
  extern __shared__ __align__(1024) std::byte shared[];
  const std::uint32_t base = shared_address(shared);
  const typename C::Queries q{base + C::kBarriersAt, base, kGroups * C::kQueryBytes};
  const typename C::Keys k{base + C::kBarriersAt + C::kQuerySlots * 16,
                           base + C::kQuerySlots * kGroups * C::kQueryBytes, C::kKeyBytes};
  auto* const weights = reinterpret_cast<float*>(shared + C::kWeightsAt);
  if (threadIdx.x == 0) {
    q.init(kProducers, kGroups * 4), k.init(params.k_by_tma ? 1 : kProducers, kGroups * 4);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kProducers) {
    registers_decrease<kProducerRegisters>();
    produce<C>(params, q, k, weights);
  } else {
    registers_increase<kMathRegisters>();
    compute<C>(params, q, k, weights);
  }
}

template <class C>
cudaError_t launch(TilesParams params, cudaStream_t stream) {
  constexpr std::int64_t kRounds = 16, kMinBlocks = 4;
  const IndexScoresParams& p = params.p;
  params.q_by_tma =
      params.q_vector &&
      make_map(
          params.q, p.q_type, p.q,
          {{p.d, 1, 64}, {p.h, p.q_stride.h, C::kHeads}, {p.sq, p.q_stride.s, C::kQueries}, {p.b, p.q_stride.b, 1}});
  params.box = p.page_size == 0 ? kKeys : static_cast<int>(std::gcd(p.page_size, std::int64_t{kKeys}));
  const bool paged = p.page_size > 0;
  params.k_by_tma = p.k_type == DType::bf16 && params.k_vector && params.box % 8 == 0 &&
                    make_map(params.k, p.k_type, p.k,
                             {{p.d, 1, 64},
                              {paged ? p.page_size : p.sk, p.k_stride.s, params.box},
                              {1, 0, 1},
                              {paged ? p.page_count : p.b, p.k_stride.b, 1}});
  params.page_size = Divisor(p.page_size);

  // If there are few queries, so many splits of the keys that thread blocks of a GPU share them evenly.
  const std::int64_t processors = multiprocessors(), blocks = ceil_div(p.sk, kKeys);
  params.tiles = ceil_div(params.queries.tokens(), kGroups * C::kQueries);
  const std::int64_t all = params.queries.sequences() * params.tiles;
  std::int64_t split_blocks = blocks;
  if (all < kRounds / 4 * processors) {
    const std::int64_t share = ceil_div(blocks * all, processors);
    split_blocks = std::min(std::max(share / kRounds, std::min(share, kMinBlocks)), blocks);
  }
  params.split_keys = static_cast<int>(split_blocks * kKeys);
  params.items = all * ceil_div(blocks, split_blocks);
  return launch_kernel(false, index_scores_tiles<C>, static_cast<unsigned>(std::min(params.items, processors)),
                       kThreads, C::kSharedBytes, stream, params);
}

template <int kD>
cudaError_t launch_for_heads(const TilesParams& params, cudaStream_t stream) {
  const std::int64_t h = params.p.h;
  if (h <= 8) return launch<Config<kD, 8>>(params, stream);
  if (h <= 16) return launch<Config<kD, 16>>(params, stream);
  if (h <= 24) return launch<Config<kD, 24>>(params, stream);
  if (h <= 32) return launch<Config<kD, 32>>(params, stream);
  if (h <= 48) return launch<Config<kD, 48>>(params, stream);
  if (h <= 64) return launch<Config<kD, 64>>(params, stream);
  if (h <= 96) return launch<Config<kD, 96>>(params, stream);
  return launch<Config<kD, 128>>(params, stream);
}

}  // namespace

cudaError_t launch_index_scores_tiles(const IndexScoresParams& p, const IndexQueries& queries, cudaStream_t stream) {
  if (queries.sequences() == 0 || queries.tokens() == 0 || p.sk == 0) return cudaSuccess;
  TilesParams params{};
  params.p = p, params.queries = queries;
  params.q_vector = is_vector(p.q, p.q_stride, 2);
  params.k_vector = is_vector(p.k, p.k_stride, p.k_type == DType::bf16 ? 2 : 1);
  return p.d <= 64 ? launch_for_heads<64>(params, stream) : launch_for_heads<128>(params, stream);
}

}  // namespace rapt::cuda
