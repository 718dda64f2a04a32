#include "operations/delta_rule_backward/case.hpp"
#include "support/random.hpp"

namespace rapt::testing {

DeltaRuleBackwardProblem sample_delta_rule_backward(Random& random) {
  DeltaRuleBackwardProblem p;
  static_cast<DeltaRuleProblem&>(p) = sample_delta_rule(random);
  p.slots = false, p.steps = 0;
  if (one_in(random, 4)) p.hq = 2, p.hk = 3, p.hv = 6;  // neither sharing is a part of the other
  p.t = one_in(random, 2) ? pick(random, {0, 1, 2, 23, 24, 25, 47, 48, 49, 72}) : between(random, 1, 100);
  while (p.b * p.state_heads() * p.t * p.d * p.dv > std::int64_t{1} << 19 && p.t > 1) p.t = (p.t + 1) / 2;
  if (p.ragged >= 0) p.ragged = total(random, p.b, p.t);
  return p;
}

}  // namespace rapt::testing
