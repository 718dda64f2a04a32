// Part of attention_prefill_tiles.cpp: the software pipeline over the score blocks of a packed range. The matrix
// products of two score blocks are interleaved with the exponentials of a third.
#pragma once

#include "cpu/kernels/prefill_tiles_scores.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Finds the next score block: query block after query block, the key blocks that some row sees in order.
template <int kComponents>
[[gnu::always_inline]] inline bool next_score_block(const PrefillItem<kComponents>& item, ScoreBlock& s_block,
                                                    std::int64_t begin) {
  std::int64_t i = s_block.q_block;
  const std::int64_t block = item.w.block;
  std::int64_t at = round_down(s_block.at, block) + block;
  for (; i < item.count; ++i, at = 0) {
    if (item.all_fall_back(i)) continue;
    const QueryBlock& q_block = item.q_blocks[i];
    const std::int64_t from = clamp(q_block.first(0) - begin, 0, item.w.keys) / kTileDepth * kTileDepth;
    const std::int64_t to = clamp(q_block.last(kRows - 1) - begin, 0, item.w.keys);
    at = max(at, from);
    if (at >= to) continue;
    const std::int64_t key = begin + at;
    s_block.q_block = i, s_block.at = at;
    const std::int64_t end = round_down(at, block) + block;
    s_block.chunks = (min(end, round_up(to, kTileDepth)) - at) / kTileDepth;
    s_block.unfinished = item.p.score.mask || q_block.first(kRows - 1) > key ||
                         q_block.last(0) < key + s_block.chunks * kTileDepth || item.modified;
    s_block.first = at == from && !q_block.started, s_block.last = end >= to;
    return true;
  }
  return false;
}

#if defined(RAPT_HAVE_TILES)
// multiply() specialised for two whole score blocks, heads with d = dv = kHead after padding, and the exponentials of
// a whole score block. All sizes are compile-time constants, so there are no branches between products and fewer
// addresses in registers: 1.05x to 1.19x faster than the general form (causal 0.98x to 1.09x).
template <int kHead>
[[gnu::noinline]] void multiply_blocks(PrefillItem<1>& item, Tiles& tiles, const ScoreBlock& pv, const char* weights,
                                       const ScoreBlock& qk, char* s, Exponentials<1>& e) {
  constexpr int kDepth = kHead / kTileDepth, kBlockChunks = kBlockKeys / kTileDepth;
  // A pair of keys is exponentiated after every product, or every second one.
  constexpr int kEvery = 4 * 2 * kDepth * kBlockChunks / (kBlockKeys / 2);
  const AttentionPrefillTilesScratch<1>& w = item.w;
  Exponentials<1> local = in_registers(e);
  Pending pending = item.pending;
  const auto interleaved = [&]() __attribute__((always_inline)) {
    local.template next_step<false>();
  };
  const SteppedOperand p{weights, kTileDepth * kRowBytes, 2 * kRowBytes, 64};
  SteppedOperand v{w.packed_range.v + pv.at * kHead * 2, kTileDepth * kHead * 2, 64, kTileBytes};
  float* o = item.q_blocks[pv.q_block].ot;
  for (int i = 0; i < kHead / kChunk; ++i, v.base += 2 * kTileBytes, o += kChunk * kChunk)
    multiply_chunk<true, false, InRows, kBlockChunks, kEvery>(tiles, v, p, kBlockChunks, pv.first ? nullptr : o, o,
                                                              pending, interleaved);
  const SteppedOperand q{item.q_tiles(qk.q_block), 2 * kTileBytes, 64, kTileBytes};
  auto* scores = reinterpret_cast<float*>(s);
  for (int i = 0; i < kBlockChunks; ++i, scores += kChunk * kChunk) {
    const KeyTiles& keys = w.packed_range.k_tiles[qk.at / kTileDepth + i];
    const SteppedOperand k{keys.row, 64, keys.stride, kTileRows * keys.stride};
    multiply_chunk<true, false, InRows, kDepth, kEvery>(tiles, k, q, kDepth, nullptr, scores, pending, interleaved);
  }
  item.pending = pending;
  put_back(local, e);
}

