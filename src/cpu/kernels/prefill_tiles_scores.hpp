// Part of attention_prefill_tiles.cpp: turns q.k in memory into exponents, score * scale - m. Applies masks and score
// modifiers, and decides when m must move.
#pragma once

#include "cpu/kernels/prefill_tiles_item.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Lanes whose m is too large to be added in fixed point, or would be rounded more than the product with the scale.
// finish_score_block() subtracts m from the scores of these lanes.
auto m_is_large(const QueryBlock& q_block, int i) {
  return xsimd::abs(load(q_block.neg_m + i * kLanes)) > vec(4096.f);
}

// The exponents of vector i of a score block's rows are s * scale_of() + neg_m_of().
template <int kComponents>
vec scale_of(const PrefillItem<kComponents>& item, const ScoreBlock& s_block, int i) {
  return item.modified ? vec(1.f) : xsimd::select(m_is_large(item.q_blocks[s_block.q_block], i), vec(1.f), item.scale);
}
template <int kComponents>
vec neg_m_of(const PrefillItem<kComponents>& item, const ScoreBlock& s_block, int i) {
  const vec neg_m = load(item.q_blocks[s_block.q_block].neg_m + i * kLanes);
  return item.modified ? vec(0.f) : xsimd::select(m_is_large(item.q_blocks[s_block.q_block], i), vec(0.f), neg_m);
}
template <int kComponents>
[[gnu::always_inline]] inline Exponentials<kComponents> exponentials(const PrefillItem<kComponents>& item,
                                                                     const ScoreBlock& s_block, char* s) {
  Exponentials<kComponents> e;
  e.s = reinterpret_cast<float*>(s), e.end = e.s + s_block.chunks * kTileDepth * kChunk;
  for (int i = 0; i < kVecsOfRow; ++i) e.set(scale_of(item, s_block, i), i, neg_m_of(item, s_block, i));
  return e;
}

template <int kComponents>
bool needs_finish(const PrefillItem<kComponents>& item, const ScoreBlock& s_block) {
  return s_block.unfinished || item.large_m[s_block.q_block];
}

// Computes the scores of a chunk of 32 keys from the products of each group of codes: the sum of the products times
// their scales.
template <int kComponents>
void scale_scores(const PrefillItem<kComponents>& item, const ScoreBlock& s_block, std::int64_t chunk, char* s) {
  const auto& w = item.w;
  const float* scale = w.packed_range.k_scale + (s_block.at + chunk * kTileDepth) * w.k_groups;
  float* to = reinterpret_cast<float*>(s) + chunk * kChunk * kChunk;
  for (const float* from = w.group_s; from < w.group_s + kChunk * kChunk; from += kChunk, to += kChunk) {
    vec sum[kVecsOfRow];
    for (int i = 0; i < kVecsOfRow; ++i) sum[i] = load(from + i * kLanes) * vec(*scale);
    ++scale;
    for (std::int64_t g = 1; g < w.k_groups; ++g, ++scale)
      for (int i = 0; i < kVecsOfRow; ++i)
        sum[i] = fma(load(from + g * kChunk * kChunk + i * kLanes), vec(*scale), sum[i]);
    for (int i = 0; i < kVecsOfRow; ++i) store(to + i * kLanes, sum[i]);
  }
}

