// The problem of any operation, and its one-line text: the same text in logs, tests, bench rows and the command line.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <variant>

#include "rapt/attention_backward.hpp"
#include "rapt/attention_problem.hpp"
#include "rapt/delta_rule.hpp"
#include "rapt/delta_rule_backward.hpp"
#include "rapt/index_scores.hpp"
#include "rapt/kv_cache.hpp"
#include "rapt/merge_states.hpp"
#include "rapt/select_topk.hpp"

namespace rapt {

/// In the order of Operation.
using Problem = std::variant<AttentionProblem, AppendKvProblem, MergeStatesProblem, AttentionBackwardProblem,
                             DeltaRuleProblem, DeltaRuleBackwardProblem, IndexScoresProblem, SelectTopkProblem>;

inline Operation operation_of(const Problem& problem) noexcept {
  return static_cast<Operation>(problem.index());
}
/// Reads the text of any operation's problem: the operation's name, then `key=value` words in any order. Throws Error
/// that names the word it cannot read.
RAPT_API Problem parse_problem(std::string_view text);
RAPT_API std::string to_string(const Problem& problem);

}  // namespace rapt
