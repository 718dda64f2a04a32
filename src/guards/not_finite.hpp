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

inline std::optional<NotFinite> first_not_finite_in(const Block& block) {
  const std::optional<Found> found = first_not_finite(block);
  if (!found) return {};
  return NotFinite{{block.name, to_vector(found->index, block.view.ndim)}, static_cast<double>(found->value)};
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
std::optional<NotFinite> nonfinite_result(const Args& args) {
  FirstNotFinite first;
  for (const Argument& a : OperationOf<Args>::arguments.arguments)
    if (is_result(a)) first(a, &args);
  return first.found();
}

// Of operations that read all of their inputs: the first of them, in the order of the table.
template <class Args>
std::optional<NotFinite> nonfinite_input(const Args& args) {
  constexpr DTypeSet kMayBeNan = kFloatTypes | kFp8Types;
  FirstNotFinite first;
  for (const Argument& a : OperationOf<Args>::arguments.arguments)
    if (!a.step && !a.is_written && !a.is_unchecked && (a.types & kMayBeNan)) first(a, &args);
  return first.found();
}

}  // namespace rapt