// Masks the scores of one vector of rows and n keys, of which `end` exist: -inf for keys that a row does not see.
template <int kComponents>
void mask_scores(const PrefillItem<kComponents>& item, const Row* row, std::int64_t key, std::int64_t n,
                 std::int64_t end, float* s, float* block_max) {
  const bool per_row = has_modifier_per_row(item.p.score);
  const vec of_rows = per_row ? modifiers_of_rows(item.head, row) : vec(0.f);
  alignas(64) float first[kLanes], last[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    first[j] = static_cast<float>(clamp(row[j].first - key, 0, n));
    last[j] = static_cast<float>(clamp(row[j].last - key, 0, n));
  }
  const vec from = load(first), to = load(last);
  auto seen = from < to;
  const auto keep = [&](std::int64_t j, auto visible) __attribute__((always_inline)) {
    store(s + j * kChunk, xsimd::select(visible, load(s + j * kChunk), minus_infinity()));
  };
  const auto in_range = [&](std::int64_t j) __attribute__((always_inline)) {
    const vec at(static_cast<float>(j));
    return (at >= from) & (at < to);
  };
  if (item.p.score.mask) {
    seen = from != from;
    const auto keep_seen = [&](std::int64_t j, vec mask) __attribute__((always_inline)) {
      const auto visible = in_range(j) & (mask == vec(0.f));
      seen = seen | visible;
      keep(j, visible);
    };
    if (per_row) {
      for (std::int64_t j = 0; j < end; ++j) keep_seen(j, of_rows);
    } else {
      const Modifiers modifiers(item.head, row, kLanes);
      vec modifier[kLanes];
      for (std::int64_t j = 0; j < end; j += kLanes) {
        modifiers.load_keys(key + j, min(kLanes, end - j), modifier);
        for_each_modifier(
            modifier,
            min(kLanes, end - j), [&](int t, vec mask) __attribute__((always_inline)) { keep_seen(j + t, mask); });
      }
    }
    for (std::int64_t j = end; j < n; ++j) keep(j, from != from);
  } else {
    // All rows of the vector see the keys between `late` and `early`.
    const auto late = static_cast<std::int64_t>(first[kLanes - 1]), early = static_cast<std::int64_t>(last[0]);
    for (std::int64_t j = 0; j < late; ++j) keep(j, in_range(j));
    for (std::int64_t j = max(late, early); j < n; ++j) keep(j, in_range(j));
  }
  store(block_max, xsimd::select(seen, vec(0.f), minus_infinity()));
}

// Finishes the scores of a score block that are not final after the product, and sets block_max[row] to -inf if the
// row sees none of its keys.
template <int kComponents>
[[gnu::noinline]] void finish_score_block(PrefillItem<kComponents>& item, const ScoreBlock& s_block, std::int64_t key,
                                          float* s) {
  const std::int64_t n = s_block.chunks * kTileDepth, end = clamp(item.head.len_k - key, 0, n);
  const QueryBlock& q_block = item.q_blocks[s_block.q_block];
  for (int i = 0; i < kVecsOfRow; ++i) {
    float* const at = s + i * kLanes;
    const auto transform_keys = [&](std::int64_t begin, std::int64_t stop, auto f) {
      for (float* x = at + begin * kChunk; x < at + stop * kChunk; x += kChunk) store(x, f(load(x)));
    };
    if (item.modified) {
      store(item.w.block_max + i * kLanes, minus_infinity());
      finish_scores<true, true>(item.head, q_block, i, key, 0, end, s, item.w.block_max);
      transform_keys(end, n, [](vec) { return minus_infinity(); });
    } else {
      mask_scores(item, q_block.row + i * kLanes, key, n, end, at, item.w.block_max + i * kLanes);
      if (!item.large_m[s_block.q_block]) continue;
      const auto is_large = m_is_large(q_block, i);
      const vec neg_m = load(q_block.neg_m + i * kLanes);
      transform_keys(0, n, [&](vec x) { return xsimd::select(is_large, x * item.scale + neg_m, x); });
    }
  }
}

// Like must_move() of softmax.hpp, but decides by the score block's sums of weights, which exist already.
template <int kComponents>
auto must_move(const PrefillItem<kComponents>& item, const ScoreBlock& s_block, vec sum, int i) {
  using E = Exponentials<kComponents>;
  const std::int64_t lane = i * kLanes;
  const vec block_max = needs_finish(item, s_block) ? load(item.w.block_max + lane) : vec(0.f);
  const vec l = load(item.q_blocks[s_block.q_block].l + lane);
  const auto low = (l == vec(0.f)) & (sum < vec(E::kMinSum)) & (block_max > minus_infinity());
  return (sum > vec(E::kMaxSum)) | low;
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
