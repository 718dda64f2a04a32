// Moves Q into lanes, and K or V blocks of 16-bit elements or awkward strides into contiguous fp32 scratch.
#pragma once

#include "cpu/tile/panel.hpp"

namespace rapt::cpu::RAPT_ISA {

// panel.qt = Q^T * scale. `q` is the call's.
template <class T>
[[gnu::noinline]] void pack_queries(const T* q, const Head& head, const Panel& panel, float scale) {
  const std::int64_t d = head.p.d, inner = head.p.q_stride.d;
  for (std::int64_t lane = 0; lane < panel.width; lane += kLanes) {
    const T* src[kLanes];
    for (int i = 0; i < kLanes; ++i) src[i] = q + row_at(head.p.q_stride, head, panel.row[lane + i]);
    for (std::int64_t d0 = 0; d0 < d; d0 += kLanes) {
      const std::int64_t n = least(kLanes, d - d0);
      vec r[kLanes];
      if (inner == 1 && n == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) r[i] = load_any(src[i] + d0);
      } else {
        for (int i = 0; i < kLanes; ++i) r[i] = load_strided(src[i] + d0 * inner, inner, n);
      }
      transpose(r);
      float* qt = panel.qt + d0 * panel.width + lane;
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j, qt += panel.width)
        if (j < n) store(qt, r[j] * vec(scale));
    }
  }
}

// Rows of n elements -> contiguous rows of `dst_stride` floats, a multiple of kLanes.
template <class T>
[[gnu::noinline]] void pack_rows(const T* src, std::int64_t stride, std::int64_t inner, std::int64_t rows,
                                 std::int64_t n, float* dst, std::int64_t dst_stride) {
  if (stride == 1 && inner != 1) {  // rows innermost: transpose
    for (std::int64_t r0 = 0; r0 < rows; r0 += kLanes) {
      const std::int64_t nr = least(kLanes, rows - r0);
      for (std::int64_t j0 = 0; j0 < n; j0 += kLanes) {
        vec t[kLanes];
        for (int j = 0; j < kLanes; ++j) t[j] = load_strided(src + r0 + least(j0 + j, n - 1) * inner, 1, nr);
        transpose(t);
        for (std::int64_t r = 0; r < nr; ++r) store(dst + (r0 + r) * dst_stride + j0, t[r]);
      }
    }
    return;
  }
  const std::int64_t whole = inner == 1 ? n / kLanes * kLanes : 0;
  for (std::int64_t r = 0; r < rows; ++r, src += stride, dst += dst_stride) {
    for (std::int64_t j = 0; j < whole; j += kLanes) store(dst + j, load_any(src + j));
    for (std::int64_t j = whole; j < n; j += kLanes)
      store(dst + j, load_strided(src + j * inner, inner, least(kLanes, n - j)));
  }
}

}  // namespace rapt::cpu::RAPT_ISA
