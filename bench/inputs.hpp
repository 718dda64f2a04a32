// The tensors of problems that are timed.
#pragma once

#include <cstdint>
#include <optional>

#include "rapt/problem.hpp"
#include "support/append_case.hpp"
#include "support/backward_case.hpp"
#include "support/case.hpp"
#include "support/delta_rule_backward_case.hpp"
#include "support/delta_rule_case.hpp"
#include "support/index_case.hpp"
#include "support/merge_case.hpp"
#include "support/topk_case.hpp"

namespace rapt::bench {

/// Those of testing::Case, but for caches (paged, ring, gathered or quantised keys in the layout bhsd): so that their
/// bytes are what they seem, all sequences have sk keys, pages have one owner, in random order, and every row has its
/// own scales and zeros. Lists of gathered keys are full, of different rows of a pool: by default of so many rows that
/// neighbours are seldom on one list.
testing::Case timed_inputs(const AttentionProblem& problem, std::uint64_t seed, std::optional<std::int64_t> pool = {});
/// out and lse are the library's.
inline testing::BackwardCase timed_inputs(const AttentionBackwardProblem& problem, std::uint64_t seed) {
  return {problem, timed_inputs(problem, seed, problem.pool), seed, testing::Placement::heap,
          {},      testing::BackwardCase::Forward::library};
}
inline testing::AppendCase timed_inputs(const AppendKvProblem& problem, std::uint64_t seed) {
  return testing::AppendCase(problem, seed);
}
inline testing::MergeCase timed_inputs(const MergeStatesProblem& problem, std::uint64_t seed) {
  return testing::MergeCase(problem, seed);
}
/// States are updated in place.
inline testing::DeltaRuleCase timed_inputs(const DeltaRuleProblem& problem, std::uint64_t seed) {
  return testing::DeltaRuleCase(problem, 25 * seed + 1, testing::Placement::heap, testing::Spacing::dense,
                                testing::Decays::some);
}
/// All sequences have sk keys.
inline testing::IndexScoresCase timed_inputs(const IndexScoresProblem& problem, std::uint64_t seed) {
  using Case = testing::IndexScoresCase;
  return Case(problem, seed, testing::Placement::heap, testing::Spacing::dense, Case::LengthsAre::full);
}
/// All rows are normal numbers.
inline testing::SelectTopkCase timed_inputs(const SelectTopkProblem& problem, std::uint64_t seed) {
  testing::SelectTopkCase inputs(problem, seed);
  testing::fill_normal(inputs.scores, std::mt19937_64(seed));
  return inputs;
}
/// With a gradient of the final state, and all that there are.
inline testing::DeltaRuleBackwardCase timed_inputs(const DeltaRuleBackwardProblem& problem, std::uint64_t seed) {
  return testing::DeltaRuleBackwardCase(problem, 25 * seed + 1, testing::Placement::heap, testing::Spacing::dense,
                                        testing::Decays::some);
}

}  // namespace rapt::bench
