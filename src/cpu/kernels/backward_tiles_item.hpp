// Part of attention_backward_tiles.cpp: a work item's scratch, which heads the kernel can take, and the operands of
// its products.
#pragma once

#include "cpu/kernels/backward_chunk.hpp"
#include "cpu/kernels/vector_kernels.hpp"
#include "cpu/tile/bf16_mma.hpp"
#include "cpu/tile/bump_allocator.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kBlock = kBackwardKeys, kBlockChunks = kBlock / kChunk;  // keys; chunks of them
constexpr std::int64_t kRows = 192, kRowChunks = kRows / kChunk;                // rows of a call of add_rows()
constexpr int kVecsOfChunk = static_cast<int>(kChunk) / kLanes, kVecsOfHalf = kVecsOfChunk / 2;
constexpr std::int64_t kPairBytes = 2 * kTileBytes;  // bytes of a component of a chunk, as pairs
// The type of inputs, and the number of products of components per matrix product: kScoreProducts for S and dP,
// kSumProducts for gradients.
template <int kComponents>
using Input = std::conditional_t<kComponents == 1, bf16, f16>;
template <int kComponents>
constexpr int kScoreProducts = kComponents* kComponents;
template <int kComponents>
constexpr int kSumProducts = 2 * kComponents - 1;
// Tiles of a pending chunk. Each is stored before a product of the next chunk.
constexpr std::int64_t kPendingTiles = 4;

const AttentionBackwardKernel& vector_kernel() {
  return *vector_kernels().attention_backward.best;
}

std::int64_t padded(std::int64_t n) {
  return round_up(n, kChunk);
}

// A query block of 32 rows, whose dQ^T is [d][32].
struct RowChunk : QueryBlock {
  const float* neg_delta = nullptr;
  float* dslope = nullptr;         // [32] sum of dS times the distance, for dalibi
  std::int64_t low = 0, high = 0;  // keys [low, high) that some row sees
};

// Offsets of the operands of each product, relative to the first. Each step of a sum has `products` products of
// components, ordered so that consecutive ones share an operand.
struct Steps {
  std::int32_t *a, *b;

  Steps(BumpAllocator& allocator, std::int64_t products)
      : a(allocator.take<std::int32_t>(products)), b(allocator.take<std::int32_t>(products)) {}
  // a_step and b_step are bytes from step to step, a_component and b_component from component to component.
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
struct AttentionBackwardTilesScratch {
  // Layout of a chunk of 32 x 32 scores: S in halves, overwritten by P as A; then dP, overwritten by dS as A; then dS
  // as B, over the rest of dP (one component) or behind it.
  static constexpr std::int64_t kScoreBytes = 4 * kChunk * kChunk, kDsAt = kScoreBytes,
                                kDsPairsAt = kDsAt + (kComponents == 1 ? kPairBytes : kScoreBytes),
                                kChunkBytes = kDsPairsAt + kComponents * kPairBytes;

  std::int64_t d, dv;  // padded to whole chunks
  bool* falls_back;    // the vector kernel computes the whole work item
  std::byte* rest;     // start of the vector kernel's scratch, which overlaps what follows

  // Of the item's keys.
  bf16 *k, *v;      // [keys / 32][component][32][d or dv], where they cannot be read in place
  char* k_t;        // [keys / 32][component][d / 16] tiles of K^T
  float *dk, *dv_;  // [keys / 32][d / 32][32 keys][32], garbage until `started`
  bool* started;    // [keys / 32] whether rows have been added
  // Of a chunk of rows.
  Row* row;
  char *q_t, *dout_t;  // [chunk][component][d / 32][2] tiles, rows in the lanes
  char *q, *dout;      // [chunk][component][d / 16] tiles of pairs of rows
  float *neg_m, *neg_delta;
  float* dq_t;  // [chunk][d][32], and [chunk][32] for dalibi, used if the work item has all keys of the head
  // Of a chunk of rows and a block of keys.
  char* scores;        // [chunk of keys][chunk of rows][kChunkBytes]
  float* derivatives;  // of the scores, of 32 x 32 in halves
  float* exact;        // a copy of S and dP, which becomes P and dS in fp32 for dalibi
  bf16* rows;          // [component][32][d or dv] staging for tiles
  float *zero, *discarded;
  Steps of_s, of_dp, of_dv, of_dk, of_dq;

