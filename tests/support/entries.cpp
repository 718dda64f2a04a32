#include "support/entries.hpp"

#include <sstream>

namespace rapt::testing {

std::vector<std::string> usable_entries() {
  std::vector<std::string> names;
  for (const EntryInfo& entry : entries()) {
    if (entry.unusable.empty() && entry.name.find(".f32.") != std::string::npos) names.push_back(entry.name);
  }
  return names;
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

std::string describe(const Errors& e) {
  std::ostringstream text;
  text << "rel_frobenius=" << e.rel_frobenius << " (limit " << e.frobenius_limit << ") max_abs=" << e.max_abs
       << " of_bound=" << e.max_bound << " lse_max=" << e.lse_max << " lse_of_bound=" << e.lse_max_bound
       << " nonfinite_agree=" << e.nonfinite_agree;
  return text.str();
}

}  // namespace rapt::testing
