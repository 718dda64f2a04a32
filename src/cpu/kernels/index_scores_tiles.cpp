// index_scores: products of bf16 on the matrix unit, fp32 sums. Quantised keys are bf16 exactly.
//
//   for each 64 keys that some query of the item sees       rows of K are A as they lie, or widened once for all
//   queries
//     for each query
//       for each 32 heads x 32 keys                          K Q^T    A: rows of K   B: Q^T, packed once per item
//         sums[key] += w relu(products), lanes = heads       interleaved with the products of the next
//       scores, the sums of the lanes, are stored, or the best kept
//
// The matrix unit takes denormals for 0. Inf and NaN propagate as in any product.
#include "cpu/kernels/index_scores_table.hpp"
#include "cpu/tile/bf16_mma.hpp"
#include "cpu/tile/index_rows.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kTokens = 8, kKeys = 64;
constexpr int kVecsOfRow = static_cast<int>(kChunk) / kLanes;

std::int64_t padded(std::int64_t n) {
  return round_up(n, kChunk);
}

struct IndexScoresTilesScratch {
  std::int64_t d, h;               // padded to whole chunks
  std::int32_t *of_k, *of_q;       // [d / 32] offsets of the operands of each step
  bf16* k;                         // [kKeys][d], where K cannot be read in place
  char* q_t;                       // [queries][h / 32][d / 32][2] tiles, heads in the lanes
  float* weights;                  // [queries][h] times the scale, 0 for heads that do not exist
  bf16* rows;                      // [32][d] staging of heads for tiles
  float *products[2], *discarded;  // [32 keys][32 heads]
  float* sums[2];                  // [kKeys][kLanes] of this query and the one before
  Topk* topk;                      // [queries]

  IndexScoresTilesScratch(BumpAllocator& allocator, const IndexShape& shape) : d(padded(shape.d)), h(padded(shape.h)) {
    of_k = allocator.take<std::int32_t>(d / kTileDepth), of_q = allocator.take<std::int32_t>(d / kTileDepth);
    k = allocator.take<bf16>(kKeys * d);
    q_t = allocator.take<char>(kTokens * h * d * 2);
    weights = allocator.take<float>(kTokens * h);
    rows = allocator.take<bf16>(kChunk * d);
    for (float** x : {&products[0], &products[1], &discarded}) *x = allocator.take<float>(kChunk * kChunk);
    for (float*& x : sums) x = allocator.take<float>(kKeys * kLanes);
    topk = allocator.take<Topk>(kTokens);
    for (std::int64_t i = 0; i < kTokens && shape.topk > 0; ++i) {
      const Topk one(allocator, shape.topk, shape.keys);
      if (k) topk[i] = one;
    }
  }
};

// Widens a row to bf16, with zeros up to `padded`.
template <class T>
void widen_row(const T* from, std::int64_t stride, std::int64_t n, std::int64_t padded, bf16* to) {
  for (std::int64_t c = 0; c < padded; c += kLanes)
    store_any(to + c, c < n ? load_strided(from + c * stride, stride, min(kLanes, n - c)) : vec(0.f));
}

// 32 rows of K as operand A.
struct KeyRows {
  const char* base;
  std::int64_t stride;  // bytes
};
KeyRows key_rows(const IndexScoresParams& p, std::int64_t b, std::int64_t j, std::int64_t len_k, std::int64_t d,
                 bf16* packed) {
  const bool follow = p.page_size == 0 || j % p.page_size + kChunk <= p.page_size;
  const std::int64_t first = key_index(p, p.k_stride, b, 0, 0, j);
  if (p.k_type == DType::bf16 && p.k_stride.d == 1 && p.d == d && follow && j + kChunk <= len_k)
    return {reinterpret_cast<const char*>(static_cast<const bf16*>(p.k) + first), 2 * p.k_stride.s};
  with_cache_type(p.k_type, [&](auto element) {
    for (std::int64_t i = 0; i < kChunk; ++i) {
      const bool there = j + i < len_k;
      const auto* const row =
          static_cast<const decltype(element)*>(p.k) + (there ? key_index(p, p.k_stride, b, 0, 0, j + i) : first);
      widen_row(row, p.k_stride.d, there ? p.d : 0, d, packed + i * d);
    }
  });
  return {reinterpret_cast<const char*>(packed), 2 * d};
}

