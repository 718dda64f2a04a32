// Part of attention_backward_tiles.cpp: turns S and dP of 32 keys x 32 rows into P and dS in place.
#pragma once

#include "cpu/kernels/backward_tiles_item.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Computes P and dS of keys j and j + 16 at a time, for 32 rows; where rows of pairs are merged, of the next key too.
template <int kComponents>
struct ChunkGradients {
  static_assert(kComponents == 1 || kMergedRows == 1);
  float *scores = nullptr, *end = nullptr;  // scores of key j; of key 16, where j ends
  vec scale, add[kVecsOfChunk], neg_delta[kVecsOfChunk];

  [[gnu::always_inline]] bool is_done() const { return scores == end; }
  [[gnu::always_inline]] void next_pairs() {
#pragma GCC unroll 4
    for (int i = 0; i < kVecsOfHalf; ++i) next_pairs_of(i);
    scores += kMergedRows * InHalves::kRow;
  }

 private:
  // Computes vector i of both halves of rows. With one component, stores overwrite only what this call has loaded;
  // with two, dS as pairs has its own place.
  [[gnu::always_inline]] void next_pairs_of(int i) {
    using Layout = AttentionBackwardTilesScratch<kComponents>;
    constexpr std::int64_t kFloats = kTileBytes / 4;
    vec ds_pairs[2][kMergedRows];
#pragma GCC unroll 2
    for (int m = 0; m < kMergedRows; ++m) {
      float *const p = scores + m * InHalves::kRow + i * kLanes, *const ds = p + Layout::kDsAt / 4;
      vec weight[2][2], d[2][2];  // [key][half]
#pragma GCC unroll 2
      for (int key = 0; key < 2; ++key)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const std::int64_t at = half * InHalves::kRight + key * kFloats;
          const int v = half * kVecsOfHalf + i;
          weight[key][half] = exp2_18_bits(at_most_0(fma(load(p + at), scale, add[v])));
          d[key][half] = weight[key][half] * (load(ds + at) + neg_delta[v]);
          if constexpr (kComponents == 1)
            weight[key][half] = for_truncation(weight[key][half]), d[key][half] = for_truncation(d[key][half]);
        }
#pragma GCC unroll 2
      for (int c = 0; c < kComponents; ++c) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          const std::int64_t to = (2 * c + j) * kFloats;
          store(p + to, truncate_to_bf16_pairs(weight[j][0], weight[j][1]));
          store(ds + to, truncate_to_bf16_pairs(d[j][0], d[j][1]));
          ds_pairs[j][m] = truncate_to_bf16_pairs(d[0][j], d[1][j]);
          if (m + 1 < kMergedRows) continue;
          merge_rows(ds_pairs[j]);
          float* const merged = scores + i * kLanes + Layout::kDsPairsAt / 4 + to;
#pragma GCC unroll 2
          for (int n = 0; n < kMergedRows; ++n) store(merged + n * InHalves::kRow, ds_pairs[j][n]);
        }
        if (c + 1 == kComponents) break;
#pragma GCC unroll 2
        for (int key = 0; key < 2; ++key)
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            weight[key][half] = weight[key][half] - truncate_to_bf16(weight[key][half]);
            d[key][half] = d[key][half] - truncate_to_bf16(d[key][half]);
          }
      }
    }
  }
  // Adds half a bf16 ulp, so that truncation to bf16 rounds x.
  [[gnu::always_inline]] static vec for_truncation(vec x) {
    return cast_to_float(cast_to_int(x) + ivec(0x8000));
  }
};

// Whether q.k of 32 keys are final scores: all rows see all keys, and nothing modifies scores.
bool is_finished(const RowChunk& rows, std::int64_t key, bool modified) {
  return !modified && rows.first(kChunk - 1) <= key && rows.last(0) >= key + kChunk;
}
// The query block as functions expect it whose scores are in halves, offset_in_halves() floats further.
QueryBlock in_halves(const RowChunk& rows) {
  QueryBlock q_block = rows;
  q_block.width = InHalves::kRow;
  return q_block;
}
std::int64_t offset_in_halves(int vec_of_chunk) {
  return vec_of_chunk / kVecsOfHalf * (InHalves::kRight - InHalves::kRow);
}

void finish(const Head& head, const RowChunk& rows, std::int64_t key, bool modified, float* s, float* derivatives,
            float* discarded) {
  const QueryBlock q_block = in_halves(rows);
  const std::int64_t n = clamp(head.len_k - key, 0, kChunk);
  for (int i = 0; i < kVecsOfChunk; ++i) {
    float *const half = s + offset_in_halves(i), *const half_derivatives =
                                                     derivatives ? derivatives + offset_in_halves(i) : nullptr;
    (modified ? finish_scores<true> : finish_scores<false>)(head, q_block, i, key, 0, n, half, discarded,
                                                            half_derivatives);
    for (std::int64_t j = n; j < kChunk; ++j) {
      const std::int64_t at = j * q_block.width + i * kLanes;
      store(half + at, minus_infinity());
      if (derivatives) store(half_derivatives + at, vec(0.f));
    }
  }
}

// Adds the contribution of 32 keys to dslope, from final scores and dP. dS is computed in fp32, as in the vector
// kernel, and not rounded to bf16.
[[gnu::noinline]] void add_exact_slopes(const Head& head, const RowChunk& rows, std::int64_t key, const float* s,
                                        const float* zero, float* exact) {
  const QueryBlock q_block = in_halves(rows);
  float* const ds = exact + kChunk * kChunk;
  for (std::int64_t i = 0; i < 2 * kChunk * kChunk; i += kLanes) store(exact + i, load(s + i));
  for (std::int64_t half = 0; half < 2; ++half)
    differentiate<kVecsOfHalf, kVecsOfHalf, true>(exact + half * InHalves::kRight, ds + half * InHalves::kRight, 0,
                                                  kChunk, {1, zero}, rows.neg_delta + half * InHalves::kRow);
  for (int i = 0; i < kVecsOfChunk; ++i)
    add_to_slopes(head, q_block, i, key, 0, kChunk, ds + offset_in_halves(i), rows.dslope);
}

// dP -> (dP - delta) times the scores' derivatives; times the weights this is dX.
void apply_derivatives(const float* neg_delta, const float* derivatives, float* dp) {
  for (std::int64_t at = 0; at < kChunk * kChunk; at += kLanes) {
    const vec minus = load(neg_delta + at / InHalves::kRight * InHalves::kRow + at % InHalves::kRow);
    store(dp + at, (load(dp + at) + minus) * load(derivatives + at));
  }
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
