// A row's share of the gradients of its head's sink and slope: its index, and the sink's probability.
#pragma once

#include "cpu/kernels/kernels.hpp"
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

}  // namespace rapt::cpu::RAPT_ISA
