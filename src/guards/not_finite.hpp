// What guards of operations look for: the first result that is not finite, and what of the inputs made it so.
//
// What a call hides from its results (masked keys, padding, rows past a length) may hold anything, so that results are
// looked at first.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "guards/guards.hpp"
#include "guards/tensors.hpp"

namespace rapt {

struct NotFinite {
  GuardReport::Place place;
  double value;
};

// The first element that is not finite.
inline std::optional<NotFinite> first_not_finite_in(const Block& block) {
  const TensorView& t = block.view;
  std::optional<NotFinite> found;
  if (!t) return found;
  const std::int64_t n = numbers_of_row(t), step = t.strides[static_cast<std::size_t>(t.ndim - 1)];
  with_constant(t.dtype, [&](auto dtype) {
    any_row(t, [&](const void* row, Index index) {
      for (std::int64_t i = 0; i < n; ++i) {
        const float x = element_of(row, dtype, step, i);
        if (!is_not_finite(x, block.allows_minus_infinity)) continue;
        index[static_cast<std::size_t>(t.ndim - 1)] = i;
        for (std::size_t dim = 0; dim < index.size(); ++dim) index[dim] += block.first[dim];
        found = NotFinite{{block.name, to_vector(index, t.ndim)}, static_cast<double>(x)};
        return true;
      }
      return false;
    });
  });
  return found;
}

// The first of several blocks, as they come to it.
class FirstNotFinite {
 public:
  void operator()(const Block& block) {
    if (!found_) found_ = first_not_finite_in(block);
  }
  void operator()(std::string name, const TensorView& view, bool allows_minus_infinity = false) {
    (*this)(Block{std::move(name), view, allows_minus_infinity, {}});
  }
  // Every tensor of an argument.
  void operator()(const Argument& a, const void* args) {
    for (std::size_t i = 0; i < a.count_in(args); ++i) (*this)(a.name_of(i), *a.get(args, i), a.allows_minus_infinity);
  }
  const std::optional<NotFinite>& found() const { return found_; }

 private:
  std::optional<NotFinite> found_;
};

inline void report(Reports& reports, const NotFinite& result, const std::optional<NotFinite>& cause) {
  if (cause) reports.add(GuardReport::Guard::nan, cause->place, cause->value, 0, 0, result.place);
  else reports.add(GuardReport::Guard::nan, result.place, result.value);
}

// Of operations whose results show what went wrong, whatever it was.
template <class Args>
std::optional<NotFinite> not_finite_result(const Args& args) {
  FirstNotFinite first;
  for (const Argument& a : OperationOf<Args>::arguments.arguments)
    if (is_result(a)) first(a, &args);
  return first.found();
}

// Of operations that read all of their inputs: the first of them, in the order of the table.
template <class Args>
std::optional<NotFinite> not_finite_input(const Args& args) {
  constexpr DTypeSet kMayBeNan = kFloatTypes | kFp8Types;
  FirstNotFinite first;
  for (const Argument& a : OperationOf<Args>::arguments.arguments)
    if (!a.step && !a.is_written && !a.is_unchecked && (a.types & kMayBeNan)) first(a, &args);
  return first.found();
}

}  // namespace rapt
