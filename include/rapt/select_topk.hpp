// The positions of the largest scores of each row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "rapt/context.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

struct SelectTopkArgs {
  TensorView scores{};          ///< f32 [.., sk], of rank 1 to 4; -inf: not to be selected
  MutableTensorView indices{};  ///< i32 [.., n], n >= 1: positions of the n largest scores of each row, largest first
};

/// Exact, and the same whatever the threads: the larger score first, of equal ones the lower position; -0 equals 0, and
/// NaN counts as the largest. Where fewer than n are above -inf the rest of `indices` is -1. Any strides.
///
/// Throws Error before anything is written. Reentrant. `workspace` as for attention().
/// FLOPs (cost.hpp): none.
RAPT_API void select_topk(const SelectTopkArgs& args, const Context& context = default_context(),
                          std::span<std::byte> workspace = {});
inline void select_topk(const TensorView& scores, const MutableTensorView& indices,
                        const Context& context = default_context()) {
  select_topk(SelectTopkArgs{scores, indices}, context);
}

/// What dispatch and planning see of a select_topk call. Text form: "select_topk", then `key=value` words:
/// "select_topk rows=64 sk=8192 n=2048".
///
/// max_workspace_bytes() holds for problems with smaller rows, sk.
struct SelectTopkProblem {
  std::int64_t rows = 1;
  std::int64_t sk = 0;
  std::int64_t n = 1;

  friend bool operator==(const SelectTopkProblem&, const SelectTopkProblem&) = default;

  /// Throws Error naming the word it cannot read or has read before.
  RAPT_API static SelectTopkProblem parse(std::string_view text);
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static SelectTopkProblem of(const SelectTopkArgs& args);
};

}  // namespace rapt
