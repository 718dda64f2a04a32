// Results against the float64 oracle.
#pragma once

#include <string>
#include <vector>

#include "rapt/rapt.hpp"
#include "support/append_case.hpp"
#include "support/backward_case.hpp"
#include "support/case.hpp"
#include "support/delta_rule_backward_case.hpp"
#include "support/delta_rule_case.hpp"
#include "support/index_case.hpp"
#include "support/merge_case.hpp"
#include "support/topk_case.hpp"
#include "support/verdict.hpp"

namespace rapt::tools {

struct CheckOptions {
  std::vector<std::string> problems;  ///< empty: a list that covers the features
  std::string entry;                  ///< a name or a part of one; empty: dispatch's choice
  int seeds = 1;                      ///< random inputs per problem
  int threads = 0;                    ///< 0: all
  std::string json_path;              ///< empty: no file
};

/// Prints one line per problem, entry and seed. Returns kFailure when a result is out of bounds.
int run_check(const CheckOptions& options);

/// Runs the operation on poisoned outputs and compares with the oracle about `rows` rows of each head, of each sequence
/// (append_kv), or of all there are (merge_states, index_scores, select_topk), spread over them; 0: all.
testing::Verdict verify(testing::Case& inputs, const Context& context, std::int64_t rows);
testing::Verdict verify(testing::AppendCase& inputs, const Context& context, std::int64_t rows);
testing::Verdict verify(testing::MergeCase& inputs, const Context& context, std::int64_t rows);
testing::Verdict verify(testing::IndexScoresCase& inputs, const Context& context, std::int64_t rows);
testing::Verdict verify(testing::SelectTopkCase& inputs, const Context& context, std::int64_t rows);
/// About `rows` columns of the first and last states.
testing::Verdict verify(testing::DeltaRuleCase& inputs, const Context& context, std::int64_t rows);
/// All of the first and last states, and of those that share heads with them, if rows are sampled.
testing::Verdict verify(testing::DeltaRuleBackwardCase& inputs, const Context& context, std::int64_t rows);
/// Of some heads only, and of dq, dk and dv, if rows are sampled.
testing::Verdict verify(testing::BackwardCase& inputs, const Context& context, std::int64_t rows);

}  // namespace rapt::tools