  AttentionBackwardTilesScratch(BumpAllocator& allocator, const BackwardShape& shape)
      : d(padded(shape.d)),
        dv(padded(shape.dv)),
        of_s(allocator, d / kTileDepth * kScoreProducts<kComponents>),
        of_dp(allocator, dv / kTileDepth * kScoreProducts<kComponents>),
        of_dv(allocator, kRowChunks * kSumProducts<kComponents>),
        of_dk(allocator, kRowChunks * kSumProducts<kComponents>),
        of_dq(allocator, kBlockChunks * kSumProducts<kComponents>) {
    const std::int64_t keys = round_up(max(shape.keys, 1), kBlock);
    falls_back = allocator.take<bool>(1);
    const std::int64_t before = static_cast<std::int64_t>(allocator.used());
    k = allocator.take<bf16>(keys * d * kComponents), v = allocator.take<bf16>(keys * dv * kComponents);
    rest = reinterpret_cast<std::byte*>(k);
    k_t = allocator.take<char>(keys * d * 2 * kComponents);
    dk = allocator.take<float>(keys * d), dv_ = allocator.take<float>(keys * dv);
    started = allocator.take<bool>(keys / kChunk);
    row = allocator.take<Row>(kRows);
    for (char** x : {&q_t, &q}) *x = allocator.take<char>(kRows * d * 2 * kComponents);
    for (char** x : {&dout_t, &dout}) *x = allocator.take<char>(kRows * dv * 2 * kComponents);
    neg_m = allocator.take<float>(kRows), neg_delta = allocator.take<float>(kRows);
    dq_t = allocator.take<float>(kRows * (d + 1));
    scores = allocator.take<char>(kBlockChunks * kRowChunks * kChunkBytes);
    derivatives = allocator.take<float>(shape.has_derivatives ? kChunk * kChunk : 0),
    exact = allocator.take<float>(2 * kChunk * kChunk);
    rows = allocator.take<bf16>(kChunk * max(d, dv) * kComponents);
    zero = allocator.take<float>(kChunk), discarded = allocator.take<float>(kChunk * kChunk);
    allocator.take<std::byte>(max(static_cast<std::int64_t>(vector_kernel().scratch_bytes(shape)) -
                                      (static_cast<std::int64_t>(allocator.used()) - before),
                                  0));
  }

