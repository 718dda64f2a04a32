// The work in a delta_rule call.
#include "operations/cost.hpp"

#include <algorithm>
#include <cstdint>

namespace rapt {

Cost cost_of(const DeltaRuleArgs& args, const Call& call) {
  const auto& p = std::get<DeltaRuleProblem>(call.problem);
  const bool has_delta = p.rule == UpdateRule::delta || p.rule == UpdateRule::gated_delta;
  const std::int64_t h = p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t, outs = std::max(p.hq, h);
  const double state = static_cast<double>(p.d) * static_cast<double>(p.dv);
  Cost cost;
  cost.flops = static_cast<double>(tokens) * state *
               (static_cast<double>(h) * (has_delta ? 4 : 2) + static_cast<double>(outs) * 2);
  for (const TensorView* t : {&args.q, &args.k, &args.v, &args.g, &args.beta}) cost.bytes += whole_bytes(*t);
  cost.bytes += whole_bytes(args.out);
  // Of a pool, the states that slots name.
  const double elements = state * static_cast<double>(p.b * h);
  if (args.initial_state) cost.bytes += elements * bytes_of(args.initial_state.dtype);
  if (args.final_state)
    cost.bytes += elements * bytes_of(args.final_state.dtype) * static_cast<double>(p.steps > 0 ? p.t : 1);
  return cost;
}

}  // namespace rapt
