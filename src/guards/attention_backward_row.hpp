// A row of dq in float64, and how far a kernel may be from it by docs/contract.md.
#pragma once

#include "guards/attention_row.hpp"

namespace rapt {

class AttentionBackwardRow : private AttentionRow {
 public:
  using AttentionRow::heads;
  using AttentionRow::is_bounded;
  using AttentionRow::tokens;

  AttentionBackwardRow(const AttentionBackwardArgs& args, const Call& call, const KernelFacts& facts);

  void compute(std::int64_t token, std::int64_t q_head);
  // As AttentionRow's, of dq.
  std::optional<Result> first_off(double tolerance) const;

 private:
  const AttentionBackwardParams& b_;
  std::vector<double> dq_, dq_bound_;  // [d]
};

}  // namespace rapt
