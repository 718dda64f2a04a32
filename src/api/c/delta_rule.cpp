// delta_rule in the C interface.
#include "api/c/c_api.hpp"
#include "operations/delta_rule/operation.hpp"

using namespace rapt::c;

rapt::DeltaRuleArgs rapt::c::to_delta_rule_args(const rapt_delta_rule_args* given) {
  const rapt_delta_rule_args a = known_part(deref(given, "args"), "rapt_delta_rule_args");
  rapt::DeltaRuleArgs args;
  args.q = to_view(a.q, "q");
  args.k = to_view(a.k, "k");
  args.v = to_view(a.v, "v");
  args.g = to_view(a.g, "g");
  args.beta = to_view(a.beta, "beta");
  args.out = to_view(a.out, "out");
  args.initial_state = to_view(a.initial_state, "initial_state");
  args.final_state = to_view(a.final_state, "final_state");
  args.cu_seqlens = to_view(a.cu_seqlens, "cu_seqlens");
  args.state_slots = to_view(a.state_slots, "state_slots");
  args.accepted = to_view(a.accepted, "accepted");
  args.a_log = to_view(a.a_log, "a_log");
  args.dt_bias = to_view(a.dt_bias, "dt_bias");
  rapt::OperationOf<rapt::DeltaRuleArgs>::set_scalars(a, args);
  return args;
}

rapt_status rapt_delta_rule(const rapt_delta_rule_args* args, const rapt_context* context) noexcept {
  return rapt_delta_rule_with_workspace(args, context, nullptr, 0);
}
rapt_status rapt_delta_rule_with_workspace(const rapt_delta_rule_args* args, const rapt_context* context,
                                           void* workspace, size_t workspace_bytes) noexcept {
  return guard([&] {
    rapt::delta_rule(to_delta_rule_args(args), to_context(context), to_workspace(workspace, workspace_bytes));
  });
}
rapt_status rapt_plan_create_delta_rule(const rapt_delta_rule_args* args, const rapt_context* context,
                                        rapt_plan** plan) noexcept {
  return create_plan(to_delta_rule_args, args, context, plan);
}
rapt_status rapt_plan_run_delta_rule(const rapt_plan* plan, const rapt_delta_rule_args* args, void* workspace,
                                     size_t workspace_bytes) noexcept {
  return run_plan(plan, to_delta_rule_args, args, workspace, workspace_bytes);
}
