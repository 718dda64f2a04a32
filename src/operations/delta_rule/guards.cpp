// Guards of delta_rule, whose states may be updated in place.
#include "guards/not_finite.hpp"
#include "operations/delta_rule/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;

template <class F>
void for_each_initial_state(const DeltaRuleArgs& a, const DeltaRuleParams& p, F f) {
  if (!a.state_slots) return f({"initial_state", a.initial_state});
  if (!a.initial_state) return;
  for (int64_t b = 0; b < p.b; ++b)
    if (const int64_t slot = initial_slot(p, b); slot >= 0) f(slice({"initial_state", a.initial_state}, 0, slot, 1));
}
// Slots that the call wrote: one of each sequence, or of each of its tokens.
template <class F>
void for_each_final_state(const DeltaRuleArgs& a, const DeltaRuleParams& p, F f) {
  if (!a.state_slots) return f({"final_state", a.final_state});
  if (!a.final_state) return;
  const bool each_token = a.state_slots.ndim == 2;
  for (int64_t b = 0; b < p.b; ++b)
    for (int64_t step = 0; step < (each_token ? std::min(p.steps, tokens_of(p, b).count) : 1); ++step)
      if (const int64_t slot = slot_of(p, b, step); slot >= 0) f(slice({"final_state", a.final_state}, 0, slot, 1));
}

std::optional<NotFinite> not_finite_result_of(const WatchedCall<DeltaRuleArgs>& w) {
  FirstNotFinite first;
  first("out", w.args.out);
  for_each_final_state(w.args, std::get<DeltaRuleParams>(w.call.params), [&](const Block& block) { first(block); });
  return first.found();
}
std::optional<NotFinite> cause_of(const WatchedCall<DeltaRuleArgs>& w, const SavedState& before) {
  FirstNotFinite first;
  const DeltaRuleArgs& a = w.args;
  first("q", a.q), first("k", a.k), first("v", a.v), first("g", a.g, true), first("beta", a.beta);
  first("a_log", a.a_log), first("dt_bias", a.dt_bias);
  if (first.found()) return first.found();
  if (!before.not_finite.empty()) return NotFinite{{"initial_state", before.not_finite}, before.value};
  if (!is_updated_in_place(w.args))
    for_each_initial_state(w.args, std::get<DeltaRuleParams>(w.call.params), [&](const Block& block) { first(block); });
  return first.found();
}

}  // namespace

void find_not_finite(const WatchedCall<DeltaRuleArgs>& w, const SavedState& before, Reports& reports) {
  if (const auto result = not_finite_result_of(w)) report(reports, *result, cause_of(w, before));
}

void find_not_finite_state(const DeltaRuleArgs& args, const DeltaRuleParams& params, SavedState& before) {
  if (!is_updated_in_place(args)) return;
  FirstNotFinite first;
  for_each_initial_state(args, params, [&](const Block& block) { first(block); });
  if (first.found()) before.not_finite = first.found()->place.index, before.value = first.found()->value;
}

const char* why_not_again(const DeltaRuleArgs& args) {
  return args.state_slots ? "pools of states are not run twice" : nullptr;
}

}  // namespace rapt
