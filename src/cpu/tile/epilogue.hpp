// The end of a query block: out = O^T / l, and lse; or partial results for attention_combine.
#pragma once

#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {

// Stores rows of O^T, divided by l if `normalise`, to row_of(lane), a T*. Returns false if some fp32 element is not
// finite: then the value of a masked key may have leaked into it (0 * inf), and the caller must compute the query
// block again with care. Checking here is enough, since a leaked inf or NaN never becomes finite again. (A finite
// element past the largest fp16 is stored as infinity, which is right.) A sum of 0 is stored as +0: in sums of
// components its sign may come from values that the row does not see.
template <class T, class RowOf>
[[gnu::noinline]] bool store_output(RowOf row_of, std::int64_t inner, std::int64_t dv, const QueryBlock& q_block,
                                    bool normalise) {
  if (!q_block.started)
    for (std::int64_t i = 0; i < dv * q_block.width; i += kLanes) store(q_block.ot + i, vec(0.f));
  vec poison[4] = {vec(0.f), vec(0.f), vec(0.f), vec(0.f)};  // x * 0 is NaN for inf and NaN; four chains
  for (std::int64_t lane = 0; lane < q_block.width; lane += kLanes) {
    const std::int64_t rows = min(kLanes, q_block.rows - lane);
    T* dst[kLanes];
    for (std::int64_t i = 0; i < rows; ++i) dst[i] = row_of(lane + i);
    const vec l = load(q_block.l + lane);
    const vec inverse = xsimd::select(l == vec(0.f), vec(0.f), vec(1.f) / l);  // a row without keys is 0
    const vec scale = normalise ? inverse : vec(1.f);
    const float* const o = q_block.ot + lane;
    const auto column = [&](std::int64_t c, int chain) __attribute__((always_inline)) {
      const vec x = fma(load(o + c * q_block.width), scale, vec(0.f));  // turns -0 into +0
      poison[chain % 4] = fma(x, vec(0.f), poison[chain % 4]);
      return x;
    };
    std::int64_t d0 = 0;
    constexpr int kColumns =
        std::is_same_v<T, bf16> ? 2 : 1;  // of a 32-bit word: narrowed first, half as much to transpose
    for (; inner == 1 && rows == kLanes && d0 + kColumns * kLanes <= dv; d0 += kColumns * kLanes) {
      vec r[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        if constexpr (kColumns == 2)
          r[j] = round_to_bf16_pairs(column(d0 + 2 * j, 2 * j), column(d0 + 2 * j + 1, 2 * j + 1));
        else r[j] = column(d0 + j, j);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if constexpr (kColumns == 2) store_any(reinterpret_cast<float*>(dst[i] + d0), r[i]);
        else store_any(dst[i] + d0, r[i]);
      }
    }
    for (; d0 < dv; d0 += kLanes) {
      const std::int64_t n = min(kLanes, dv - d0);
      vec r[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) r[j] = column(min(d0 + j, dv - 1), j);  // past dv: repeated, not stored
      transpose(r);
      for (std::int64_t i = 0; i < rows; ++i) store_strided(dst[i] + d0 * inner, inner, n, r[i]);
    }
  }
  return xsimd::all((poison[0] + poison[1]) + (poison[2] + poison[3]) == vec(0.f));
}

// To the call's out, or to the query block's partial results.
inline bool store_query_block(const Head& head, const QueryBlock& q_block) {
  const std::int64_t dv = head.p.dv;
  add_compensation(q_block);
  if (q_block.partial) {
    const std::int64_t stride = partial_floats(dv);
    for (std::int64_t i = 0; i < q_block.rows; ++i) {
      q_block.partial[i * stride + dv] = q_block.neg_m[i];
      q_block.partial[i * stride + dv + 1] = q_block.l[i];
    }
    return store_output<float>([&](std::int64_t i) { return q_block.partial + i * stride; }, 1, dv, q_block, false);
  }
  return with_float_type(head.p.out_type, [&](auto element) {
    using T = decltype(element);
    const auto row_of = [out = static_cast<T*>(head.p.out), at = places_of_rows(head.p.out_stride, head),
                         row = q_block.row](std::int64_t i) { return out + at(row[i]); };
    return store_output<T>(row_of, head.p.out_stride.d, dv, q_block, true);
  });
}

// ln(sum of e^score): (m + log2 l) ln 2.
inline float lse_of(const Head& head, const Row& row, float neg_m, float l) {
  const double m = -static_cast<double>(neg_m) - static_cast<double>(alibi_shift_log2(head, row));
  return static_cast<float>((m + __builtin_log2(static_cast<double>(l))) * kLn2);
}
inline void store_lse(const Head& head, const QueryBlock& q_block) {
  if (!head.p.lse || q_block.partial) return;
  for (std::int64_t i = 0; i < q_block.rows; ++i)
    head.p.lse[row_at(head.p.lse_stride, head, q_block.row[i])] =
        lse_of(head, q_block.row[i], q_block.neg_m[i], q_block.l[i]);
}

}  // namespace rapt::cpu::RAPT_ISA