// Runs multiply_blocks<>() where it applies. Returns whether it did.
inline bool multiplied_blocks(PrefillItem<1>& item, Tiles& tiles, const ScoreBlock* pv, const char* weights,
                              const ScoreBlock* qk, char* s, Exponentials<1>& e) {
  const AttentionPrefillTilesScratch<1>& w = item.w;
  const auto is_whole = [](const ScoreBlock* s_block) { return s_block && s_block->chunks == kBlockKeys / kTileDepth; };
  if (!is_whole(pv) || !is_whole(qk) || e.end - e.s != kBlockKeys * kChunk) return false;
  if (w.d != w.dv || w.k_groups > 0 || !item.prefetcher.is_done()) return false;
  if (w.d == 64) return multiply_blocks<64>(item, tiles, *pv, weights, *qk, s, e), true;
  if (w.d == 128) return multiply_blocks<128>(item, tiles, *pv, weights, *qk, s, e), true;
  return false;
}
#endif

// One stage of the pipeline: O += V^T P^T of score block `pv`, then S = K Q^T of score block `qk` into `s` (either may
// be null), interleaved with the exponentials `e` of a third.
template <int kComponents>
[[gnu::noinline]] void multiply(PrefillItem<kComponents>& item, Tiles& tiles, const ScoreBlock* pv, const char* weights,
                                const ScoreBlock* qk, char* s, Exponentials<kComponents>& e) {
#if defined(RAPT_HAVE_TILES)
  if constexpr (kComponents == 1)
    if (multiplied_blocks(item, tiles, pv, weights, qk, s, e)) return;
#endif
  const AttentionPrefillTilesScratch<kComponents>& w = item.w;
  constexpr int n = products(kComponents);
  const std::int64_t depth = w.d / kTileDepth, columns = pv ? w.dv / kChunk : 0;
  const std::int64_t groups = max(w.k_groups, 1), chunks = columns + (qk ? qk->chunks * groups : 0);
  const std::int64_t products_of_tiles = 4 * n * (columns * (pv ? pv->chunks : 0) + (qk ? qk->chunks : 0) * depth);
  // Spreads the exponentials evenly over the tile products: `due` grows by `rate` per product, and at kOne
  // `steps_at_once` steps are due.
  constexpr std::int64_t kOne = 1 << 16;
  const std::int64_t exponential_steps = (e.end - e.s) / (kStepKeys * kChunk);
  const std::int64_t steps_at_once = (exponential_steps + products_of_tiles - 1) / products_of_tiles;
  const std::int64_t rate = steps_at_once ? exponential_steps / steps_at_once * kOne / products_of_tiles : 0;
  std::int64_t due = 0;
  Exponentials<kComponents> local = in_registers(e);
  Prefetcher prefetcher = item.prefetcher;
  const int lines = item.prefetch_lines;
  const auto interleaved = [&]() __attribute__((always_inline)) {
    prefetcher.prefetch(lines);
    if ((due += rate) < kOne) return;
    due -= kOne;
    std::int64_t left = steps_at_once;
    do local.template next_step<false>();
    while (--left);
  };
  TileOperand a{}, b{};
  float *start = nullptr, *c = nullptr;
  std::int64_t steps = 0, a_step = 0;
  Pending pending = item.pending;
  for (std::int64_t i = 0; i < chunks; ++i) {
    const bool values = i < columns;
    if (values && i == 0) {
      a = {w.packed_range.v + pv->at * w.dv * 2, w.offset.v, 64, kTileBytes};
      b = {weights, w.offset.p, 2 * kRowBytes, 64};
      a_step = 2 * kTileBytes, steps = n * pv->chunks;
      c = item.q_blocks[pv->q_block].ot, start = pv->first ? nullptr : c;
    } else if (!values) {
      const std::int64_t chunk = (i - columns) / groups, group = (i - columns) % groups;
      const KeyTiles& keys = w.packed_range.k_tiles[qk->at / kTileDepth + chunk];
      const std::int64_t before = w.k_groups > 0 ? n * item.first_step(group) : 0;
      steps = w.k_groups > 0 ? n * item.steps_of(group) : n * depth;
      a = {keys.row, w.offset.k + before, keys.stride, kTileRows * keys.stride};
      b = {item.q_tiles(qk->q_block), w.offset.q + before, 64, kTileBytes};
      c = w.k_groups > 0 ? w.group_s + group * kChunk * kChunk : reinterpret_cast<float*>(s) + chunk * kChunk * kChunk;
      start = nullptr;
      if (group + 1 == groups) a.last_pairs = (item.p.d - (w.d - kTileDepth) + 1) / 2;
    }
    if (values) a.rows = min(kChunk, item.p.dv - i * kChunk);
    multiply_chunk(tiles, a, b, steps, start, c, pending, interleaved);
    if (w.k_groups > 0 && !values) {
      const std::int64_t stored = i - columns + (kLeavesPending ? 0 : 1);
      if (stored > 0 && stored % groups == 0) scale_scores(item, *qk, stored / groups - 1, s);
    }
    a.base += a_step, c += kChunk * kChunk;
    if (start) start = c;
  }
  item.pending = pending;
  item.prefetcher = prefetcher;
  put_back(local, e);
}
template <int kComponents>
void flush(PrefillItem<kComponents>& item, Tiles& tiles) {
  store_pending(tiles, item.pending, item.w.discarded);
}
// After multiply() of a score block `qk` whose keys have scales: completes its last chunk of scores.
template <int kComponents>
void flush_scores(PrefillItem<kComponents>& item, Tiles& tiles, const ScoreBlock& qk, char* s) {
  flush(item, tiles);
  scale_scores(item, qk, qk.chunks - 1, s);
}

