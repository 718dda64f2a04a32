// attention_backward by products of bf16 components, fp32 sums, on the matrix unit or in vectors that multiply pairs of
// bf16. As in attention_backward.cpp an item is a range of keys, rows come in chunks, and tile columns of scores are
// queries.
//
//   bf16   one component: P and dS are rounded to bf16 to be multiplied again
//   f16x3  two components, exact for fp16 inputs, P and dS to 16 bits. dQ, dK and dV are three products each, without
//          that of the low components; S and dP have all four, since dP and delta may cancel
//
//   for each block of kBlockKeys keys in the range
//     for each 32 keys x 32 rows                 S^T = K Q^T, dP^T = V dO^T      A: rows of K and V   B: Q^T, dO^T
//       P^T, dS^T -> components, interleaved with the products of the next
//     dV += P^T dO, dK += dS^T Q                 for 32 keys over all rows       A: P^T, dS^T         B: dO, Q
//     dQ^T += K^T dS^T                           for 32 rows over the block      A: K^T               B: dS^T
//
// Nothing is transposed within: K and V are A as they lie, and the operands that are neither are packed once per item
// (K^T) or chunk. A pairs rows i and i + 16, which is how two vectors of rows merge without a shuffle; so do dO and Q.
// Heads with elements that the matrix unit cannot be given (Inf and NaN among them) go to the vector kernel.
#include "cpu/kernels/backward_chunk.hpp"
#include "cpu/tile/bf16_mma.hpp"
#include "cpu/tile/carver.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kBlock = kBackwardKeys, kBlockChunks = kBlock / kChunk;  // keys; chunks of them
constexpr std::int64_t kRows = 192, kRowChunks = kRows / kChunk;                // of a call of add_rows()
constexpr int kVecsOfChunk = static_cast<int>(kChunk) / kLanes;
constexpr std::int64_t kPairBytes = 2 * kTileBytes;  // of a component of a chunk
// Inputs, and products of components that a product is made of.
template <int kComponents>
using Input = std::conditional_t<kComponents == 1, bf16, f16>;
template <int kComponents>
constexpr int kScoreProducts = kComponents* kComponents;
template <int kComponents>
constexpr int kSumProducts = 2 * kComponents - 1;

const AttentionBackwardKernel& vector_kernel() {
  return *vector_kernels().attention_backward;
}

std::int64_t padded(std::int64_t n) {
  return round_up(n, kChunk);
}

// A panel of 32 rows, whose dQ^T is [d][32].
struct RowChunk : Panel {
  const float* neg_delta = nullptr;
  float* dslope = nullptr;         // [32] for dalibi, as a GradPanel's
  std::int64_t low = 0, high = 0;  // keys that a row sees
};

// Where each product of a sum has its operands, relative to those of the first: for each step of the sum products of
// components, each of which shares one with the product before.
struct Steps {
  std::int32_t *a, *b;

  Steps(Carver& carver, std::int64_t products)
      : a(carver.take<std::int32_t>(products)), b(carver.take<std::int32_t>(products)) {}
  // Bytes from step to step and from component to component.
  void fill(std::int64_t steps, int products, std::int64_t a_step, std::int64_t a_component, std::int64_t b_step,
            std::int64_t b_component) const {
    constexpr int kOfA[] = {0, 0, 1, 1}, kOfB[] = {1, 0, 0, 1};
    for (std::int64_t i = 0; i < steps; ++i)
      for (int product = 0; product < products; ++product) {
        a[i * products + product] = static_cast<std::int32_t>(i * a_step + kOfA[product] * a_component);
        b[i * products + product] =
            static_cast<std::int32_t>(i * b_step + (products == 1 ? 0 : kOfB[product]) * b_component);
      }
  }
};

template <int kComponents>
struct Scratch {
  static constexpr std::int64_t kWeightBytes = kComponents * kPairBytes;  // of a chunk

  std::int64_t d, dv;  // padded to whole chunks
  bool* falls_back;    // the whole item does
  std::byte* rest;     // where the vector kernel's begins