void pack_heads(const IndexScoresParams& p, std::int64_t b, std::int64_t token, const IndexScoresTilesScratch& w,
                std::int64_t i) {
  float* const weights = w.weights + i * w.h;
  for (std::int64_t h = 0; h < w.h; ++h)
    weights[h] =
        h < p.h ? p.scale * p.weights[b * p.weights_stride.b + token * p.weights_stride.s + h * p.weights_stride.h] : 0;
  const bf16* const q = static_cast<const bf16*>(p.q) + b * p.q_stride.b + token * p.q_stride.s;
  for (std::int64_t h0 = 0; h0 < w.h; h0 += kChunk) {
    ComponentRows rows;
    for (std::int64_t r = 0; r < kChunk; ++r) {
      bf16* const row = w.rows + r * w.d;
      rows.row[r] = row;
      widen_row(q + min(h0 + r, p.h - 1) * p.q_stride.h, p.q_stride.d, h0 + r < p.h ? p.d : 0, w.d, row);
    }
    tile_queries(rows, 0, w.d, w.d, w.q_t + (i * w.h + h0) * w.d * 2);
  }
}

// sums[key][lane] (+)= w relu(products) over 32 heads, a key at a time.
struct HeadSum {
  const float *products = nullptr, *end = nullptr;
  float* sums = nullptr;
  const float* weights = nullptr;  // [32]
  std::int64_t heads = 0;          // heads that exist
  bool starts = false;
  float floor = 0;

  [[gnu::always_inline]] bool is_done() const { return products == end; }
  [[gnu::always_inline]] void next_key() {
    vec sum = starts ? vec(0.f) : load(sums);
#pragma GCC unroll 8
    for (int i = 0; i < kVecsOfRow; ++i) {
      vec x = xsimd::max(vec(floor), load(products + i * kLanes));  // in this order NaN stays
      if (heads < kChunk) [[unlikely]]                              // selects, since 0 times an infinity would be NaN
        x = xsimd::select(lane_numbers() < vec(static_cast<float>(heads - i * kLanes)), x, vec(0.f));
      sum = fma(x, load(weights + i * kLanes), sum);
    }
    store(sums, sum);
    products += kChunk, sums += kLanes;
  }
  static vec lane_numbers() {
    alignas(64) static constexpr float kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(kNumbers);
  }
};

class IndexScoresTilesRunner {
 public:
  IndexScoresTilesRunner(const IndexScoresParams& p, const IndexItem& item, const IndexScoresTilesScratch& w)
      : p_(p), item_(item), w_(w), sequence_(sequence_of(p, p, item.b)), count_(item.token_end - item.token_begin) {}

  void run() {
    std::int64_t first = item_.key_end, last = item_.key_begin;
    for (std::int64_t i = 0; i < count_; ++i) {
      rows_[i] = index_row(p_, item_, sequence_, item_.token_begin + i);
      if (p_.indices) w_.topk[i].start();
      if (rows_[i].keys.first >= rows_[i].keys.last) continue;
      first = min(first, rows_[i].keys.first), last = max(last, rows_[i].keys.last);
      pack_heads(p_, item_.b, item_.token_begin + i, w_, i);
    }
    for (std::int64_t i = 0; i < w_.d / kTileDepth; ++i)
      w_.of_k[i] = static_cast<std::int32_t>(i * kTileDepth * 2),
      w_.of_q[i] = static_cast<std::int32_t>(i * 2 * kTileBytes);
    const std::int64_t slots = 4 * w_.d / kTileDepth - kPendingTiles;
    keys_per_slot_ = slots > 0 ? (kChunk + slots - 1) / slots : 0;
    {
      Tiles tiles;
      const FlushDenormals flush;
      for (std::int64_t j = first / kChunk * kChunk; j < last; j += kKeys) block(tiles, j, min(j + kKeys, last));
      store_pending(tiles, pending_, w_.discarded);
      finish_query();
    }
    for (std::int64_t i = 0; i < count_ && p_.indices; ++i) finish_row(p_, item_, rows_[i].token, w_.topk[i]);
  }

 private:
  static constexpr std::int64_t kPendingTiles = 4;  // tiles of products that are stored while the next ones multiply
  static constexpr std::int64_t kChunks = kKeys / kChunk;

