// The work in a delta_rule_backward call.
#include "operations/cost.hpp"

#include <algorithm>
#include <cstdint>

#include "operations/delta_rule_backward/operation.hpp"

namespace rapt {

Cost cost_of(const DeltaRuleBackwardArgs& args, const Call& call) {
  const auto& p = std::get<DeltaRuleBackwardProblem>(call.problem);
  const std::int64_t h = p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t;
  Cost cost;
  cost.flops = static_cast<double>(tokens * p.d * p.dv) *
               static_cast<double>(h * (has_delta(p.rule) ? 16 : 10) + 4 * std::max<std::int64_t>(p.hq - h, 0));
  cost.bytes = whole_bytes(kArgumentsOf<DeltaRuleBackwardArgs>, &args);
  return cost;
}

}  // namespace rapt
