// delta_rule_backward in the C interface.
#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;

rapt::DeltaRuleBackwardArgs to_args(const rapt_delta_rule_backward_args* given) {
  const rapt_delta_rule_backward_args a = known_part(deref(given, "args"), "rapt_delta_rule_backward_args");
  rapt::DeltaRuleBackwardArgs args;
  args.forward = to_delta_rule_args(&deref(a.forward, "forward"));
  args.dout = to_view(a.dout, "dout");
  args.dfinal_state = to_view(a.dfinal_state, "dfinal_state");
  args.dq = to_view(a.dq, "dq");
  args.dk = to_view(a.dk, "dk");
  args.dv = to_view(a.dv, "dv");
  args.dg = to_view(a.dg, "dg");
  args.dbeta = to_view(a.dbeta, "dbeta");
  args.dinitial_state = to_view(a.dinitial_state, "dinitial_state");
  args.da_log = to_view(a.da_log, "da_log");
  args.ddt_bias = to_view(a.ddt_bias, "ddt_bias");
  return args;
}

}  // namespace

rapt_status rapt_delta_rule_backward(const rapt_delta_rule_backward_args* args, const rapt_context* context) noexcept {
  return rapt_delta_rule_backward_with_workspace(args, context, nullptr, 0);
}
rapt_status rapt_delta_rule_backward_with_workspace(const rapt_delta_rule_backward_args* args,
                                                    const rapt_context* context, void* workspace,
                                                    size_t workspace_bytes) noexcept {
  return guard(
      [&] { rapt::delta_rule_backward(to_args(args), to_context(context), to_workspace(workspace, workspace_bytes)); });
}
rapt_status rapt_plan_create_delta_rule_backward(const rapt_delta_rule_backward_args* args, const rapt_context* context,
                                                 rapt_plan** plan) noexcept {
  return create_plan(to_args, args, context, plan);
}
rapt_status rapt_plan_run_delta_rule_backward(const rapt_plan* plan, const rapt_delta_rule_backward_args* args,
                                              void* workspace, size_t workspace_bytes) noexcept {
  return run_plan(plan, to_args, args, workspace, workspace_bytes);
}
