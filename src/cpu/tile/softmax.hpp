// Online softmax with lanes = queries: all of it vertical. Everything is decided per lane, so that a row's bits never
// depend on its neighbours.
#pragma once

#include "cpu/tile/score.hpp"

namespace rapt::cpu::RAPT_ISA {

// Weights are 2^(score - m). FlashAttention's m is the running maximum; here it starts at 0, or at the sink, and moves
// only when it must: weights stay below 2^kExponentRange (in attention_prefill_tiles their sums do), and the largest of
// the first keys a row sees is not below 2^-kExponentRange. A wider range would move m less often, but exponents far
// from 0 round coarsely (by 2^-22 up to 8, by 2^-20 up to 32), and sums of weights times values up to 2^100 must not
// overflow. Steps are integers, so a rescale multiplies by an exact power of two. A score of +inf moves nothing: it
// makes its row NaN by itself, while relative to it every other one, and a fused product that overflows, would be a
// -inf that hides it.
inline constexpr float kExponentRange = 8;
[[gnu::always_inline]] inline auto must_move(vec block_max, vec l) {
  const auto low = (l == vec(0.f)) & (block_max < vec(-kExponentRange)) & (block_max > minus_infinity());
  return ((block_max > vec(kExponentRange)) & (block_max < infinity())) | low;
}

inline bool any_must_move(const Panel& panel, const float* block_max) {
  bool any = false;
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes)
    any |= xsimd::any(must_move(load(block_max + lane), load(panel.l + lane)));
  return any;
}

// How scores in memory become exponents: times `scale`, plus `add`, with one rounding. Modified scores are exponents
// already, since modifiers are added to what is relative to m; others are plain q.k.
struct ToExponents {
  float scale;
  const float* add;  // [width]
};
inline ToExponents to_exponents(const ScoreParams& score, const Panel& panel, const float* zero) {
  if (needs_finish(score)) return {1, zero};
  return {score.scale_log2, panel.neg_m};
}
inline void apply(ToExponents e, std::int64_t width, const float* from, float* to) {
  for (std::int64_t lane = 0; lane < width; lane += kLanes)
    store(to + lane, fma(load(from + lane), vec(e.scale), load(e.add + lane)));
}

// A row that has seen no key, with its sink as the only mass.
inline void start_row(const Head& head, const Row& row, float& neg_m, float& l) {
  neg_m = l = 0;
  const ScoreParams& score = head.p.score;
  if (!score.sinks) return;
  const float given = number_at(score.sinks, score.sinks_type, row.q_head * score.sinks_stride);
  if (given == -__builtin_inff()) return;
  const double sink = static_cast<double>(given) * rapt::kLog2e + static_cast<double>(alibi_shift_log2(head, row));
  if (sink >= 0x1p24 || sink <= -0x1p24) {  // m has no fraction to leave out: m is the sink
    neg_m = static_cast<float>(-sink), l = static_cast<float>(1 + (sink - sink));  // NaN for a sink of inf
    return;
  }
  // Far above 0, so that weights relative to it are no denormals: 2^100 leaves them and their sums room.
  const double m = __builtin_ceil(sink);
  neg_m = static_cast<float>(m <= 0 ? -m : m <= 100 ? 0 : 100 - m);
  l = static_cast<float>(__builtin_exp2(sink + static_cast<double>(neg_m)));
}

// Starts over. Where partial results of a row are combined later, the sink joins them there.
inline void reset(const Head& head, Panel& panel) {
  for (std::int64_t i = 0; i < panel.width; i += kLanes)
    for (float* row : {panel.neg_m, panel.l, panel.l_low}) store(row + i, vec(0.f));
  panel.started = panel.joined = false;
  for (std::int64_t i = 0; head.p.score.sinks && head.whole && i < panel.width; ++i)
    start_row(head, panel.row[i], panel.neg_m[i], panel.l[i]);
}

// Raises m of one vector of lanes by `step` and restates l. Returns what O must be multiplied by.
inline vec raise_m(const Panel& panel, std::int64_t lane, vec step) {
  const vec l = load(panel.l + lane), before = load(panel.neg_m + lane), after = before - step;
  // After rounding: a step may be lost in a large m. Nothing seen: nothing to scale.
  const vec factor = xsimd::select(l == vec(0.f), vec(1.f), exp2(after - before));
  store(panel.neg_m + lane, after);
  store(panel.l + lane, l * factor);
  store(panel.l_low + lane, load(panel.l_low + lane) * factor);
  return factor;
}

