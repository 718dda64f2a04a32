// The tensors of a DeltaRuleBackwardProblem, filled with reproducible values, and what delta_rule_backward() must make
// of them.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "operations/delta_rule/case.hpp"
#include "operations/delta_rule_backward/oracle.hpp"
#include "rapt/context.hpp"
#include "support/case_of.hpp"

namespace rapt::testing {

/// A DeltaRuleCase, whose results are there but hold nothing. dout and dfinal_state are standard normal; there is a
/// dfinal_state where the case has a final state. Every gradient that there may be is wanted, and is poisoned. It lies
/// in memory in another order than what it is of, with other gaps, now and then in another type: dense ones have that
/// of what they are of.
struct DeltaRuleBackwardCase {
  /// Throws Error as DeltaRuleCase does.
  explicit DeltaRuleBackwardCase(const DeltaRuleBackwardProblem& problem, std::uint64_t seed = 1,
                                 Placement placement = Placement::heap, Spacing spacing = Spacing::dense,
                                 std::optional<Decays> decays = {});

  DeltaRuleBackwardArgs args();
  void run(const Context& context) { delta_rule_backward(args(), context); }
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the gradients again.
  void clear();
  /// All gradients, in the order of their names in the arguments; those not wanted are empty.
  std::vector<Tensor*> gradients() { return {&dq, &dk, &dv, &dg, &dbeta, &dinitial_state, &da_log, &ddt_bias}; }
  /// Those that are wanted.
  std::vector<Tensor*> outputs();
  /// Of the last run: the worst figures of any gradient; `violation` begins with its name. No gap may have changed. The
  /// step is the oracle's.
  Verdict verdict(std::int64_t step = 1) { return verdict(oracle_delta_rule_backward(args(), step)); }
  Verdict verdict(const DeltaRuleBackwardReference& reference);

  DeltaRuleBackwardProblem problem;
  DeltaRuleCase inputs;  ///< and the forward's results
  Tensor dout, dfinal_state, dq, dk, dv, dg, dbeta, dinitial_state, da_log, ddt_bias;
};

template <>
struct CaseOf<DeltaRuleBackwardProblem> : CaseTraits<DeltaRuleBackwardProblem, DeltaRuleBackwardCase> {
  static std::vector<DType> types(const DeltaRuleBackwardProblem& problem);  ///< inputs first
  static double tensor_bytes(const DeltaRuleBackwardProblem& problem);
  static Sizes sizes(const DeltaRuleBackwardProblem& problem);
  static bool is_large(const DeltaRuleBackwardProblem& problem) {
    return CaseOf<DeltaRuleProblem>::updates(problem) > kMaxUpdates;
  }
  /// With a gradient of the final state, and all that there are.
  static DeltaRuleBackwardCase timed(const DeltaRuleBackwardProblem& problem, std::uint64_t seed) {
    return DeltaRuleBackwardCase(problem, 25 * seed + 1, Placement::heap, Spacing::dense, Decays::some);
  }
  /// If rows are sampled, all of the first and last states, and of those that share heads with them.
  static Verdict verify(DeltaRuleBackwardCase& inputs, const Context& context, std::int64_t rows);

 private:
  static constexpr double kMaxUpdates = 16 << 20;
};

/// As sample_delta_rule(), with fewer tokens, at and beside multiples of 24, and heads shared in every way.
DeltaRuleBackwardProblem sample_delta_rule_backward(std::mt19937_64& random);

}  // namespace rapt::testing
