// Attention over disjoint sets of keys, merged into attention over all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/context.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

struct MergeStatesArgs {
  std::span<const TensorView> outs{};  ///< f32, bf16 or f16 [.., dv], of rank 2 to 4: attention over some of the keys
  std::span<const TensorView> lses{};  ///< f32 [..], as many
  MutableTensorView out{};             ///< f32, bf16 or f16 [.., dv]
  MutableTensorView lse{};             ///< optional f32 [..]
};

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
/// by up to about |lse| * 6e-8 of themselves. All tensors are on one device. Throws Error before anything is written.
/// Reentrant. Bits do not depend on threads. `workspace` as for attention().
/// FLOPs (cost.hpp): those of the weighted sums.
RAPT_API void merge_states(const MergeStatesArgs& args, const Context& context = default_context(),
                           std::span<std::byte> workspace = {});
inline void merge_states(std::span<const TensorView> outs, std::span<const TensorView> lses,
                         const MutableTensorView& out, const MutableTensorView& lse = {},
                         const Context& context = default_context()) {
  merge_states(MergeStatesArgs{outs, lses, out, lse}, context);
}

/// What dispatch and planning see of a merge_states call. Text form: "merge_states", then `key=value` words in the
/// order of the fields below; words at their default are left out: "merge_states rows=256 dv=128 count=4 lse".
///
/// max_workspace_bytes() holds for problems with smaller rows, count.
struct MergeStatesProblem {
  DType dtype = DType::f32;      ///< of outs[0]; text: dtype= for both this and the next
  DType out_dtype = DType::f32;  ///< text: out=
  DeviceType device = DeviceType::cpu;
  std::int64_t rows = 1;
  std::int64_t dv = 0;
  std::int64_t count = 1;  ///< of states
  bool lse = false;

  friend bool operator==(const MergeStatesProblem&, const MergeStatesProblem&) = default;

  /// Throws Error naming the word it cannot read or has read before.
  RAPT_API static MergeStatesProblem parse(std::string_view text);
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static MergeStatesProblem of(const MergeStatesArgs& args);
};

}  // namespace rapt
