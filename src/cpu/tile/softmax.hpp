// Online softmax with lanes = queries: all of it vertical. Everything is decided per lane, so that a row's bits never
// depend on the rows beside it.
#pragma once

#include "cpu/tile/score.hpp"

namespace rapt::cpu::RAPT_ISA {

// The reference m starts at 0 and moves only when it must: probabilities stay below 2^24, and the largest of the first
// keys a row sees is not below 2^-16. Steps are integers, so a rescale multiplies by an exact power of two.
// A score of +inf moves nothing: it makes its row NaN by itself, while relative to it every other one, and a fused
// product that overflows, would be a -inf that hides it.
[[gnu::always_inline]] inline auto must_move(vec top, vec l) {
  const auto low = (l == vec(0.f)) & (top < vec(-16.f)) & (top > minus_infinity());
  return ((top > vec(24.f)) & (top < infinity())) | low;
}

inline bool any_must_move(const Panel& panel, const float* top) {
  bool any = false;
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes)
    any |= xsimd::any(must_move(load(top + lane), load(panel.l + lane)));
  return any;
}

// A row that has seen no key, with its sink as the only mass.
inline void start_row(const ScoreParams& score, const Row& row, float& minus_m, float& l) {
  minus_m = l = 0;
  const float sink = score.sinks ? score.sinks[row.q_head * score.sinks_stride] * kLog2e : -__builtin_inff();
  if (sink == -__builtin_inff()) return;
  // Far above 0, so that the weights beside it are no denormals: 2^100 leaves them and their sums room.
  const float m = __builtin_ceilf(sink);
  minus_m = m <= 0 ? -m : m <= 100 ? 0 : 100 - m;
  l = __builtin_exp2f(sink + minus_m);
}

// Starts over. Where states of a row are combined later, the sink joins them there.
inline void reset(const Head& head, Panel& panel) {
  for (std::int64_t i = 0; i < panel.width; i += kLanes)
    store(panel.minus_m + i, vec(0.f)), store(panel.l + i, vec(0.f));
  panel.started = false;
  for (std::int64_t i = 0; head.p.score.sinks && head.whole && i < panel.width; ++i)
    start_row(head.p.score, panel.row[i], panel.minus_m[i], panel.l[i]);
}

// Raises the reference of one vector of lanes by `step` and restates l. Returns what O must be multiplied by.
inline vec raise_reference(const Panel& panel, std::int64_t lane, vec step) {
  const vec l = load(panel.l + lane), before = load(panel.minus_m + lane), after = before - step;
  // After rounding: a step may be lost in a large reference. Nothing seen: nothing to scale.
  const vec factor = xsimd::select(l == vec(0.f), vec(1.f), exp2(after - before));
  store(panel.minus_m + lane, after);
  store(panel.l + lane, l * factor);
  return factor;
}

// The same lanes of n rows of O.
inline void rescale(float* o, std::int64_t stride, std::int64_t n, vec factor) {
  for (std::int64_t j = 0; j < n; ++j, o += stride) {
    const vec x = load(o);
    store(o, xsimd::select(x - x == vec(0.f), x * factor, x));  // inf * 0 is no NaN
  }
}

// Moves the reference of the lanes that must, by their largest score `top` of this block, and restates l and O, and in
// place the n scores at `s` unless it is null; other lanes are multiplied by 1. Cold: after a row's first blocks it
// hardly ever runs.
[[gnu::noinline, gnu::cold]] inline void move_reference(const Panel& panel, std::int64_t dv, const float* top, float* s,
                                                        std::int64_t n) {
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes) {
    const vec mx = load(top + lane);
    const vec step = xsimd::select(must_move(mx, load(panel.l + lane)), xsimd::ceil(mx), vec(0.f));
    const vec factor = raise_reference(panel, lane, step);
    for (std::int64_t j = 0; s && j < n; ++j)
      store(s + j * panel.width + lane, load(s + j * panel.width + lane) - step);
    if (panel.started) rescale(panel.ot + lane, panel.width, dv, factor);
  }
}

// S -> P = 2^S in place for n keys, the first kV of a row's kW vectors; their sums are added to `sum`.
template <int kV, int kW>
[[gnu::noinline]] void exponentiate(float* s, std::int64_t n, float* sum) {
  vec l[kV];
#pragma GCC unroll 4
  for (int v = 0; v < kV; ++v) l[v] = load(sum + v * kLanes);
#pragma GCC unroll 2
  for (std::int64_t j = 0; j < n; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) {
      float* at = s + (j * kW + v) * kLanes;
      const vec p = exp2(load(at));
      store(at, p);
      l[v] = l[v] + p;
    }
#pragma GCC unroll 4
  for (int v = 0; v < kV; ++v) store(sum + v * kLanes, l[v]);
}

}  // namespace rapt::cpu::RAPT_ISA