  // Of the item's keys.
  bf16 *k, *v;      // [keys / 32][component][32][d or dv], where they cannot be read in place
  char* k_t;        // [keys / 32][component][d / 16] tiles of K^T
  float *dk, *dv_;  // [keys / 32][d / 32][32 keys][32]
  // Of a chunk of rows.
  Row* row;
  char *q_t, *dout_t;  // [chunk][component][d / 32][2] tiles, rows in the lanes
  char *q, *dout;      // [chunk][component][d / 16] tiles of pairs of rows
  float *neg_m, *neg_delta;
  float* dq_t;  // [chunk][d][32], and [chunk][32] for dalibi, where all of the head's keys are in the item
  // Of a chunk of rows and a block of keys.
  char *p, *ds;      // [chunk of keys][chunk of rows][component] A: rows of 32 bf16
  char* ds_pairs;    // the same, B: pairs of keys
  float* scores[2];  // S, then dP, of 32 x 32; and of those before
  float* slopes;     // of the softcap, of 32 x 32
  float* exact;      // S and dP again, to become P and dS for dalibi
  bf16* rows;        // [component][32][d or dv] on their way into tiles
  float *zero, *discarded;
  Steps of_s, of_dp, of_dv, of_dk, of_dq;

  Scratch(Carver& carver, const BackwardShape& shape)
      : d(padded(shape.d)),
        dv(padded(shape.dv)),
        of_s(carver, d / kTileDepth * kScoreProducts<kComponents>),
        of_dp(carver, dv / kTileDepth * kScoreProducts<kComponents>),
        of_dv(carver, kRowChunks * kSumProducts<kComponents>),
        of_dk(carver, kRowChunks * kSumProducts<kComponents>),
        of_dq(carver, kBlockChunks * kSumProducts<kComponents>) {
    const std::int64_t keys = round_up(max(shape.keys, 1), kBlock);
    falls_back = carver.take<bool>(1);
    const std::int64_t before = static_cast<std::int64_t>(carver.used());
    k = carver.take<bf16>(keys * d * kComponents), v = carver.take<bf16>(keys * dv * kComponents);
    rest = reinterpret_cast<std::byte*>(k);
    k_t = carver.take<char>(keys * d * 2 * kComponents);
    dk = carver.take<float>(keys * d), dv_ = carver.take<float>(keys * dv);
    row = carver.take<Row>(kRows);
    for (char** x : {&q_t, &q}) *x = carver.take<char>(kRows * d * 2 * kComponents);
    for (char** x : {&dout_t, &dout}) *x = carver.take<char>(kRows * dv * 2 * kComponents);
    neg_m = carver.take<float>(kRows), neg_delta = carver.take<float>(kRows);
    dq_t = carver.take<float>(kRows * (d + 1));
    for (char** x : {&p, &ds, &ds_pairs}) *x = carver.take<char>(kBlockChunks * kRowChunks * kWeightBytes);
    for (float*& s : scores) s = carver.take<float>(2 * kChunk * kChunk);
    slopes = carver.take<float>(shape.softcap ? kChunk * kChunk : 0), exact = carver.take<float>(2 * kChunk * kChunk);
    rows = carver.take<bf16>(kChunk * max(d, dv) * kComponents);
    zero = carver.take<float>(kChunk), discarded = carver.take<float>(kChunk * kChunk);
    carver.take<std::byte>(max(static_cast<std::int64_t>(vector_kernel().scratch_bytes(shape)) -
                                   (static_cast<std::int64_t>(carver.used()) - before),
                               0));
  }

  void fill_steps() const {
    constexpr int kOfScores = kScoreProducts<kComponents>, kOfSums = kSumProducts<kComponents>;
    const std::int64_t d_bytes = kChunk * d * 2, dv_bytes = kChunk * dv * 2;  // of a component of 32 rows
    of_s.fill(d / kTileDepth, kOfScores, kTileDepth * 2, d_bytes, 2 * kTileBytes, d_bytes);
    of_dp.fill(dv / kTileDepth, kOfScores, kTileDepth * 2, dv_bytes, 2 * kTileBytes, dv_bytes);
    of_dv.fill(kRowChunks, kOfSums, kWeightBytes, kPairBytes, kComponents * dv_bytes, dv_bytes);
    of_dk.fill(kRowChunks, kOfSums, kWeightBytes, kPairBytes, kComponents * d_bytes, d_bytes);
    of_dq.fill(kBlockChunks, kOfSums, kComponents * d_bytes, d_bytes, kRowChunks * kWeightBytes, kPairBytes);
  }
};