// Some row's weights are too large or too small. Computes the score block's scores again (the weights have overwritten
// them), moves m of those rows and no others, and exponentiates once more. A large m is rounded and may have to move
// again.
template <int kComponents>
[[gnu::noinline, gnu::cold]] void move_and_repeat(PrefillItem<kComponents>& item, Tiles& tiles,
                                                  const ScoreBlock& s_block, std::int64_t begin, char* s,
                                                  Exponentials<kComponents>& e) {
  using E = Exponentials<kComponents>;
  const QueryBlock& q_block = item.q_blocks[s_block.q_block];
  auto* x = reinterpret_cast<float*>(s);
  E none{};
  vec not_finite[kVecsOfRow], may_move[kVecsOfRow];  // NaN or 0; 1 or 0
  for (int i = 0; i < kVecsOfRow; ++i)
    may_move[i] = xsimd::select(must_move(item, s_block, e.sum[i], i), vec(1.f), vec(0.f));
  bool moved = true;
  constexpr int kRounds = 4;
  for (int round = 0; moved && round <= kRounds; ++round) {
    flush(item, tiles);
    multiply(item, tiles, nullptr, nullptr, &s_block, s, none);
    if (item.w.k_groups > 0) flush_scores(item, tiles, s_block, s);
    else flush(item, tiles);
    if (needs_finish(item, s_block)) finish_score_block(item, s_block, begin + s_block.at, x);
    moved = false;
    for (int i = 0; i < kVecsOfRow; ++i) {
      vec largest = minus_infinity();
      not_finite[i] = vec(0.f);
      for (std::int64_t j = 0; j < s_block.chunks * kTileDepth; ++j) {
        const vec y = fma(load(x + j * kChunk + i * kLanes), scale_of(item, s_block, i), neg_m_of(item, s_block, i));
        largest = xsimd::max(largest, y);
        not_finite[i] = xsimd::select(y < infinity(), not_finite[i], y - y);  // +inf and NaN give NaN
      }
      const auto low = (load(q_block.l + i * kLanes) == vec(0.f)) & (largest < vec(E::kMinExponent));
      const auto finite = xsimd::abs(largest) < infinity();
      const auto moves = ((largest > vec(E::kMaxExponent)) | low) & finite & (may_move[i] != vec(0.f));
      const vec step = xsimd::select(moves, xsimd::ceil(largest) + vec(E::kHeadroom), vec(0.f));
      if (round == kRounds) {  // m is too large to absorb the step: lowers the scores instead
        for (std::int64_t j = 0; j < s_block.chunks * kTileDepth; ++j) {
          float* const at = x + j * kChunk + i * kLanes;
          store(at, load(at) - step);
        }
        continue;
      }
      const vec factor = raise_m(q_block, i * kLanes, step);
      if (q_block.has_accum) rescale(q_block.ot_accum + i * kLanes, kRows, item.w.dv, factor);
      if (!s_block.first) rescale(q_block.ot + i * kLanes, kRows, item.w.dv, factor);
      moved |= xsimd::any(moves);
      item.large_m[s_block.q_block] |= xsimd::any(m_is_large(q_block, i));
    }
  }
  e = exponentials(item, s_block, s);
  e.template rest<true>();
  for (int i = 0; i < kVecsOfRow; ++i)
    e.sum[i] = e.sum[i] + not_finite[i];  // the row's output will be NaN: it falls back
}