  void fill_steps() const {
    constexpr int kOfScores = kScoreProducts<kComponents>, kOfSums = kSumProducts<kComponents>;
    const std::int64_t d_bytes = kChunk * d * 2, dv_bytes = kChunk * dv * 2;  // of a component of 32 rows
    of_s.fill(d / kTileDepth, kOfScores, kTileDepth * 2, d_bytes, 2 * kTileBytes, d_bytes);
    of_dp.fill(dv / kTileDepth, kOfScores, kTileDepth * 2, dv_bytes, 2 * kTileBytes, dv_bytes);
    of_dv.fill(kRowChunks, kOfSums, kChunkBytes, kPairBytes, kComponents * dv_bytes, dv_bytes);
    of_dk.fill(kRowChunks, kOfSums, kChunkBytes, kPairBytes, kComponents * d_bytes, d_bytes);
    of_dq.fill(kBlockChunks, kOfSums, kComponents * d_bytes, d_bytes, kRowChunks * kChunkBytes, kPairBytes);
  }
};

// ---- What heads can be taken.

template <int kComponents, class RowAt>
bool are_representable(std::int64_t rows, std::int64_t n, std::int64_t stride, RowAt row_at) {
  RepresentableCheck<RepresentableFactor<kComponents>> check;
  for (std::int64_t r = 0; r < rows; ++r) {
    const Input<kComponents>* const row = row_at(r);
    std::int64_t i = 0;
    if constexpr (kComponents == 1)
      for (; stride == 1 && i + 2 * kLanes <= n; i += 2 * kLanes) check.add(load_u16vec(row + i));
    for (; i < n; i += kLanes) check.add(load_strided(row + i * stride, stride, min(kLanes, n - i)));
  }
  return !check.failed();
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
  // Scores that overflow are not representable either: their row's lse is not below infinity.
  for (std::int64_t r = 0; r < head.len_q * p.group; ++r) {
    const Row row{r / p.group, head.hk * p.group + r % p.group, 0, 0, 0};
    if (!(p.lse[row_at(p.lse_stride, head, row)] < kInfinity)) return false;
  }
  return keys(p.k, p.k_stride, p.d) && keys(p.v, p.v_stride, p.dv) && rows(p.q, p.q_stride, p.d) &&
         rows(p.dout, p.dout_stride, p.dv);
}

// Whether the vector kernel computes the whole head, in all of its work items. The first work item to run checks the
// head for all others.
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

// Rows of K or V as operand A: a step reads 64 bytes of each row.
struct KeyOperand {
  const char* base;
  std::int64_t stride;  // bytes from row to row
};
template <int kComponents>
bool is_in_place(const Strides& s, std::int64_t n) {
  return kComponents == 1 && s.d == 1 && n % kTileDepth == 0;
}
// Whether keys are a constant stride apart, which gathered keys are not.
bool may_be_in_place(const AttentionBackwardParams& p) {
  return p.tokens == 0;
}
// 32 rows of n elements as components, in `to` or in place. All elements are representable, which falls_back() has
// checked.
template <int kComponents, class RowAt>
ComponentRows components(const Strides& s, std::int64_t rows, std::int64_t n, bf16* to, RowAt row_at,
                         bool may_stay = true) {
  if constexpr (kComponents == 1)
    if (may_stay && is_in_place<kComponents>(s, n) && rows == kChunk) {
      ComponentRows result;
      for (std::int64_t i = 0; i < kChunk; ++i) result.row[i] = row_at(i);
      return result;
    }
  return split_rows<kComponents, RepresentableFactor<kComponents>>(row_at, s.d, rows, n, padded(n), to,
                                                                   kChunk * padded(n), InPlace::no);
}
// 32 keys from j on: in place if all of them exist, else packed.
template <int kComponents>
KeyOperand key_operand(const Head& head, const void* base, const Strides& s, std::int64_t n, std::int64_t j,
                       const bf16* packed) {
  if (is_in_place<kComponents>(s, n) && head.p.tokens == 0 && j + kChunk <= head.len_k)
    return {reinterpret_cast<const char*>(static_cast<const bf16*>(base) + head.key_at(s, j)), 2 * s.s};
  return {reinterpret_cast<const char*>(packed), 2 * padded(n)};
}

// 32 rows -> tiles [padded / 16][16 pairs of rows (i, i + 16), merged][16 columns], of the component at offset
// `component`; rows from `count` on are 0.
void tile_row_pairs(const ComponentRows& rows, std::int64_t component, std::int64_t count, std::int64_t width,
                    char* tiles) {
  for (std::int64_t c = 0; c < width; c += kTileRows, tiles += kTileBytes)
    for (std::int64_t i = 0; i < kTileRows; i += kMergedRows)
      for (std::int64_t j = 0; j < kTileRows; j += kLanes) {
        const std::int64_t at = component + c + j;
        vec pairs[kMergedRows];
        for (int m = 0; m < kMergedRows; ++m) {
          const vec low = i + m < count ? load_any(rows.row[i + m] + at) : vec(0.f);
          const vec high = i + m + kTileRows < count ? load_any(rows.row[i + m + kTileRows] + at) : vec(0.f);
          pairs[m] = truncate_to_bf16_pairs(low, high);
        }
        merge_rows(pairs);
        for (int m = 0; m < kMergedRows; ++m)
          store(reinterpret_cast<float*>(tiles) + (i + m) * kTileRows + j, pairs[m]);
      }
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