// ---- What heads can be taken.

template <int kComponents, class RowAt>
bool are_representable(std::int64_t rows, std::int64_t n, std::int64_t stride, RowAt row_at) {
  Inspector<RepresentableFactor<kComponents>> inspector;
  for (std::int64_t r = 0; r < rows; ++r) {
    const Input<kComponents>* const row = row_at(r);
    std::int64_t i = 0;
    if constexpr (kComponents == 1)
      for (; stride == 1 && i + 2 * kLanes <= n; i += 2 * kLanes) inspector.check(load_u16vec(row + i));
    for (; i < n; i += kLanes) inspector.check(load_strided(row + i * stride, stride, min(kLanes, n - i)));
  }
  return !inspector.found();
}

template <int kComponents>
bool is_representable(const AttentionBackwardParams& p, const Head& head) {
  using T = Input<kComponents>;
  const auto keys = [&](const void* base, const Strides& s, std::int64_t n) {
    return are_representable<kComponents>(
        head.len_k, n, s.d, [&](std::int64_t j) { return static_cast<const T*>(base) + head.key_at(s, j); });
  };
  const auto rows = [&](const void* base, const Strides& s, std::int64_t n) {
    return are_representable<kComponents>(head.len_q * p.group, n, s.d, [&](std::int64_t r) {
      const Row row{r / p.group, head.hk * p.group + r % p.group, 0, 0, 0};
      return static_cast<const T*>(base) + row_at(s, head, row);
    });
  };
  // Scores past the largest number are neither: their row's lse is not below infinity.
  for (std::int64_t r = 0; r < head.len_q * p.group; ++r) {
    const Row row{r / p.group, head.hk * p.group + r % p.group, 0, 0, 0};
    if (!(p.lse[row_at(p.lse_stride, head, row)] < kInfinity)) return false;
  }
  return keys(p.k, p.k_stride, p.d) && keys(p.v, p.v_stride, p.dv) && rows(p.q, p.q_stride, p.d) &&
         rows(p.dout, p.dout_stride, p.dv);
}

// Whether the vector kernel does the head: the whole of it, however its keys are cut into items. Whichever of them
// comes first looks at the head, for all.
template <int kComponents>
bool falls_back(const AttentionBackwardParams& p, const Head& head, const BackwardItem& item) {
  enum : std::int32_t { kUnknown, kTakesTiles, kFallsBack };
  std::int32_t known = __atomic_load_n(item.head_facts, __ATOMIC_RELAXED);
  if (known == kUnknown) {
    known = is_representable<kComponents>(p, head) ? kTakesTiles : kFallsBack;
    __atomic_store_n(item.head_facts, known, __ATOMIC_RELAXED);
  }
  return known == kFallsBack;
}

// ---- Operands.

// Rows of K or V as A: 64 bytes of each row a step.
struct KeyOperand {
  const char* base;
  std::int64_t stride;  // bytes from row to row
};
template <int kComponents>
bool is_in_place(const Strides& s, std::int64_t n) {
  return kComponents == 1 && s.d == 1 && n % kTileDepth == 0;
}
// 32 keys from j on: in place where they are all there.
template <int kComponents>
KeyOperand key_operand(const Head& head, const void* base, const Strides& s, std::int64_t n, std::int64_t j,
                       const bf16* packed) {
  if (is_in_place<kComponents>(s, n) && j + kChunk <= head.len_k)
    return {reinterpret_cast<const char*>(static_cast<const bf16*>(base) + head.key_at(s, j)), 2 * s.s};
  return {reinterpret_cast<const char*>(packed), 2 * padded(n)};
}

