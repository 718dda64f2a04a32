// Online softmax with lanes = queries: all of it vertical. Everything is decided per lane, so that a row's bits never
// depend on the rows beside it.
#pragma once

#include "cpu/tile/score.hpp"

namespace rapt::cpu::RAPT_ISA {

// The reference moves only when it must: probabilities stay below 2^kSlack, and the largest of the first keys a row
// sees is not below 2^-kSlack. Steps are integers, so a rescale multiplies by an exact power of two.
inline constexpr float kSlack = 8;

[[gnu::always_inline]] inline auto must_move(vec top, vec l) {
  return (top > vec(kSlack)) | ((l == vec(0.f)) & (top < vec(-kSlack)) & (top > minus_infinity()));
}

// Moves the reference of the lanes that must, given their largest score `top` of this block, and restates the block's n
// scores, l and O; other lanes are multiplied by 1. Cold: after a row's first blocks it hardly ever runs.
[[gnu::noinline, gnu::cold]] inline void move_reference(const Panel& panel, std::int64_t dv, const float* top, float* s,
                                                        std::int64_t n) {
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes) {
    const vec l = load(panel.l + lane), mx = load(top + lane);
    const vec step = xsimd::select(must_move(mx, l), xsimd::ceil(mx), vec(0.f));
    const vec factor = xsimd::select(l == vec(0.f), vec(1.f), exp2(vec(0.f) - step));  // nothing seen: nothing to scale
    store(panel.minus_m + lane, load(panel.minus_m + lane) - step);
    store(panel.l + lane, l * factor);
    for (std::int64_t j = 0; j < n; ++j) store(s + j * panel.width + lane, load(s + j * panel.width + lane) - step);
    if (!panel.started) continue;
    for (std::int64_t j = 0; j < dv; ++j)
      store(panel.ot + j * panel.width + lane, load(panel.ot + j * panel.width + lane) * factor);
  }
}

inline bool any_must_move(const Panel& panel, const float* top) {
  bool any = false;
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes)
    any |= xsimd::any(must_move(load(top + lane), load(panel.l + lane)));
  return any;
}

// S -> P = 2^S in place for n keys of kV vectors; row sums are added to `sum`.
template <int kV>
[[gnu::noinline]] void exponentiate(float* s, std::int64_t n, std::int64_t width, float* sum) {
  vec l[kV];
#pragma GCC unroll 4
  for (int v = 0; v < kV; ++v) l[v] = load(sum + v * kLanes);
  for (std::int64_t j = 0; j < n; ++j) {
    vec p[kV];
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) p[v] = load(s + j * width + v * kLanes);
    exp2(p);
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) {
      store(s + j * width + v * kLanes, p[v]);
      l[v] = l[v] + p[v];
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kV; ++v) store(sum + v * kLanes, l[v]);
}

}  // namespace rapt::cpu::RAPT_ISA
