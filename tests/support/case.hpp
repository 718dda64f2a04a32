// The tensors of a Problem, filled with reproducible values.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "rapt/attention.hpp"
#include "rapt/problem.hpp"
#include "support/tensor.hpp"

namespace rapt::testing {

/// The types q, k, v and out may have.
inline constexpr std::array kFloatTypes = {DType::f32, DType::bf16, DType::f16};

/// The problem of `text` with q, k, v and out of `dtype`.
Problem typed(const std::string& text, DType dtype);

/// Owns every tensor that a Problem speaks of.
///
/// q, k, v and sinks are standard normal, bias likewise with about 4 % of -inf; the boolean mask has 80 % true; one row
/// in sixteen of bias and mask is masked entirely, never all of them. Slopes of alibi are 2^(-8(h+1)/hq). Key lengths
/// cover 0 and sk. Of ragged sequences one is the longest and the others share the rest evenly; ragged tensors are
/// contiguous with layout=bhsd and bshd, the order projections give. With layout=other, q, k, v and out have an inner
/// stride of 2 and unused elements between rows and heads, bias and mask between rows.
///
/// Nothing that may not be read holds a number: gaps, rows past a key length, and all outputs are poisoned.
/// Logical element n of a tensor depends on (seed, tensor, n) only, whatever the layout, and but for its rounding not
/// on the type.
struct Case {
  /// Throws Error for q, kv and out other than f32, bf16 and f16, for a bias other than f32, and for ragged totals that
  /// b sequences with that longest one cannot have.
  explicit Case(const Problem& problem, std::uint64_t seed = 1, Placement placement = Placement::heap);

  /// Views of the tensors below, and the scalars of `problem`.
  AttentionArgs args();
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the outputs again.
  void poison_outputs();

  Problem problem;
  Tensor q, k, v, out, lse, bias, mask, alibi, sinks, seqlens, cu_seqlens_q, cu_seqlens_k;
};

}  // namespace rapt::testing