// 32 rows -> tiles [padded / 16][16 pairs of rows (i, i + 16)][16 columns], of a component as tile_queries() has it;
// rows from `count` on are 0.
void tile_row_pairs(const ComponentRows& rows, std::int64_t component, std::int64_t count, std::int64_t width,
                    char* tiles) {
  for (std::int64_t c = 0; c < width; c += kTileRows, tiles += kTileBytes)
    for (std::int64_t i = 0; i < kTileRows; ++i)
      for (std::int64_t j = 0; j < kTileRows; j += kLanes) {
        const std::int64_t at = component + c + j;
        const vec low = i < count ? load_any(rows.row[i] + at) : vec(0.f);
        const vec high = i + kTileRows < count ? load_any(rows.row[i + kTileRows] + at) : vec(0.f);
        store(reinterpret_cast<float*>(tiles) + i * kTileRows + j, truncate_to_bf16_pairs(low, high));
      }
}

template <int kComponents>
void begin(const AttentionBackwardParams& p, const BackwardItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  Carver carver(scratch);
  const Scratch<kComponents> w(carver, shape_of(p, item));
  *w.falls_back = falls_back<kComponents>(p, head, item);
  if (*w.falls_back) return vector_kernel().begin(p, item, w.rest);
  w.fill_steps();
  for (std::int64_t i = 0; i < kChunk; i += kLanes) store(w.zero + i, vec(0.f));
  const auto [first, end] = keys_of(head, item);
  const auto split = [&](const void* base, const Strides& s, std::int64_t n, std::int64_t j, bf16* to) {
    return split_rows<kComponents, RepresentableFactor<kComponents>>(
        [&](std::int64_t i) { return static_cast<const Input<kComponents>*>(base) + head.key_at(s, j + i); }, s.d,
        min(kChunk, head.len_k - j), n, padded(n), to, kChunk * padded(n), is_in_place<kComponents>(s, n));
  };
  for (std::int64_t j = first; j < end; j += kChunk) {
    const std::int64_t at = (j - first) * kComponents;
    const ComponentRows keys = split(p.k, p.k_stride, p.d, j, w.k + at * w.d);
    for (int c = 0; c < kComponents; ++c) tile_values(keys, c * kChunk * w.d, w.d, w.k_t + (at + c * kChunk) * w.d * 2);
    if (!is_in_place<kComponents>(p.v_stride, p.dv) || j + kChunk > head.len_k)
      split(p.v, p.v_stride, p.dv, j, w.v + at * w.dv);
  }
  for (std::int64_t i = 0; i < round_up(end - first, kChunk) * w.d; i += kLanes) store(w.dk + i, vec(0.f));
  for (std::int64_t i = 0; i < round_up(end - first, kChunk) * w.dv; i += kLanes) store(w.dv_ + i, vec(0.f));
}

// ---- From scores to P and dS.

// A pair of keys at a time, for 32 rows.
template <int kComponents>
struct ChunkGradients {
  const float *s = nullptr, *ds_from = nullptr, *end = nullptr;  // S and dP; end of S
  float *p = nullptr, *ds = nullptr, *ds_pairs = nullptr;
  vec scale, add[kVecsOfChunk], neg_delta[kVecsOfChunk];

  [[gnu::always_inline]] bool is_done() const { return s == end; }
  [[gnu::always_inline]] void next_pair() {
    constexpr int kHalf = kVecsOfChunk / 2;
    vec weight[2][kVecsOfChunk], d[2][kVecsOfChunk];
#pragma GCC unroll 2
    for (int key = 0; key < 2; ++key)
#pragma GCC unroll 8
      for (int i = 0; i < kVecsOfChunk; ++i) {
        const std::int64_t at = key * kChunk + i * kLanes;
        weight[key][i] = exp2_18_bits(at_most_0(fma(load(s + at), scale, add[i])));
        d[key][i] = weight[key][i] * (load(ds_from + at) + neg_delta[i]);
        if constexpr (kComponents == 1) weight[key][i] = rounded(weight[key][i]), d[key][i] = rounded(d[key][i]);
      }
#pragma GCC unroll 2
    for (int c = 0; c < kComponents; ++c) {
      const std::int64_t to = c * (kPairBytes / 4);
#pragma GCC unroll 2
      for (int key = 0; key < 2; ++key)
#pragma GCC unroll 4
        for (int i = 0; i < kHalf; ++i) {
          const std::int64_t at = to + (key * kHalf + i) * kLanes;
          store(p + at, truncate_to_bf16_pairs(weight[key][i], weight[key][i + kHalf]));
          store(ds + at, truncate_to_bf16_pairs(d[key][i], d[key][i + kHalf]));
        }
#pragma GCC unroll 8
      for (int i = 0; i < kVecsOfChunk; ++i)
        store(ds_pairs + to + i / kHalf * (kTileBytes / 4) + i % kHalf * kLanes,
              truncate_to_bf16_pairs(d[0][i], d[1][i]));
      if (c + 1 == kComponents) break;
#pragma GCC unroll 2
      for (int key = 0; key < 2; ++key)
#pragma GCC unroll 8
        for (int i = 0; i < kVecsOfChunk; ++i) {
          weight[key][i] = weight[key][i] - truncate_to_bf16(weight[key][i]);
          d[key][i] = d[key][i] - truncate_to_bf16(d[key][i]);
        }
    }
    s += 2 * kChunk, ds_from += 2 * kChunk, p += kChunk, ds += kChunk, ds_pairs += kTileRows;
  }
  // So that pairs need no more than to be cut off and merged.
  [[gnu::always_inline]] static vec rounded(vec x) {
    return cast_to_float(cast_to_int(x) + ivec(0x8000));
  }
};

