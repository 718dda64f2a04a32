// What tests and the rapt command ask of an operation: said beside its case, by a specialisation of CaseOf.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "rapt/context.hpp"
#include "rapt/score.hpp"
#include "support/fill.hpp"
#include "support/verdict.hpp"

namespace rapt::testing {

/// CaseOf<Problem>::type owns the tensors of a problem. It has
///
///     type(problem, seed, placement, spacing)  tensors filled with reproducible values
///     args(), run(context)         views of the tensors; the call
///     outputs(), clear()           results, and poisoning them
///     protect_inputs()             makes inputs read-only where the placement allows it
///     verdict(row_step)            results against the oracle
///
/// and CaseOf has what is not inherited from CaseTraits: types(), tensor_bytes(), sizes() and rows().
template <class Problem>
struct CaseOf;

/// From one of `rows` rows to the next, of `all`. An odd step meets every position within a tile of even size.
inline std::int64_t step_over(std::int64_t all, std::int64_t rows) {
  return rows == 0 || all <= 4 * rows ? 1 : (all / rows) | 1;
}

/// A problem's alignment as arguments have it.
template <class Problem>
std::optional<Align> align_of(const Problem& problem) {
  switch (problem.align) {
    case Problem::Align::none:
      break;
    case Problem::Align::top_left:
      return Align::top_left();
    case Problem::Align::bottom_right:
      return Align::bottom_right();
    case Problem::Align::offset:
      return Align::offset(problem.align_offset);
  }
  return {};
}

/// The defaults, of an operation whose verdict() takes a step from row to row.
template <class Problem, class Case>
struct CaseTraits {
  using type = Case;
  /// A problem's own numbers by their words, for a table's columns.
  using Sizes = std::vector<std::pair<const char*, std::variant<std::int64_t, bool>>>;

  /// New inputs; every second seed leaves gaps in the tensors.
  static Case fresh(const Problem& problem, std::uint64_t seed) {
    return Case(problem, seed, Placement::heap, seed % 2 ? Spacing::dense : Spacing::gaps);
  }
  /// Inputs that are timed.
  static Case timed(const Problem& problem, std::uint64_t seed) { return Case(problem, seed); }
  /// Whether the oracle takes so long that rows are sampled.
  static bool is_large(const Problem&) { return false; }
  /// The verdict on a call that writes to poisoned outputs, from about `rows` rows; 0: from all.
  static Verdict verify(Case& inputs, const Context& context, std::int64_t rows) {
    inputs.clear();
    inputs.run(context);
    return inputs.verdict(step_over(CaseOf<Problem>::rows(inputs.problem), rows));
  }

 protected:
  /// Sizes as doubles: what does not fit memory may not fit int64 either.
  static double real(std::int64_t size) { return static_cast<double>(size); }
};

/// The worst of both.
inline void take_worst(Errors& all, const Errors& errors) {
  for (double Errors::*member :
       {&Errors::rel_frobenius, &Errors::max_abs, &Errors::max_bound, &Errors::lse_max, &Errors::lse_max_bound})
    all.*member = std::max(all.*member, errors.*member);
}

}  // namespace rapt::testing
