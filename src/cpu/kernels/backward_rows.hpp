// Single rows: a row's share of the gradients of its head's sink and slope (its index, and the sink's probability), and
// whether it attends to one value.
#pragma once

#include "cpu/kernels/attention_backward_table.hpp"
#include "cpu/tile/head.hpp"

namespace rapt::cpu::RAPT_ISA {

// The row's index in BackwardItem::sink_sums and slope_sums.
inline std::int64_t row_sum_at(const AttentionBackwardParams& p, std::int64_t b, const Head& head, const Row& row) {
  return p.total_q < 0 ? (b * p.hq + row.q_head) * p.sq + row.token : row.q_head * p.total_q + head.q_first + row.token;
}

// The probability that the row's softmax gives to its sink.
inline double sink_weight(const AttentionBackwardParams& p, const Head& head, const Row& row) {
  const float sink = number_at(p.score.sinks, p.score.sinks_type, row.q_head * p.score.sinks_stride);
  const double exponent = static_cast<double>(sink) - static_cast<double>(p.lse[row_at(p.lse_stride, head, row)]);
  return sink == -kInfinity ? 0 : __builtin_exp(exponent > 0 ? 0 : exponent);
}

// Whether the row sees one key and no sink, and its out is that key's value, of one type, but for fp32's rounding. Then
// dP is equal to dO . O, and their difference would be nothing but the rounding of two sums in different orders. In
// ring attention, whose out is an average over more keys than the call has, out is no such value.
inline bool attends_one_value(const AttentionBackwardParams& p, const Head& head, const Row& row) {
  if (row.last - row.first != 1 || p.score.sinks || p.out_type != p.kv_type) return false;
  return with_float_type(p.out_type, [&](auto element) {
    using T = decltype(element);
    const T* v = static_cast<const T*>(p.v) + head.key_at(p.v_stride, row.first);
    const T* out = static_cast<const T*>(p.out) + row_at(p.out_stride, head, row);
    bool alike = true;
    for (std::int64_t c = 0; c < p.dv; c += kLanes) {
      const std::int64_t n = min(kLanes, p.dv - c);
      const vec want = load_strided(v + c * p.v_stride.d, p.v_stride.d, n);
      const vec got = load_strided(out + c * p.out_stride.d, p.out_stride.d, n);
      alike = alike && xsimd::all(xsimd::abs(got - want) <= vec(0x1p-22f) * xsimd::abs(want));
    }
    return alike;
  });
}

}  // namespace rapt::cpu::RAPT_ISA