// Called after the last score block of a query block in this packed range: O is complete up to here.
template <int kComponents>
void end_key_range(PrefillItem<kComponents>& item, Tiles& tiles, const ScoreBlock& s_block, bool pending) {
  if (pending) flush(item, tiles);
  item.q_blocks[s_block.q_block].started = true;
}

// Runs all score blocks of the range at `begin`, which is packed.
template <int kComponents>
void attend_key_range(PrefillItem<kComponents>& item, Tiles& tiles, std::int64_t begin) {
  using E = Exponentials<kComponents>;
  const FlushDenormals flush_denormals;
  ScoreBlock s_blocks[3];  // the previous, current and next score block; the slots rotate
  ScoreBlock *last = nullptr, *now = s_blocks, *then = s_blocks + 1;
  now->q_block = 0, now->at = -item.w.block;
  if (!next_score_block(item, *now, begin)) return;
  char* const* const s = item.w.s;
  E none{};
  item.pending = {item.w.discarded};
  multiply(item, tiles, nullptr, nullptr, now, s[0], none);
  if (item.w.k_groups > 0) flush_scores(item, tiles, *now, s[0]);
  for (int at = 0; now; at ^= 1) {
    *then = *now;
    if (!next_score_block(item, *then, begin)) then = nullptr;
    if (needs_finish(item, *now) || now->chunks == 1 || (!last && !then)) flush(item, tiles);
    if (needs_finish(item, *now)) finish_score_block(item, *now, begin + now->at, reinterpret_cast<float*>(s[at]));
    E e = exponentials(item, *now, s[at]);
    if (last || then) multiply(item, tiles, last, s[at ^ 1], then, s[at ^ 1], e);
    if (then && item.w.k_groups > 0) flush_scores(item, tiles, *then, s[at ^ 1]);
    e.template rest<false>();
    if (last && last->last) end_key_range(item, tiles, *last, !then);
    bool any = false;
    for (int i = 0; i < kVecsOfRow; ++i) any |= xsimd::any(must_move(item, *now, e.sum[i], i));
    if (any) [[unlikely]]
      move_and_repeat(item, tiles, *now, begin, s[at], e);
    for (int i = 0; i < kVecsOfRow; ++i) add_to_sum(item.q_blocks[now->q_block], i * kLanes, e.sum[i]);
    ScoreBlock* const free = last ? last : s_blocks + 2;
    last = now, now = then, then = free;
    if (!now) {
      multiply(item, tiles, last, s[at], nullptr, nullptr, none);
      end_key_range(item, tiles, *last, true);
    }
  }
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