// Whether scores of 32 keys are more than the product: not all rows see all of them, or they have modifiers.
bool is_finished(const RowChunk& rows, std::int64_t key, bool modified) {
  return !modified && rows.first(kChunk - 1) <= key && rows.last(0) >= key + kChunk;
}
void finish(const Head& head, const RowChunk& rows, std::int64_t key, bool modified, float* s, float* slopes,
            float* discarded) {
  const std::int64_t n = clamp(head.len_k - key, 0, kChunk);
  for (int i = 0; i < kVecsOfChunk; ++i) {
    (modified ? finish_scores<true> : finish_scores<false>)(head, rows, i, key, 0, n, s, discarded, slopes);
    for (std::int64_t at = n * kChunk + i * kLanes; at < kChunk * kChunk; at += kChunk) {
      store(s + at, minus_infinity());
      if (slopes) store(slopes + at, vec(0.f));
    }
  }
}

// dslope += what final scores of 32 keys, and their dP, give: dS as the vector kernel has it, not rounded to bf16.
[[gnu::noinline]] void add_exact_slopes(const Head& head, const RowChunk& rows, std::int64_t key, const float* s,
                                        const float* zero, float* exact) {
  float* const ds = exact + kChunk * kChunk;
  for (std::int64_t i = 0; i < 2 * kChunk * kChunk; i += kLanes) store(exact + i, load(s + i));
  differentiate<kVecsOfChunk, kVecsOfChunk, true>(exact, ds, 0, kChunk, {1, zero}, rows.neg_delta);
  for (int i = 0; i < kVecsOfChunk; ++i) add_to_slopes(head, rows, i, key, 0, kChunk, ds, rows.dslope);
}

// dP -> (dP - delta) times the softcap's derivative, of which weights make dX.
void cap_gradients(const float* neg_delta, const float* slopes, float* dp) {
  for (std::int64_t j = 0; j < kChunk; ++j)
    for (std::int64_t i = 0; i < kChunk; i += kLanes) {
      const std::int64_t at = j * kChunk + i;
      store(dp + at, (load(dp + at) + load(neg_delta + i)) * load(slopes + at));
    }
}

// ---- The products of a chunk of rows and a block of keys.

template <int kComponents>
struct Visit {
  static constexpr std::int64_t kWeightBytes = Scratch<kComponents>::kWeightBytes;

  const AttentionBackwardParams& p;
  const Head& head;
  const Scratch<kComponents>& w;
  Tiles& tiles;
  Pending& pending;
  RowChunk* rows;
  std::int64_t count;       // chunks of rows
  std::int64_t key, first;  // of the block; of the item
  std::int64_t key_chunks;  // that there are

  bool sees(std::int64_t r, std::int64_t c) const {
    const std::int64_t from = key + c * kChunk;
    return rows[r].low < from + kChunk && rows[r].high > from;
  }
  std::int64_t at(std::int64_t c) const { return key - first + c * kChunk; }  // of the item's keys

