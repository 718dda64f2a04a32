// Guards of delta_rule_backward.
#include "guards/not_finite.hpp"
#include "operations/delta_rule_backward/operation.hpp"

namespace rapt {

void find_not_finite(const WatchedCall<DeltaRuleBackwardArgs>& w, const SavedState&, Reports& reports) {
  if (const auto result = not_finite_result(w.args)) report(reports, *result, not_finite_input(w.args));
}

const char* why_not_again(const DeltaRuleBackwardArgs&) {
  return nullptr;
}

}  // namespace rapt
