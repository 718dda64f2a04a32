// attention_backward in the C interface.
#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;

rapt::AttentionBackwardArgs to_args(const rapt_attention_backward_args* given) {
  const rapt_attention_backward_args a = known_part(deref(given, "args"), "rapt_attention_backward_args");
  const rapt::AttentionArgs forward = to_attention_args(&deref(a.forward, "forward"));
  if (forward.q_scale)
    throw rapt::Error("q_scale", "scales of queries", "queries of f32, bf16 or f16, which have none");
  rapt::AttentionBackwardArgs args;
  args.q = forward.q;
  args.kv = forward.kv;
  args.out = forward.out;
  args.lse = forward.lse;
  args.score = forward.score;
  args.cu_seqlens_q = forward.cu_seqlens_q;
  args.dout = to_view(a.dout, "dout");
  args.dlse = to_view(a.dlse, "dlse");
  args.dq = to_view(a.dq, "dq");
  args.dk = to_view(a.dk, "dk");
  args.dv = to_view(a.dv, "dv");
  args.dbias = to_view(a.dbias, "dbias");
  args.dsinks = to_view(a.dsinks, "dsinks");
  args.dalibi = to_view(a.dalibi, "dalibi");
  return args;
}

}  // namespace

rapt_status rapt_attention_backward(const rapt_attention_backward_args* args, const rapt_context* context) noexcept {
  return rapt_attention_backward_with_workspace(args, context, nullptr, 0);
}
rapt_status rapt_attention_backward_with_workspace(const rapt_attention_backward_args* args,
                                                   const rapt_context* context, void* workspace,
                                                   size_t workspace_bytes) noexcept {
  return guard(
      [&] { rapt::attention_backward(to_args(args), to_context(context), to_workspace(workspace, workspace_bytes)); });
}
rapt_status rapt_plan_create_attention_backward(const rapt_attention_backward_args* args, const rapt_context* context,
                                                rapt_plan** plan) noexcept {
  return create_plan(to_args, args, context, plan);
}
rapt_status rapt_plan_run_attention_backward(const rapt_plan* plan, const rapt_attention_backward_args* args,
                                             void* workspace, size_t workspace_bytes) noexcept {
  return run_plan(plan, to_args, args, workspace, workspace_bytes);
}