  template <class Interleaved>
  void multiply(const char* a, std::int64_t a_stride, std::int64_t a_other, const char* b, const Steps& steps,
                std::int64_t products, float* start, float* c, Interleaved&& interleaved) {
    multiply_chunk<false>(tiles, {a, steps.a, a_stride, a_other}, {b, steps.b, 64, kTileBytes}, products, start, c,
                          pending, interleaved);
  }

  // P and dS of the block. The vectors' work on 32 x 32 scores is interleaved with the products of the next.
  [[gnu::noinline]] void scores() {
    const bool modified = needs_finish(p.score), capped = p.score.softcap_log2 != 0;
    ChunkGradients<kComponents> before;
    int pending_tiles = 0;  // of dP of the chunk before: each is stored before a product of this one
    const auto next = [&]() __attribute__((always_inline)) {
      if (pending_tiles > 0) --pending_tiles;
      else if (!before.is_done()) before.next_pair();
    };
    int buffer = 0;
    // Four operands of two by one chunks stay in L1 beside the scores.
    for (std::int64_t step = 0; step < (key_chunks + 1) / 2 * count; ++step)
      for (std::int64_t c = step / count * 2, r = step % count; c < min(step / count * 2 + 2, key_chunks); ++c) {
        if (!sees(r, c)) continue;
        const std::int64_t j = key + c * kChunk;
        float *const s = w.scores[buffer], *const dp = s + kChunk * kChunk;
        buffer ^= 1;
        const auto operand = [&](const void* base, const Strides& stride, std::int64_t n, const bf16* packed) {
          return key_operand<kComponents>(head, base, stride, n, j, packed + at(c) * padded(n) * kComponents);
        };
        const KeyOperand k = operand(p.k, p.k_stride, p.d, w.k), v = operand(p.v, p.v_stride, p.dv, w.v);
        constexpr std::int64_t kProducts = kScoreProducts<kComponents>;
        multiply(k.base, k.stride, kTileRows * k.stride, w.q_t + r * kComponents * kChunk * w.d * 2, w.of_s,
                 w.d / kTileDepth * kProducts, nullptr, s, next);
        multiply(v.base, v.stride, kTileRows * v.stride, w.dout_t + r * kComponents * kChunk * w.dv * 2, w.of_dp,
                 w.dv / kTileDepth * kProducts, nullptr, dp, next);
        while (!before.is_done()) before.next_pair();
        if (!is_finished(rows[r], j, modified))
          finish(head, rows[r], j, modified, s, capped ? w.slopes : nullptr, w.discarded);
        if (capped || p.grad_alibi) store_pending(tiles, pending, w.discarded);
        if (p.grad_alibi) add_exact_slopes(head, rows[r], j, s, w.zero, w.exact);
        if (capped) cap_gradients(rows[r].neg_delta, w.slopes, dp);
        const std::int64_t place = (c * kRowChunks + r) * kWeightBytes;
        before.s = s, before.end = s + kChunk * kChunk, before.ds_from = dp;
        before.p = reinterpret_cast<float*>(w.p + place), before.ds = reinterpret_cast<float*>(w.ds + place);
        before.ds_pairs = reinterpret_cast<float*>(w.ds_pairs + place);
        pending_tiles = 4;
        before.scale = vec(modified ? 1.f : p.score.scale_log2);
        for (int i = 0; i < kVecsOfChunk; ++i) {
          before.add[i] = load((modified ? w.zero : rows[r].neg_m) + i * kLanes);
          before.neg_delta[i] = load((capped ? w.zero : rows[r].neg_delta) + i * kLanes);
        }
      }
    store_pending(tiles, pending, w.discarded);
    while (!before.is_done()) before.next_pair();
  }

  // sums += A B over the rows that see each 32 keys; `weights` is P or dS, `b` dO or Q.
  [[gnu::noinline]] void add_to_keys(const char* weights, const char* b, const Steps& steps, std::int64_t width,
                                     float* sums) {
    for (std::int64_t c = 0; c < key_chunks; ++c) {
      std::int64_t from = 0, to = count;
      while (from < to && !sees(from, c)) ++from;
      while (to > from && !sees(to - 1, c)) --to;
      for (std::int64_t column = 0; from < to && column < width; column += kChunk) {
        float* const sum = sums + at(c) * width + column * kChunk;
        multiply(weights + (c * kRowChunks + from) * kWeightBytes, 64, kTileBytes,
                 b + from * kComponents * kChunk * width * 2 + column / kTileRows * kTileBytes, steps,
                 (to - from) * kSumProducts<kComponents>, sum, sum, [] {});
      }
    }
  }