  void block(Tiles& tiles, std::int64_t j, std::int64_t end) {
    KeyRows keys[kChunks];
    for (std::int64_t c = 0; c < kChunks && j + c * kChunk < end; ++c)
      keys[c] = key_rows(p_, item_.b, j + c * kChunk, sequence_.len_k, w_.d, w_.k + c * kChunk * w_.d);
    for (std::int64_t i = 0; i < count_; ++i) {
      const KeyRange& seen = rows_[i].keys;
      if (seen.first >= end || seen.last <= j || seen.first == seen.last) continue;
      float* const sums = w_.sums[queries_++ % 2];
      for (std::int64_t h = 0; h < w_.h; h += kChunk)
        for (std::int64_t c = 0; c < kChunks; ++c) {
          const std::int64_t key = j + c * kChunk;
          if (seen.first >= key + kChunk || seen.last <= key) continue;
          const float* const products = multiply(tiles, keys[c], w_.q_t + (i * w_.h + h) * w_.d * 2);
          before_ = {.products = products,
                     .end = products + kChunk * kChunk,
                     .sums = sums + c * kChunk * kLanes,
                     .weights = w_.weights + i * w_.h + h,
                     .heads = p_.h - h,
                     .starts = h == 0,
                     .floor = p_.relu ? 0.f : -kInfinity};
        }
      query_ = i, key_ = j, sums_ = sums;
    }
  }

  // Products of 32 keys x 32 heads, interleaved with the sums of the previous ones.
  const float* multiply(Tiles& tiles, const KeyRows& keys, const char* q) {
    float* const products = w_.products[chunks_++ % 2];
    HeadSum before = before_;
    std::int64_t pending = kPendingTiles;
    const auto next = [&]() __attribute__((always_inline)) {
      if (pending > 0) --pending;
      else
        for (std::int64_t n = 0; n < keys_per_slot_ && !before.is_done(); ++n) before.next_key();
    };
    multiply_chunk<false>(tiles, {keys.base, w_.of_k, keys.stride, kTileRows * keys.stride},
                          {q, w_.of_q, 64, kTileBytes}, w_.d / kTileDepth, nullptr, products, pending_, next);
    before_ = before;
    finish_query();
    return products;
  }

  // Finishes the pending sums. If they were the last of a query in this block, stores its scores.
  void finish_query() {
    while (!before_.is_done()) before_.next_key();
    if (query_ < 0) return;
    const IndexRow& row = rows_[query_];
    for (std::int64_t j = 0; j < kKeys; j += kLanes) {
      if (row.keys.first >= key_ + j + kLanes || row.keys.last <= key_ + j) continue;
      vec of_key[kLanes];
      for (int i = 0; i < kLanes; ++i) of_key[i] = load(sums_ + (j + i) * kLanes);
      vec score = sums(of_key);
      if (p_.k_scale) score = score * scales_of(p_, item_.b, key_ + j, sequence_.len_k);
      take_scores(row, key_ + j, score, p_.indices ? w_.topk + query_ : nullptr);
    }
    query_ = -1;
  }

  const IndexScoresParams& p_;
  const IndexItem& item_;
  const IndexScoresTilesScratch& w_;
  Sequence sequence_;
  std::int64_t count_, keys_per_slot_ = 0;
  IndexRow rows_[kTokens];
  Pending pending_ = {w_.discarded};
  HeadSum before_;                         // sums of the previous chunk of products
  std::int64_t chunks_ = 0, queries_ = 0;  // counters that alternate between two buffers
  std::int64_t query_ = -1, key_ = 0;      // the query and key whose sums are complete except for `before_`
  const float* sums_ = nullptr;
};

void run(const IndexScoresParams& p, const IndexItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  BumpAllocator allocator(scratch);
  const IndexScoresTilesScratch w(allocator, {p.h, p.d, p.topk, p.sk});
  IndexScoresTilesRunner(p, item, w).run();
}

}  // namespace

const IndexScoresKernel kIndexScores = {.facts = {.operation = Operation::index_scores,
                                                  .phase = Phase::all,
                                                  .arithmetic = "bf16",
                                                  .dtypes = set_of(DType::bf16) | set_of(DType::i8) | kFp8Types,
                                                  .block_q = static_cast<int>(kTokens),
                                                  .block_k = static_cast<int>(kKeys)},
                                        .tokens = kTokens,
                                        .keys = kKeys,
                                        .scratch_bytes = bytes_of<IndexScoresTilesScratch>,
                                        .run = run,
                                        .merge = merge_lists};

}  // namespace rapt::cpu::RAPT_ISA
