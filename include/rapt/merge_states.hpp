// Merging attention over disjoint sets of keys into attention over all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/context.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// Arguments of merge_states(). [..] stands for 1 to 3 dimensions, the same for all tensors.
struct MergeStatesArgs {
  std::span<const TensorView>
      outs{};  ///< f32, bf16 or f16 [.., dv], each independently: attention over some of the keys; at least one
  std::span<const TensorView> lses{};  ///< f32 [..], one for each of outs
  MutableTensorView out{};             ///< f32, bf16 or f16 [.., dv]; overlaps no other tensor
  MutableTensorView lse{};             ///< optional f32 [..]; overlaps no other tensor
};

/// Merges attention over disjoint sets of keys, such as a shared prefix and the rest, into attention over all of them:
/// out = sum_i w_i outs[i] with w_i = exp(lses[i] - lse), and lse = log(sum_i exp(lses[i])). outs and lses are results
/// of attention(). Tensors may have any strides.
///
/// A partial result with an lse of -inf (a row without keys) has no weight, and its output is ignored. If all have an
/// lse of -inf, out is 0 and lse -inf. An Inf in a partial result with keys propagates, however small its weight. A NaN
/// in lses makes out and lse NaN, and +inf makes out NaN and lse +inf. Give a sink to one partial result only.
///
/// Sums are fp32, in the order of the partial results, and out is rounded once. lse is fp32, so the weights, and with
/// them out, have a relative error of up to about |lse| * 6e-8. All tensors are on one device. Throws Error before
/// anything is written. Reentrant. The bits do not depend on threads. `workspace` as for attention(). FLOPs (cost.hpp):
/// the weighted sums.
RAPT_API void merge_states(const MergeStatesArgs& args, const Context& context = default_context(),
                           std::span<std::byte> workspace = {});
/// The same, with the arguments one by one.
inline void merge_states(std::span<const TensorView> outs, std::span<const TensorView> lses,
                         const MutableTensorView& out, const MutableTensorView& lse = {},
                         const Context& context = default_context()) {
  merge_states(MergeStatesArgs{outs, lses, out, lse}, context);
}

/// The problem of a merge_states call: all that dispatch and planning use. Text form: "merge_states", then `key=value`
/// words in the order of the fields below. Words at their default are omitted: "merge_states rows=256 dv=128 count=4
/// lse".
///
/// max_workspace_bytes() covers problems with smaller rows and count.
struct MergeStatesProblem {
  DType dtype = DType::f32;      ///< of outs[0]; text: dtype=, for out, too
  DType out_dtype = DType::f32;  ///< text: out=
  DeviceType device = DeviceType::cpu;
  std::int64_t rows = 1;
  std::int64_t dv = 0;
  std::int64_t count = 1;  ///< number of partial results
  bool lse = false;

  friend bool operator==(const MergeStatesProblem&, const MergeStatesProblem&) = default;

  /// Reads the text form. Throws Error, which names an unknown, malformed or repeated word.
  RAPT_API static MergeStatesProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static MergeStatesProblem of(const MergeStatesArgs& args);
};

}  // namespace rapt
