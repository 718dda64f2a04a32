// O^T / l -> out, and lse.
#pragma once

#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {

// `out` is the call's. Returns false if some fp32 element of the panel is not finite: then a masked value may have
// leaked into it (0 * inf) and the panel must be redone with care. A leak never turns finite again, so checking here is
// enough. (A finite one past the largest fp16 is stored as infinity, and is right.)
template <class T>
[[gnu::noinline]] bool store_output(T* out, const Head& head, const Panel& panel) {
  const std::int64_t dv = head.p.dv, inner = head.p.out_stride.d;
  if (!panel.started)
    for (std::int64_t i = 0; i < dv * panel.width; i += kLanes) store(panel.ot + i, vec(0.f));
  vec poison[4] = {vec(0.f), vec(0.f), vec(0.f), vec(0.f)};  // x * 0 is NaN for inf and NaN; four chains
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes) {
    const std::int64_t rows = least(kLanes, panel.rows - lane);
    T* dst[kLanes];
    for (int i = 0; i < kLanes; ++i) dst[i] = out + row_at(head.p.out_stride, head, panel.row[lane + i]);
    const vec l = load(panel.l + lane);
    const vec scale = xsimd::select(l == vec(0.f), vec(0.f), vec(1.f) / l);  // a row without keys is 0
    const auto row_of = [&](std::int64_t c, int chain) __attribute__((always_inline)) {
      const vec x = load(panel.ot + c * panel.width + lane) * scale;
      poison[chain % 4] = fma(x, vec(0.f), poison[chain % 4]);
      return x;
    };
    std::int64_t d0 = 0;
    constexpr int kColumns = std::is_same_v<T, bf16> ? 2 : 1;  // of a word: narrowed first, half as much to transpose
    for (; inner == 1 && rows == kLanes && d0 + kColumns * kLanes <= dv; d0 += kColumns * kLanes) {
      vec r[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        if constexpr (kColumns == 2) r[j] = narrowed_pair(row_of(d0 + 2 * j, 2 * j), row_of(d0 + 2 * j + 1, 2 * j + 1));
        else r[j] = row_of(d0 + j, j);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if constexpr (kColumns == 2) store_any(reinterpret_cast<float*>(dst[i] + d0), r[i]);
        else store_any(dst[i] + d0, r[i]);
      }
    }
    for (; d0 < dv; d0 += kLanes) {
      const std::int64_t n = least(kLanes, dv - d0);
      vec r[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) r[j] = row_of(least(d0 + j, dv - 1), j);  // past dv: repeated, not stored
      transpose(r);
      for (std::int64_t i = 0; i < rows; ++i) store_strided(dst[i] + d0 * inner, inner, n, r[i]);
    }
  }
  return xsimd::all((poison[0] + poison[1]) + (poison[2] + poison[3]) == vec(0.f));
}

// The same for the call's type of out.
inline bool store_panel(const Head& head, const Panel& panel) {
  return with_element(head.p.out_type, [&](auto element) {
    return store_output(static_cast<decltype(element)*>(head.p.out), head, panel);
  });
}

// lse = ln(sum of e^score): (m + log2 l) ln 2.
inline void store_lse(const Head& head, const Panel& panel) {
  if (!head.p.lse) return;
  for (std::int64_t i = 0; i < panel.rows; ++i) {
    const double log2_sum = __builtin_log2(static_cast<double>(panel.l[i])) - static_cast<double>(panel.minus_m[i]);
    head.p.lse[row_at(head.p.lse_stride, head, panel.row[i])] = static_cast<float>(log2_sum * kLn2);
  }
}

}  // namespace rapt::cpu::RAPT_ISA
