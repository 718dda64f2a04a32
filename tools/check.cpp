#include "check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <span>
#include <type_traits>

#include "bench/entry.hpp"
#include "bench/sets.hpp"
#include "common.hpp"
#include "operations/attention/hard_inputs.hpp"
#include "progress.hpp"
#include "support/cases.hpp"
#include "support/entries.hpp"

namespace rapt::tools {
namespace {

constexpr std::int64_t kSampledRows = 16;

testing::Verdict verify_new(const Problem& problem, std::uint64_t seed, const Context& context) {
  return std::visit(
      [&]<class P>(const P& p) {
        using Of = testing::CaseOf<P>;
        auto inputs = Of::fresh(p, seed);
        return Of::verify(inputs, context, Of::is_large(p) ? kSampledRows : 0);
      },
      problem);
}

bool wants_lse(const Problem& problem) {
  if (const auto* attention = std::get_if<AttentionProblem>(&problem)) return attention->lse;
  const auto* merge = std::get_if<MergeStatesProblem>(&problem);
  return merge && merge->lse;
}

std::vector<Problem> problems_of(const CheckOptions& options) {
  std::vector<Problem> problems;
  for (const std::string& text : options.problems) problems.push_back(parse_problem(text));
  // Throws Error, before anything is printed.
  for (const Problem& problem : problems) make_plan(problem, make_context(options.threads, {}));
  if (problems.empty())
    for (const bench::SetLine& line : bench::check_problems()) problems.push_back(line.problem);
  return problems;
}

/// A context, and the operation that it forces an entry of.
struct Forcing {
  Context context;
  std::optional<Operation> operation;
  bool concerns(Operation other) const { return operation.value_or(other) == other; }
};

/// Prints the verdicts of all contexts over all problems, counts and keeps them.
class Report {
 public:
  Report(const std::vector<Problem>& problems, std::size_t total) : progress_(total) {
    for (const Problem& problem : problems) width_ = std::max(width_, std::min(short_text(problem).size(), kMaxWidth));
    fmt::print("{:<{}}  seed  rel. Frobenius  max error  of bound  lse error\n", "problem", width_);
  }

  void check(const Problem& problem, const Context& context, int seeds) {
    if (!begin(short_text(problem), problem, context)) return;
    for (int seed = 1; seed <= seeds; ++seed) {
      print(short_text(problem), problem, seed, with_memory(problem, context, [&] {
              return verify_new(problem, static_cast<std::uint64_t>(seed), context);
            }));
    }
  }

  void check(const testing::HardInputs& inputs, const Context& context) {
    const AttentionProblem problem = AttentionProblem::parse(inputs.problem);
    if (!begin(inputs.name, problem, context)) return;
    testing::Case c = testing::make_case(inputs);
    print(inputs.name, problem, 0, testing::CaseOf<AttentionProblem>::verify(c, context, 0));
  }

  void skip(const std::string& text, const Problem& problem, const std::string& why) {
    progress_.clear();
    fmt::print("{:<{}}     -  skipped: {}\n", text, width_, why);
    rows_.push_back({{"name", text}, {"problem", to_string(problem)}, {"skipped", why}});
    ++skipped_;
  }

  int finish(const std::string& json_path) {
    progress_.clear();
    fmt::print("{} checked, {} wrong, {} skipped; largest share of a bound {:.2f}\n", checked_, wrong_, skipped_,
               worst_);
    if (!json_path.empty()) {
      Json context = run_context(read_machine());
      context.update({{"checked", checked_}, {"wrong", wrong_}, {"skipped", skipped_}});
      write_json(json_path, {{"context", context}, {"checks", rows_}});
    }
    if (checked_ == 0) throw UsageError("nothing was checked: every problem was skipped");
    return wrong_ == 0 ? kSuccess : kFailure;
  }

 private:
  static constexpr std::size_t kMaxWidth = 70;

