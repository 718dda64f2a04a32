// Attention over parts of the keys, merged into attention over all of them.
#pragma once

#include <span>

#include "rapt/tensor.hpp"

namespace rapt {

/// out = sum_i w_i outs[i] with w_i = exp(lses[i] - lse), lse = log(sum_i exp(lses[i])): what attention() gives for
/// disjoint sets of keys (a shared prefix and the rest, say), as if it had seen them all at once. One part or more.
///
/// out and every one of outs are [.., dv] of rank 2 to 4, f32, bf16 or f16 each, any strides; every one of lses, and
/// lse, are f32 of the same shape without dv. lse may be empty: not wanted. What is written overlaps nothing.
///
/// A part of lse -inf (a row without keys) has no weight: its output is not looked at, whatever it holds. Where every
/// part is one, out is 0 and lse -inf. An Inf in a part with keys stays, however small its weight. A NaN in lses makes
/// out and lse NaN, and +inf makes out NaN and lse +inf. A sink counts once: give it to one part only.
///
/// Sums are fp32, in the order of the parts, and out is rounded once. As lse is fp32, the weights, and so out, are off
/// by up to about |lse| * 6e-8 of themselves. Throws Error before anything is written. Reentrant.
RAPT_API void merge_states(std::span<const TensorView> outs, std::span<const TensorView> lses,
                           const MutableTensorView& out, const MutableTensorView& lse = {});

}  // namespace rapt
