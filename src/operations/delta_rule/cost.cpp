// The work in a delta_rule call.
#include "operations/cost.hpp"

#include <algorithm>
#include <cstdint>

#include "operations/delta_rule/inputs.hpp"

namespace rapt {

Cost cost_of(const DeltaRuleArgs& args, const Call& call) {
  const auto& p = std::get<DeltaRuleProblem>(call.problem);
  const auto& params = std::get<DeltaRuleParams>(call.params);
  const std::int64_t h = p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t, outs = std::max(p.hq, h);
  const double state = static_cast<double>(p.d) * static_cast<double>(p.dv);
  Cost cost;
  cost.flops = static_cast<double>(tokens) * state *
               (static_cast<double>(h) * (has_delta(p.rule) ? 4 : 2) + static_cast<double>(outs) * 2);
  for (const TensorView* t : {&args.q, &args.k, &args.v, &args.g, &args.beta}) cost.bytes += whole_bytes(*t);
  cost.bytes += whole_bytes(args.out);
  if (!args.initial_state && !args.final_state) return cost;
  // Of a pool, the states that slots name: of a sequence one that it starts from, and the last or each token's.
  std::int64_t initial = 0, final = 0;
  for (std::int64_t b = 0; b < p.b; ++b) {
    initial += initial_slot(params, b) >= 0;
    for (std::int64_t i = 0; i < (p.steps > 0 ? tokens_of(params, b).count : 1); ++i)
      final += slot_of(params, b, i) >= 0;
  }
  const auto bytes = [&](const TensorView& t, std::int64_t states) {
    return t ? state * static_cast<double>(states * h) * bytes_of(t.dtype) : 0;
  };
  cost.bytes += bytes(args.initial_state, initial) + bytes(args.final_state, final);
  return cost;
}

}  // namespace rapt
