// The tensors of a MergeStatesProblem, filled with reproducible values, and what merge_states() must make of them.
#pragma once

#include <cstdint>
#include <vector>

#include "rapt/merge_states.hpp"
#include "support/case_of.hpp"
#include "support/device.hpp"

namespace rapt::testing {

/// Outputs of the states are standard normal, their lses within a few units of each other around 0, 1000 or -1000. One
/// state in eight of a row has seen no key and holds poison; of one row in sixteen that is every state. The rank is 2
/// to 4, depending on the seed. With gaps, states after the first are of other types, too.
struct MergeCase {
  explicit MergeCase(const MergeStatesProblem& problem, std::uint64_t seed = 1, Placement placement = Placement::heap,
                     Spacing spacing = Spacing::dense);

  /// Views of the tensors below, valid until it is called again.
  MergeStatesArgs args();
  void run(const Context& context) { merge_states(args(), context); }
  void run(const Forced& context) { testing::run(args(), context); }
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the outputs again.
  void clear();
  std::vector<Tensor*> outputs() { return {&out, &lse}; }
  /// Compares every row_step-th row, and the last, with float64. What elements may be off by is what
  /// include/rapt/merge_states.hpp says: |lse| 2^-24 of sum_i w_i |outs_i|, count + 2 roundings of it to fp32, and the
  /// rounding of out.
  Verdict verdict(std::int64_t row_step = 1) const;

  MergeStatesProblem problem;
  std::vector<Tensor> outs, lses;
  Tensor out, lse;

 private:
  std::vector<TensorView> out_views_, lse_views_;
};

template <>
struct CaseOf<MergeStatesProblem> : CaseTraits<MergeStatesProblem, MergeCase> {
  static std::vector<DType> types(const MergeStatesProblem& problem);  ///< inputs first
  static double tensor_bytes(const MergeStatesProblem& problem);
  static Sizes sizes(const MergeStatesProblem& problem);
  static std::int64_t rows(const MergeStatesProblem& problem) { return problem.rows; }
};

/// For DeviceCallOf.
void move_tensors(MergeStatesArgs& args, DeviceTensors& tensors);

}  // namespace rapt::testing
