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
  return ((top > vec(24.f)) & (top < vec(0.f) - minus_infinity())) | low;
}

inline bool any_must_move(const Panel& panel, const float* top) {
  bool any = false;
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes)
    any |= xsimd::any(must_move(load(top + lane), load(panel.l + lane)));
  return any;
}

// Moves the reference of the lanes that must, by their largest score `top` of this block, and restates l and O, and in
// place the n scores at `s` unless it is null; other lanes are multiplied by 1. Cold: after a row's first blocks it
// hardly ever runs.
[[gnu::noinline, gnu::cold]] inline void move_reference(const Panel& panel, std::int64_t dv, const float* top, float* s,
                                                        std::int64_t n) {
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes) {
    const vec l = load(panel.l + lane), mx = load(top + lane);
    const vec step = xsimd::select(must_move(mx, l), xsimd::ceil(mx), vec(0.f));
    const vec factor = xsimd::select(l == vec(0.f), vec(1.f), exp2(vec(0.f) - step));  // nothing seen: nothing to scale
    store(panel.minus_m + lane, load(panel.minus_m + lane) - step);
    store(panel.l + lane, l * factor);
    for (std::int64_t j = 0; s && j < n; ++j)
      store(s + j * panel.width + lane, load(s + j * panel.width + lane) - step);
    for (std::int64_t j = 0; panel.started && j < dv; ++j) {
      const vec o = load(panel.ot + j * panel.width + lane);
      store(panel.ot + j * panel.width + lane, xsimd::select(o - o == vec(0.f), o * factor, o));  // inf * 0 is no NaN
    }
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
