// The tensors of a SelectTopkProblem, filled with reproducible values, and what select_topk() must make of them.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "rapt/select_topk.hpp"
#include "support/case_of.hpp"
#include "support/device.hpp"

namespace rapt::testing {

/// Positions of the n best of `scores` in the order of include/rapt/select_topk.hpp, by a stable sort of them all; -1
/// behind the last.
std::vector<std::int32_t> sorted_topk(const std::vector<float>& scores, std::int64_t n);

/// What a row of scores is like: standard normal; five different numbers; zeros of both signs but for a few; rising;
/// falling; all the same; hidden (-inf) but for one in twenty; all hidden; infinities and NaN of any sign and payload
/// among numbers; NaN but for a few.
enum class ScoreRow : std::uint8_t {
  normal,
  few_values,
  zeros,
  rising,
  falling,
  same,
  mostly_hidden,
  hidden,
  nonfinite,
  mostly_nan
};
inline constexpr std::uint64_t kScoreRows = 10;

/// Rows are of all kinds in turn, from the seed's on. The rank is 2 to 4, depending on the seed, or 1 where there is
/// one row; with gaps, so is the order of dimensions in memory. The indices are poisoned before the call.
struct SelectTopkCase {
  explicit SelectTopkCase(const SelectTopkProblem& problem, std::uint64_t seed = 1,
                          Placement placement = Placement::heap, Spacing spacing = Spacing::dense);

  SelectTopkArgs args();
  void run(const Context& context) { select_topk(args(), context); }
  void run(const Forced& context) { testing::run(args(), context); }
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the indices again.
  void clear();
  std::vector<Tensor*> outputs() { return {&indices}; }
  /// Compares every row_step-th row, and the last, with sorted_topk(): nothing may differ.
  Verdict verdict(std::int64_t row_step = 1) const;

  SelectTopkProblem problem;
  Tensor scores, indices;
};

template <>
struct CaseOf<SelectTopkProblem> : CaseTraits<SelectTopkProblem, SelectTopkCase> {
  static std::vector<DType> types(const SelectTopkProblem& problem);  ///< inputs first
  static double tensor_bytes(const SelectTopkProblem& problem);
  static Sizes sizes(const SelectTopkProblem& problem);
  static std::int64_t rows(const SelectTopkProblem& problem) { return problem.rows; }
  /// All rows are normal numbers.
  static SelectTopkCase timed(const SelectTopkProblem& problem, std::uint64_t seed);
};

/// For DeviceCallOf.
void move_tensors(SelectTopkArgs& args, DeviceTensors& tensors);

/// Up to 20 rows of as many scores, n on either side of their number.
SelectTopkProblem sample_select_topk(std::mt19937_64& random);

}  // namespace rapt::testing