// The same lanes of n rows of O.
inline void rescale(float* o, std::int64_t stride, std::int64_t n, vec factor) {
  for (std::int64_t j = 0; j < n; ++j, o += stride) {
    const vec x = load(o);
    store(o, xsimd::select(x - x == vec(0.f), x * factor, x));  // inf * 0 is no NaN
  }
}

// Moves m of the lanes that must, by their largest score `block_max` of this block, and restates l and O, and in
// place the n scores at `s` unless it is null; other lanes are multiplied by 1. Cold: after a row's first blocks it
// hardly ever runs.
[[gnu::noinline, gnu::cold]] inline void move_m(const Panel& panel, std::int64_t dv, const float* block_max, float* s,
                                                std::int64_t n) {
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes) {
    const vec new_max = load(block_max + lane);
    const vec step = xsimd::select(must_move(new_max, load(panel.l + lane)), xsimd::ceil(new_max), vec(0.f));
    const vec factor = raise_m(panel, lane, step);
    for (std::int64_t j = 0; s && j < n; ++j)
      store(s + j * panel.width + lane, load(s + j * panel.width + lane) - step);
    if (panel.started) rescale(panel.ot + lane, panel.width, dv, factor);
    if (panel.joined) rescale(panel.total + lane, panel.width, dv, factor);
  }
}

// l += x for one vector of lanes, with what rounding takes away kept in l_low: thousands of blocks are added.
inline void add_to_sum(const Panel& panel, std::int64_t lane, vec x) {
  const vec before = load(panel.l + lane), l = before + x, added = l - before;
  const vec lost = (before - (l - added)) + (x - added);
  store(panel.l + lane, l);
  store(panel.l_low + lane, load(panel.l_low + lane) + lost);
}
// Before l is used. (Once it is infinite or NaN, what was lost is NaN.)
inline void settle_sum(const Panel& panel) {
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes) {
    store(panel.l + lane, load(panel.l + lane) + load(panel.l_low + lane));
    store(panel.l_low + lane, vec(0.f));
  }
}

// Blocks that are summed before they join the row's total: see kSumKeys.
inline constexpr std::int64_t kRunBlocks = 16;

// The blocks so far join the panel's total.
inline void join(Panel& panel, std::int64_t dv) {
  if (!panel.started) return;
  for (std::int64_t i = 0; i < dv * panel.width; i += kLanes) {
    const vec x = load(panel.ot + i);
    store(panel.total + i, panel.joined ? load(panel.total + i) + x : x);
  }
  panel.started = false, panel.joined = true;
}
// After the last block: the total is the output.
inline void finish_joining(Panel& panel, std::int64_t dv) {
  if (!panel.joined) return;
  join(panel, dv);
  float* const joined = panel.total;
  panel.total = panel.ot, panel.ot = joined, panel.started = true;
}

// S -> P = 2^S in place for keys [begin, end) of a block, the first kV vectors of rows of kW. Their sums are
// added to the block's, `sum`, by way of `short_sum`: kSumKeys keys are summed apart, wherever calls cut the block.
template <int kV, int kW>
[[gnu::noinline]] void exponentiate(float* s, std::int64_t begin, std::int64_t end, ToExponents e, float* short_sum,
                                    float* sum) {
  const vec scale(e.scale);
  vec add[kV], l[kV];
#pragma GCC unroll 4
  for (int v = 0; v < kV; ++v) add[v] = load(e.add + v * kLanes), l[v] = load(short_sum + v * kLanes);
  for (std::int64_t j = begin; j < end;) {
    const std::int64_t stop = min((j / kSumKeys + 1) * kSumKeys, end);
#pragma GCC unroll 2
    for (; j < stop; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) {
        float* at = s + (j * kW + v) * kLanes;
        const vec p = exp2(fma(load(at), scale, add[v]));
        store(at, p);
        l[v] = l[v] + p;
      }
    if (j % kSumKeys != 0) break;
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) {
      store(sum + v * kLanes, load(sum + v * kLanes) + l[v]);
      l[v] = vec(0.f);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kV; ++v) store(short_sum + v * kLanes, l[v]);
}

}  // namespace rapt::cpu::RAPT_ISA
