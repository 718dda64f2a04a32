// index_scores: products of fp32, lanes = keys.
//
//   for each block of keys that some query of the item sees       K^T is packed once for all of them
//     for each query
//       score[key] = sum over h of w_h relu(q_h . k)               heads are the rows of the register tile
//       scores are stored, or the best kept
#include "cpu/kernels/index_scores_table.hpp"
#include "cpu/tile/index_rows.hpp"
#include "cpu/tile/mma.hpp"
#include "cpu/tile/pack.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kTokens = 8, kWidth = kVecs * kLanes;

struct IndexScoresScratch {
  float* kt;           // [d][kWidth]
  float *q, *weights;  // q: [queries][h][q_stride], if not read in place; weights: [queries][h], times the scale
  std::int64_t q_stride;
  Topk* topk;  // [queries]

  IndexScoresScratch(BumpAllocator& allocator, const IndexShape& shape) : q_stride(round_up(shape.d, kLanes)) {
    kt = allocator.take<float>(round_up(shape.d, kLanes) * kWidth);
    q = allocator.take<float>(kTokens * shape.h * q_stride);
    weights = allocator.take<float>(kTokens * shape.h);
    topk = allocator.take<Topk>(kTokens);
    for (std::int64_t i = 0; i < kTokens && shape.topk > 0; ++i) {
      const Topk one(allocator, shape.topk, shape.keys);
      if (kt) topk[i] = one;
    }
  }
};

// sums[lane] += sum over kR heads of w_h max(floor, q_h . k).
struct HeadsTile {
  const float* q;  // rows of q_stride, one for each head
  std::int64_t q_stride, d;
  const float* kt;  // [d][kWidth]
  const float* weights;
  float* sums;  // [kWidth]
  float floor;

  template <int kR, int kV>
  [[gnu::always_inline]] void run() const {
    static_assert(kV == kVecs);
    vec acc[kR][kV];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) acc[i][v] = vec(0.f);
    accumulate<0, kVecs>(acc, q, q_stride, 1, kt, 0, d);
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) {
      vec sum = load(sums + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kR; ++i)
        sum = fma(vec(weights[i]), xsimd::max(vec(floor), acc[i][v]), sum);  // in this order NaN stays
      store(sums + v * kLanes, sum);
    }
  }
  [[gnu::always_inline]] void advance(int heads) {
    q += heads * q_stride, weights += heads;
  }
};

// Packs keys [j, j + kWidth) as columns of kt. Past the sequence's end the last key is repeated.
void pack_key_block(const IndexScoresParams& p, std::int64_t b, std::int64_t j, std::int64_t len_k, float* kt) {
  with_cache_type(p.k_type, [&](auto element) {
    const auto* const base = static_cast<const decltype(element)*>(p.k);
    for (std::int64_t lane = 0; lane < kWidth; lane += kLanes) {
      std::int64_t at[kLanes];
      for (int i = 0; i < kLanes; ++i) at[i] = key_index(p, p.k_stride, b, 0, 0, min(j + lane + i, len_k - 1));
      for (std::int64_t c0 = 0; c0 < p.d; c0 += kLanes) {
        const std::int64_t n = min(kLanes, p.d - c0);
        vec r[kLanes];
        for (int i = 0; i < kLanes; ++i) r[i] = load_strided(base + at[i] + c0 * p.k_stride.d, p.k_stride.d, n);
        transpose(r);
        for (std::int64_t c = 0; c < n; ++c) store(kt + (c0 + c) * kWidth + lane, r[c]);
      }
    }
  });
}

// The heads of a query and their weights.
struct Heads {
  const float* q;
  std::int64_t q_stride;
  const float* weights;
};
Heads prepare(const IndexScoresParams& p, std::int64_t b, std::int64_t token, const IndexScoresScratch& w,
              std::int64_t i) {
  float* const weights = w.weights + i * p.h;
  for (std::int64_t h = 0; h < p.h; ++h)
    weights[h] = p.scale * p.weights[b * p.weights_stride.b + token * p.weights_stride.s + h * p.weights_stride.h];
  const std::int64_t first = b * p.q_stride.b + token * p.q_stride.s;
  if (p.q_type == DType::f32 && p.q_stride.d == 1)
    return {static_cast<const float*>(p.q) + first, p.q_stride.h, weights};
  float* const q = w.q + i * p.h * w.q_stride;
  with_float_type(p.q_type, [&](auto element) {
    const auto* const base = static_cast<const decltype(element)*>(p.q) + first;
    for (std::int64_t h = 0; h < p.h; ++h) pack_row(base + h * p.q_stride.h, p.q_stride.d, p.d, q + h * w.q_stride);
  });
  return {q, w.q_stride, weights};
}

void run(const IndexScoresParams& p, const IndexItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  BumpAllocator allocator(scratch);
  const IndexScoresScratch w(allocator, {p.h, p.d, p.topk, p.sk});
  const Sequence sequence = sequence_of(p, p, item.b);
  const std::int64_t count = item.token_end - item.token_begin;
  IndexRow rows[kTokens];
  Heads heads[kTokens];
  std::int64_t first = item.key_end, last = item.key_begin;
  for (std::int64_t i = 0; i < count; ++i) {
    rows[i] = index_row(p, item, sequence, item.token_begin + i);
    if (rows[i].keys.first < rows[i].keys.last)
      first = min(first, rows[i].keys.first), last = max(last, rows[i].keys.last);
    heads[i] = prepare(p, item.b, item.token_begin + i, w, i);
    if (p.indices) w.topk[i].start();
  }
  alignas(64) float sums[kWidth];
  {
    const FlushDenormals flush;
    for (std::int64_t j = first; j < last; j += kWidth) {
      pack_key_block(p, item.b, j, sequence.len_k, w.kt);
      vec scale[kVecs];
      for (int v = 0; v < kVecs; ++v)
        scale[v] = p.k_scale ? scales_of(p, item.b, j + v * kLanes, sequence.len_k) : vec(1.f);
      for (std::int64_t i = 0; i < count; ++i) {
        if (rows[i].keys.first >= j + kWidth || rows[i].keys.last <= j) continue;
        for (int v = 0; v < kVecs; ++v) store(sums + v * kLanes, vec(0.f));
        tiles<kVecs>(
            HeadsTile{heads[i].q, heads[i].q_stride, p.d, w.kt, heads[i].weights, sums, p.relu ? 0.f : -kInfinity},
            p.h);
        for (int v = 0; v < kVecs; ++v)
          take_scores(rows[i], j + v * kLanes, load(sums + v * kLanes) * scale[v], p.indices ? w.topk + i : nullptr);
      }
    }
  }
  for (std::int64_t i = 0; i < count && p.indices; ++i) finish_row(p, item, rows[i].token, w.topk[i]);
}

}  // namespace

const IndexScoresKernel kIndexScores = {.facts = {.operation = Operation::index_scores,
                                                  .phase = Phase::all,
                                                  .arithmetic = "f32",
                                                  .dtypes = kCacheTypes & ~set_of(DType::i4x2),
                                                  .block_q = static_cast<int>(kTokens),
                                                  .block_k = static_cast<int>(kWidth)},
                                        .tokens = kTokens,
                                        .keys = kWidth,
                                        .scratch_bytes = bytes_of<IndexScoresScratch>,
                                        .run = run,
                                        .merge = merge_lists};

}  // namespace rapt::cpu::RAPT_ISA
