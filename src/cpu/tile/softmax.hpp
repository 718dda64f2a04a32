// Online softmax with query rows in the lanes, so that all operations are per lane. Every decision is per lane too: a
// row's bits never depend on its neighbours.
#pragma once

#include "cpu/tile/score.hpp"

namespace rapt::cpu::RAPT_ISA {

// Weights are 2^(score - m). In FlashAttention m is the running maximum. Here m starts at 0, or at the sink, and moves
// only when it must: weights must stay below 2^kExponentRange (in attention_prefill_tiles their sums must), and the
// largest weight of the first keys that a row sees must not be below 2^-kExponentRange. A wider range would move m
// less often, but exponents far from 0 round coarsely (by 2^-22 up to 8, by 2^-20 up to 32), and sums of weights times
// values up to 2^100 must not overflow. m moves by integers, so rescaling multiplies by an exact power of two. A score
// of +inf does not move m: it makes its row NaN anyway, but relative to m = inf every other score would be -inf, which
// hides it.
inline constexpr float kExponentRange = 8;
[[gnu::always_inline]] inline auto must_move(vec block_max, vec l) {
  const auto low = (l == vec(0.f)) & (block_max < vec(-kExponentRange)) & (block_max > minus_infinity());
  return ((block_max > vec(kExponentRange)) & (block_max < infinity())) | low;
}

inline bool any_must_move(const QueryBlock& q_block, const float* block_max) {
  bool any = false;
  for (std::int64_t lane = 0; lane < q_block.width; lane += kLanes)
    any |= xsimd::any(must_move(load(block_max + lane), load(q_block.l + lane)));
  return any;
}

// Turns scores in memory into exponents: times `scale`, plus `add`, with one rounding. Modified scores are exponents
// already (finish_scores() subtracts m before it adds modifiers); others are plain q.k.
struct ToExponents {
  float scale;
  const float* add;  // [width]
};
inline ToExponents to_exponents(const ScoreParams& score, const QueryBlock& q_block, const float* zero) {
  if (needs_finish(score)) return {1, zero};
  return {score.scale_log2, q_block.neg_m};
}
inline void apply(ToExponents e, std::int64_t width, const float* from, float* to) {
  for (std::int64_t lane = 0; lane < width; lane += kLanes)
    store(to + lane, fma(load(from + lane), vec(e.scale), load(e.add + lane)));
}

// The state of a row before its first key: its sink is the only term of the sum.
inline void start_row(const Head& head, const Row& row, float& neg_m, float& l) {
  neg_m = l = 0;
  const ScoreParams& score = head.p.score;
  if (!score.sinks) return;
  const float given = number_at(score.sinks, score.sinks_type, row.q_head * score.sinks_stride);
  if (given == -__builtin_inff()) return;
  const double sink = static_cast<double>(given) * rapt::kLog2e + static_cast<double>(alibi_shift_log2(head, row));
  if (sink >= 0x1p24 || sink <= -0x1p24) {  // floats this large are integers, so m can be the sink itself
    neg_m = static_cast<float>(-sink), l = static_cast<float>(1 + (sink - sink));  // NaN for a sink of inf
    return;
  }
  // m is far enough above 0 that weights relative to it are not denormal; 2^100 leaves room for them and their sums.
  const double m = __builtin_ceil(sink);
  neg_m = static_cast<float>(m <= 0 ? -m : m <= 100 ? 0 : 100 - m);
  l = static_cast<float>(__builtin_exp2(sink + static_cast<double>(neg_m)));
}

// Resets the softmax state. Where partial results are combined later, attention_combine adds the sink.
inline void reset(const Head& head, QueryBlock& q_block) {
  for (std::int64_t i = 0; i < q_block.width; i += kLanes)
    for (float* row : {q_block.neg_m, q_block.l, q_block.l_compensation}) store(row + i, vec(0.f));
  q_block.started = q_block.has_accum = false;
  for (std::int64_t i = 0; head.p.score.sinks && head.whole && i < q_block.width; ++i)
    start_row(head, q_block.row[i], q_block.neg_m[i], q_block.l[i]);
}

// Raises m of one vector of lanes by `step` and rescales l. Returns the factor that O must be multiplied by.
inline vec raise_m(const QueryBlock& q_block, std::int64_t lane, vec step) {
  const vec l = load(q_block.l + lane), before = load(q_block.neg_m + lane), after = before - step;
  // From the rounded sums: a large m may absorb the step. Lanes that have seen no key have nothing to rescale.
  const vec factor = xsimd::select(l == vec(0.f), vec(1.f), exp2(after - before));
  store(q_block.neg_m + lane, after);
  store(q_block.l + lane, l * factor);
  store(q_block.l_compensation + lane, load(q_block.l_compensation + lane) * factor);
  return factor;
}

// Multiplies one vector of lanes in n rows of O.
inline void rescale(float* o, std::int64_t stride, std::int64_t n, vec factor) {
  for (std::int64_t j = 0; j < n; ++j, o += stride) {
    const vec x = load(o);
    store(o, xsimd::select(x - x == vec(0.f), x * factor, x));  // keeps inf and NaN: inf * 0 would be NaN
  }
}

// Moves m of the lanes that must move, by their maximum `block_max` over this block, and rescales l and O. Unless `s`
// is null it also lowers the n scores there. Other lanes are multiplied by 1. Cold: after a row's first blocks it
// hardly ever runs.
[[gnu::noinline, gnu::cold]] inline void move_m(const QueryBlock& q_block, std::int64_t dv, const float* block_max,
                                                float* s, std::int64_t n) {
  for (std::int64_t lane = 0; lane < q_block.width; lane += kLanes) {
    const vec new_max = load(block_max + lane);
    const vec step = xsimd::select(must_move(new_max, load(q_block.l + lane)), xsimd::ceil(new_max), vec(0.f));
    const vec factor = raise_m(q_block, lane, step);
    for (std::int64_t j = 0; s && j < n; ++j)
      store(s + j * q_block.width + lane, load(s + j * q_block.width + lane) - step);
    if (q_block.started) rescale(q_block.ot + lane, q_block.width, dv, factor);
    if (q_block.has_accum) rescale(q_block.ot_accum + lane, q_block.width, dv, factor);
  }
}

// l += x for one vector of lanes, by compensated summation: l_compensation collects the rounding errors of thousands
// of blocks.
inline void add_to_sum(const QueryBlock& q_block, std::int64_t lane, vec x) {
  const vec before = load(q_block.l + lane), l = before + x, added = l - before;
  const vec error = (before - (l - added)) + (x - added);
  store(q_block.l + lane, l);
  store(q_block.l_compensation + lane, load(q_block.l_compensation + lane) + error);
}
// Must be called before l is read. (If l is infinite or NaN, the compensation is NaN.)
inline void add_compensation(const QueryBlock& q_block) {
  for (std::int64_t lane = 0; lane < q_block.width; lane += kLanes) {
    store(q_block.l + lane, load(q_block.l + lane) + load(q_block.l_compensation + lane));
    store(q_block.l_compensation + lane, vec(0.f));
  }
}

// The accumulation interval, in blocks: O^T of so many blocks is summed in ot before it is added to ot_accum. It
// bounds the length of every sum, as kSumKeys does.
inline constexpr std::int64_t kIntervalBlocks = 16;

// Ends an accumulation interval: ot_accum += ot.
inline void add_to_accum(QueryBlock& q_block, std::int64_t dv) {
  if (!q_block.started) return;
  for (std::int64_t i = 0; i < dv * q_block.width; i += kLanes) {
    const vec x = load(q_block.ot + i);
    store(q_block.ot_accum + i, q_block.has_accum ? load(q_block.ot_accum + i) + x : x);
  }
  q_block.started = false, q_block.has_accum = true;
}
// After the last block: ends the interval and makes ot_accum the output.
inline void finish_accum(QueryBlock& q_block, std::int64_t dv) {
  if (!q_block.has_accum) return;
  add_to_accum(q_block, dv);
  float* const accum = q_block.ot_accum;
  q_block.ot_accum = q_block.ot, q_block.ot = accum, q_block.started = true;
}

// S -> P = 2^S in place for keys [begin, end) of a block, in the first kV vectors of rows of kW. Adds the weights to
// `short_sum`, and every kSumKeys keys adds that to `sum`. The borders of these short sums are multiples of kSumKeys,
// whichever segments the calls cover.
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