  /// False if the context has nothing for the problem: then says so.
  bool begin(const std::string& text, const Problem& problem, const Context& context) {
    progress_.clear();
    std::string entry;
    try {
      entry = Plan(problem, context).entry();
    } catch (const Error& refusal) {
      skip(text, problem, refusal.what());
      progress_.begin(text);
      return false;
    }
    if (entry != entry_) {
      fmt::print("{}\n", entry);
      std::fflush(stdout);  // should it crash, its name is there
    }
    entry_ = entry;
    progress_.begin(text);
    return true;
  }

  void print(const std::string& text, const Problem& problem, int seed, const testing::Verdict& verdict) {
    const testing::Errors& errors = verdict.errors;
    const bool has_lse = wants_lse(problem);
    rows_.push_back({{"name", text},
                     {"problem", to_string(problem)},
                     {"entry", entry_},
                     {"seed", seed},
                     {"rel_frobenius", number(errors.rel_frobenius)},
                     {"max_error", number(errors.max_abs)},
                     {"of_bound", number(errors.max_bound)},
                     {"lse_error", has_lse ? number(errors.lse_max) : Json(nullptr)},
                     {"lse_of_bound", has_lse ? number(errors.lse_max_bound) : Json(nullptr)},
                     {"violation", verdict.violation}});
    const std::string lse = has_lse ? fmt::format("{:.2e}", errors.lse_max) : "-";
    progress_.clear();
    fmt::print("{:<{}}  {:>4}  {:>14.2e}  {:>9.2e}  {:>8.3f}  {:>9}", text, width_, seed, errors.rel_frobenius,
               errors.max_abs, errors.max_bound, lse);
    fmt::print("{}\n", verdict.violation.empty() ? "" : "  WRONG: " + verdict.violation);
    progress_.show();
    ++checked_;
    wrong_ += verdict.violation.empty() ? 0 : 1;
    worst_ = std::max({worst_, errors.max_bound, errors.lse_max_bound});
  }

  Progress progress_;
  std::size_t width_ = 7;
  std::string entry_;
  int checked_ = 0, wrong_ = 0, skipped_ = 0;
  double worst_ = 0;
  Json rows_ = Json::array();
};

}  // namespace

int run_check(const CheckOptions& options) {
  require_writable({options.json_path});
  const std::vector<Problem> problems = problems_of(options);
  std::vector<Forcing> contexts;
  if (options.entry.empty()) contexts.push_back({make_context(options.threads, {}), {}});
  else
    for (const std::string& name : match_entries(options.entry))
      contexts.push_back({make_context(options.threads, name), bench::info_of(name).operation});
  std::span<const testing::HardInputs> hard;
  if (options.problems.empty()) hard = testing::hard_inputs();
  const auto contexts_for = [&](Operation operation) {
    const auto concerned = [&](const Forcing& forcing) { return forcing.concerns(operation); };
    return static_cast<std::size_t>(std::count_if(contexts.begin(), contexts.end(), concerned));
  };
  std::size_t total = contexts_for(Operation::attention) * hard.size();
  for (const Problem& problem : problems) total += contexts_for(operation_of(problem));
  if (total == 0) throw UsageError(fmt::format("--entry {}: no problem is of its operation", options.entry));
  Report report(problems, total);
  // --entry chooses among rapt's own list of problems; those that were given are not dropped without a word.
  for (const Problem& problem : problems)
    if (!options.problems.empty() && contexts_for(operation_of(problem)) == 0)
      report.skip(short_text(problem), problem, no_entry_of(options.entry, operation_of(problem)));
  for (const Forcing& forcing : contexts) {
    for (const Problem& problem : problems)
      if (forcing.concerns(operation_of(problem))) report.check(problem, forcing.context, options.seeds);
    for (const testing::HardInputs& inputs : hard)
      if (forcing.concerns(Operation::attention)) report.check(inputs, forcing.context);
  }
  return report.finish(options.json_path);
}

}  // namespace rapt::tools
