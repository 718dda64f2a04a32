#include "support/entries.hpp"

#include <sstream>
#include <stdexcept>

namespace rapt::testing {

std::vector<std::string> usable_entries(const Problem& problem) {
  std::vector<std::string> names;
  for (const EntryInfo& entry : entries()) {
    if (!entry.unusable.empty()) continue;
    try {
      names.emplace_back(Plan(problem, forced(entry.name)).entry());
    } catch (const Error&) {
      // Takes other types, or would need too much memory.
    }
  }
  if (names.empty()) throw std::logic_error("no entry takes " + problem.to_string());
  return names;
}

std::vector<std::string> usable_entries() {
  return usable_entries(Problem::parse("attention sq=1 d=1"));
}

Tier tier_of(std::string_view entry) {
  return entry.find(".f32x3.") == std::string_view::npos ? Tier::exact : Tier::f32x3;
}

Context forced(const std::string& entry) {
  return forced(entry, serial_executor(), 1);
}

Context forced(const std::string& entry, std::shared_ptr<Executor> executor, int threads) {
  ContextOptions options;
  options.executor = std::move(executor);
  options.threads = threads;
  options.kernel = entry;
  return Context(std::move(options));
}

Errors run_and_compare(Case& c, const Context& context, const Reference& reference) {
  c.poison_outputs();
  const AttentionArgs args = c.args();
  attention(args, context);
  return compare(args, reference);
}

Errors run_and_compare(Case& c, const std::string& entry, const Reference& reference) {
  c.poison_outputs();
  const AttentionArgs args = c.args();
  attention(args, forced(entry));
  return compare(args, reference, tier_of(entry));
}

std::string describe(const Errors& e) {
  std::ostringstream text;
  text << "rel_frobenius=" << e.rel_frobenius << " (limit " << e.frobenius_limit << ") max_abs=" << e.max_abs
       << " (limit " << e.max_abs_limit << ") of_bound=" << e.max_bound << " lse_max=" << e.lse_max
       << " lse_of_bound=" << e.lse_max_bound << " nonfinite_agree=" << e.nonfinite_agree;
  return text.str();
}

}  // namespace rapt::testing
