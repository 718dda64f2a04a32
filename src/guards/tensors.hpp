// The tensors of a call, by the names that errors have for them, and their elements.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/elements.hpp"
#include "operations/all.hpp"

namespace rapt {

using Index = std::array<std::int64_t, kMaxDims>;

// The results of a call; those that were not asked for are empty.
struct ResultView {
  const char* name;
  MutableTensorView* view;
};
using Results = std::vector<ResultView>;

// Whether an argument of the table is one.
inline bool is_result(const Argument& argument) {
  return argument.is_written && !argument.step;
}
template <class Args>
Results results_of(Args& args) {
  Results results;
  for (const Argument& a : OperationOf<Args>::arguments.arguments)
    if (is_result(a))
      results.push_back(
          {a.name, const_cast<MutableTensorView*>(reinterpret_cast<const MutableTensorView*>(a.get(&args, 0)))});
  return results;
}

inline bool is_updated_in_place(const DeltaRuleArgs& a) {
  return a.initial_state && a.final_state && a.initial_state.data == a.final_state.data;
}

// A tensor, or a block of one that begins at `first`.
struct Block {
  std::string name;
  TensorView view;
  bool allows_minus_infinity = false;  // -inf counts as finite
  Index first{};
};

inline std::vector<std::int64_t> to_vector(const Index& index, int ndim) {
  return {index.begin(), index.begin() + ndim};
}

// The part of `t` that has n elements of dimension `dim` from `begin` on.
inline Block slice(Block block, std::size_t dim, std::int64_t begin, std::int64_t n) {
  TensorView& t = block.view;
  t.data = static_cast<const std::byte*>(t.data) + begin * t.strides[dim] * static_cast<std::int64_t>(size_of(t.dtype));
  t.shape[dim] = n;
  block.first[dim] += begin;
  return block;
}

// How many numbers a row of the last dimension of `t` has; a byte of i4x2 has two.
inline std::int64_t numbers_of_row(const TensorView& t) {
  return t.shape[static_cast<std::size_t>(t.ndim - 1)] * (t.dtype == DType::i4x2 ? 2 : 1);
}

// Calls f(row, index) for every row of the last dimension, in order, until it gives true: `index` is that of the row's
// first element.
template <class F>
bool any_row(const TensorView& t, F f) {
  const auto last = static_cast<std::size_t>(t.ndim - 1);
  for (std::size_t i = 0; i <= last; ++i)
    if (t.shape[i] == 0) return false;
  const auto element = static_cast<std::int64_t>(size_of(t.dtype));
  Index index{};
  for (;;) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < last; ++i) offset += index[i] * t.strides[i];
    if (f(static_cast<const std::byte*>(t.data) + offset * element, index)) return true;
    std::size_t dim = last;
    while (dim > 0 && ++index[dim - 1] == t.shape[dim - 1]) index[--dim] = 0;
    if (dim == 0) return false;
  }
}

inline bool is_not_finite(float x, bool allows_minus_infinity) {
  return !std::isfinite(x) && !(allows_minus_infinity && x < 0);
}

}  // namespace rapt
