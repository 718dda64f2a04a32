// Part of attention_decode.cpp: scores of keys whose scales are not finite, and sums over values that may be NaN or
// infinite.
#pragma once

#include "cpu/kernels/decode_item.hpp"
#include "cpu/tile/dropout.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Computes the scores of key j, whose scale is not finite, from scaled elements: elements of +inf and -inf, or 0 *
// inf, must add up to NaN.
[[gnu::noinline, gnu::cold]] inline void dot_scaled_row(const DecodeItem& item, std::int64_t q_block,
                                                        const BlockRows& block, std::int64_t j, float* scores) {
  const AttentionDecodeScratch& w = item.w;
  float* const row = w.scaled_row;
  for (std::int64_t c = 0; c < item.d; c += kLanes) {
    alignas(64) float codes[kLanes];
    item.k_products.widen(item.keys(block)[j], w.k_scales, j, column_of(c, item.d), codes);
    store_any(row + column_of(c, item.d), load(codes) * vec(w.k_scales.scale[j]));
  }
  const auto* const scaled = reinterpret_cast<const std::byte*>(row);
  alignas(64) float s[kMaxKeysOfTile * kLanes];
  Prefetcher none{nullptr, 0, 0};
  const std::int64_t rows = item.q_blocks[q_block].rows;
  products_of(DType::f32).dots(rows, item.q(q_block), w.q_stride, item.d, &scaled, w.k_scales, 0, 1, s, kLanes, none);
  for (std::int64_t r = 0; r < rows; ++r) scores[r] = s[r];
}

// O += P V of keys [begin, end) where a value may be NaN or infinite. Masked or dropped values are left out, and
// non-finite values are not multiplied by a weight, which may have underflowed to 0.
[[gnu::noinline, gnu::cold]] inline void add_isolating_non_finite(const DecodeItem& item, std::int64_t q_block,
                                                                  const BlockRows& block, std::int64_t begin,
                                                                  std::int64_t end) {
  const AttentionParams& p = item.p;
  const AttentionDecodeScratch& w = item.w;
  const QueryBlock& rows = item.q_blocks[q_block];
  const float* const scale = one_scale_per_row(p.v_quant, p.dv) ? w.v_scales.scale : nullptr;
  for (std::int64_t r = 0; r < rows.rows; ++r)
    for (std::int64_t c = 0; c < w.o_stride; c += kLanes) {
      vec acc(0.f), non_finite(0.f);
      for (std::int64_t j = begin; j < end; ++j) {
        const std::int64_t at = j * item.score_stride[q_block] + r;
        if (w.scores_before[at] == -__builtin_inff()) continue;
        alignas(64) float value[kLanes];
        item.v_products.widen(item.values(block)[j], w.v_scales, j, column_of(c, item.dv), value);
        const vec x = load(value), factor(scale ? scale[j] : 1.f);
        const auto finite = (x - x == vec(0.f)) & (factor - factor == vec(0.f));
        const vec weight = xsimd::select(finite, vec(w.s[at]), vec(0.f));  // the weight includes the factor
        acc = fma(weight, xsimd::select(finite, x, vec(0.f)), acc);
        if (is_dropped(p.score, place_of(item.head, rows.row[r], block.k0 + j))) continue;
        non_finite = non_finite + xsimd::select(finite, vec(0.f), x * factor);
      }
      float* const sum = item.o(q_block) + r * w.o_stride + c;
      store(sum, load(sum) + acc + non_finite);
    }
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
