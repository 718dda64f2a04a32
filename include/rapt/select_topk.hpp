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

/// Arguments of select_topk(). [..] stands for up to 3 dimensions.
struct SelectTopkArgs {
  TensorView scores{};          ///< f32 [.., sk]; -inf: never selected
  MutableTensorView indices{};  ///< i32 [.., n], n >= 1: positions of the n largest scores of each row, largest first
};

/// Selects the positions of the n largest scores of each row. The selection is exact and the same for any number of
/// threads: the larger score first, of equal scores the lower position; -0 equals 0, and NaN counts as the largest. If
/// fewer than n scores are above -inf, the other entries of `indices` are -1. Tensors may have any strides and
/// are on one device.
///
/// Throws Error before anything is written. Reentrant. `workspace` as for attention(). FLOPs (cost.hpp): none.
RAPT_API void select_topk(const SelectTopkArgs& args, const Context& context = default_context(),
                          std::span<std::byte> workspace = {});
/// The same, with the arguments one by one.
inline void select_topk(const TensorView& scores, const MutableTensorView& indices,
                        const Context& context = default_context()) {
  select_topk(SelectTopkArgs{scores, indices}, context);
}

/// The problem of a select_topk call: all that dispatch and planning use. Text form: "select_topk", then `key=value`
/// words: "select_topk rows=64 sk=8192 n=2048".
///
/// max_workspace_bytes() covers problems with smaller rows and sk.
struct SelectTopkProblem {
  DeviceType device = DeviceType::cpu;
  std::int64_t rows = 1;
  std::int64_t sk = 0;
  std::int64_t n = 1;

  friend bool operator==(const SelectTopkProblem&, const SelectTopkProblem&) = default;

  /// Reads the text form. Throws Error, which names an unknown, malformed or repeated word.
  RAPT_API static SelectTopkProblem parse(std::string_view text);
  /// The text form, which parse() reads.
  RAPT_API std::string to_string() const;
  /// Validates `args` in full and describes them. Throws Error.
  RAPT_API static SelectTopkProblem of(const SelectTopkArgs& args);
};

}  // namespace rapt