  [[gnu::noinline]] void add_to_rows() {
    for (std::int64_t r = 0; r < count; ++r) {
      std::int64_t from = 0, to = key_chunks;
      while (from < to && !sees(r, from)) ++from;
      while (to > from && !sees(r, to - 1)) --to;
      if (from == to) continue;
      for (std::int64_t column = 0; column < w.d; column += kChunk) {
        float* const sum = rows[r].ot + column * kChunk;
        multiply(w.k_t + at(from) * kComponents * w.d * 2 + column / kTileRows * kTileBytes, 64, kTileBytes,
                 w.ds_pairs + (from * kRowChunks + r) * kWeightBytes, w.of_dq, (to - from) * kSumProducts<kComponents>,
                 rows[r].started ? sum : nullptr, sum, [] {});
      }
      rows[r].started = true;
    }
  }
};

std::int64_t sums_of_row(std::int64_t d) noexcept {
  return padded(d) + 1;  // dQ^T of 32 rows and another number for each, all chunks' dQ^T first
}

template <int kComponents>
void prepare(const AttentionBackwardParams& p, const Head& head, RowChunk& rows, std::int64_t i,
             const Scratch<kComponents>& w) {
  const auto pack = [&](const void* base, const Strides& s, std::int64_t n, char* transposed, char* pairs) {
    const std::int64_t width = padded(n), component = kChunk * width;
    const ComponentRows split = split_rows<kComponents, RepresentableFactor<kComponents>>(
        [&](std::int64_t r) { return static_cast<const Input<kComponents>*>(base) + row_at(s, head, rows.row[r]); },
        s.d, rows.rows, n, width, w.rows, component, is_in_place<kComponents>(s, n));
    for (int c = 0; c < kComponents; ++c) {
      const std::int64_t at = (i * kComponents + c) * component * 2;
      tile_queries(split, c * component, width, transposed + at);
      tile_row_pairs(split, c * component, rows.rows, width, pairs + at);
    }
  };
  pack(p.q, p.q_stride, p.d, w.q_t, w.q);
  pack(p.dout, p.dout_stride, p.dv, w.dout_t, w.dout);
  for (std::int64_t r = 0; r < kChunk; ++r)
    prepare_row(p, head, rows.row[r], rows.neg_m[r], w.neg_delta[i * kChunk + r]);
}

template <int kComponents>
void add_rows(const AttentionBackwardParams& p, const BackwardItem& item, std::int64_t row_begin,
              std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  Carver carver(scratch);
  const Scratch<kComponents> w(carver, shape_of(p, item));
  const std::int64_t end = min(head.len_q * p.group, row_begin + kRows);
  if (*w.falls_back) {
    const std::int64_t step = vector_kernel().facts.block_q;
    for (std::int64_t r = row_begin; r < end; r += step) vector_kernel().add_rows(p, item, r, w.rest);
    return;
  }
  const auto [first_key, end_key] = keys_of(head, item);
  float* const sums = item.dq_sums ? item.dq_sums + row_begin * sums_of_row(p.d) : w.dq_t;
  RowChunk rows[kRowChunks];
  std::int64_t count = 0, low = INT64_MAX, high = 0;
  for (std::int64_t r = row_begin; r < end; r += kChunk, ++count) {
    RowChunk& chunk = rows[count];
    chunk.vecs = kVecsOfChunk, chunk.width = kChunk, chunk.rows = min(kChunk, end - r);
    chunk.row = w.row + count * kChunk;
    chunk.neg_m = w.neg_m + count * kChunk, chunk.neg_delta = w.neg_delta + count * kChunk;
    chunk.ot = sums + count * kChunk * w.d, chunk.dslope = sums + kRows * w.d + count * kChunk;
    find_rows(head, r, chunk.rows, chunk.row);
    for (std::int64_t i = chunk.rows; i < kChunk; ++i) chunk.row[i] = chunk.row[chunk.rows - 1];
    chunk.low = chunk.first(0), chunk.high = chunk.last(kChunk - 1);
    chunk.started = !item.split && chunk.low < chunk.high && chunk.low < first_key;  // by an item before
    if (chunk.low < chunk.high) low = min(low, chunk.low), high = max(high, chunk.high);
    for (std::int64_t i = 0; !chunk.started && i < kChunk; i += kLanes) store(chunk.dslope + i, vec(0.f));
    prepare(p, head, chunk, count, w);
  }
  if (low < high) {
    Tiles tiles;
    Pending pending{w.discarded};
    const FlushDenormals flush;
    for (std::int64_t key = first_key + max(low - first_key, 0) / kBlock * kBlock; key < min(end_key, high);
         key += kBlock) {
      Visit<kComponents> visit{p,    head,  w,   tiles,     pending,
                               rows, count, key, first_key, (min(kBlock, end_key - key) + kChunk - 1) / kChunk};
      visit.scores();
      if (p.grad_v) visit.add_to_keys(w.p, w.dout, w.of_dv, w.dv, w.dv_);
      if (p.grad_k) visit.add_to_keys(w.ds, w.q, w.of_dk, w.d, w.dk);
      if (p.grad_q) visit.add_to_rows();
    }
    store_pending(tiles, pending, w.discarded);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    RowChunk& chunk = rows[i];
    if (!chunk.started)
      for (std::int64_t c = 0; c < w.d * kChunk; c += kLanes) store(chunk.ot + c, vec(0.f));
    chunk.started = true;
    const bool is_last = chunk.low >= chunk.high ? item.key_begin == 0 || first_key == end_key : end_key >= chunk.high;
    if (item.split || !is_last) continue;
    if (p.grad_q) store_rows(p.grad_q, head, chunk, p.d, p.scale);
    if (item.sink_sums || item.slope_sums) store_row_sums(p, head, chunk, chunk.neg_delta, chunk.dslope, item);
  }
}

template <int kComponents>
void end(const AttentionBackwardParams& p, const BackwardItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  Carver carver(scratch);
  const Scratch<kComponents> w(carver, shape_of(p, item));
  if (*w.falls_back) return vector_kernel().end(p, item, w.rest);
  const auto chunks = [](const float* sums, std::int64_t width) {
    return [=](std::int64_t key, std::int64_t c) {
      return sums + key / kChunk * kChunk * width + c / kChunk * kChunk * kChunk + key % kChunk * kChunk + c % kChunk;
    };
  };
  if (p.grad_k) store_keys(p.grad_k, head, item, p.d, p.scale, chunks(w.dk, w.d));
  if (p.grad_v) store_keys(p.grad_v, head, item, p.dv, 1, chunks(w.dv_, w.dv));
}

}  // namespace

// The gradient of the bias is the vector kernel's.
std::size_t bias_scratch_bytes(const BackwardShape& shape) noexcept {
  return vector_kernel().bias_scratch_bytes(shape);
}
void add_bias(const AttentionBackwardParams& p, const BiasItem& item, std::byte* scratch) noexcept {
  vector_kernel().add_bias(p, item, scratch);
}

namespace {
template <int kComponents>
constexpr AttentionBackwardKernel kernel(const char* arithmetic, DType dtype) {
  return {.facts = {.operation = Operation::attention_backward,
                    .phase = Phase::all,
                    .arithmetic = arithmetic,
                    .dtypes = only(dtype),
                    .block_q = kRows,
                    .block_k = kBlock},
          .sums_of_row = sums_of_row,
          .scratch_bytes = carved_bytes<Scratch<kComponents>>,
          .begin = begin<kComponents>,
          .add_rows = add_rows<kComponents>,
          .end = end<kComponents>,
          .bias_scratch_bytes = bias_scratch_bytes,
          .bias_rows = kChunkRows,
          .add_bias = add_bias};
}
}  // namespace

extern constexpr AttentionBackwardKernel kAttentionBackward = kernel<1>("bf16", DType::bf16);
#if defined(RAPT_HAVE_TILES)
extern constexpr AttentionBackwardKernel kAttentionBackwardF16x3 = kernel<2>("f16x3", DType::f16);
#endif

}  // namespace rapt::cpu::RAPT_ISA
