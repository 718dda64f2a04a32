// select_topk in the C interface.
#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;

rapt::SelectTopkArgs to_args(const rapt_select_topk_args* given) {
  const rapt_select_topk_args a = known_part(deref(given, "args"), "rapt_select_topk_args");
  return {to_view(a.scores, "scores"), to_view(a.indices, "indices")};
}

}  // namespace

rapt_status rapt_select_topk(const rapt_select_topk_args* args, const rapt_context* context) noexcept {
  return rapt_select_topk_with_workspace(args, context, nullptr, 0);
}
rapt_status rapt_select_topk_with_workspace(const rapt_select_topk_args* args, const rapt_context* context,
                                            void* workspace, size_t workspace_bytes) noexcept {
  return guard(
      [&] { rapt::select_topk(to_args(args), to_context(context), to_workspace(workspace, workspace_bytes)); });
}
rapt_status rapt_plan_create_select_topk(const rapt_select_topk_args* args, const rapt_context* context,
                                         rapt_plan** plan) noexcept {
  return create_plan(to_args, args, context, plan);
}
rapt_status rapt_plan_run_select_topk(const rapt_plan* plan, const rapt_select_topk_args* args, void* workspace,
                                      size_t workspace_bytes) noexcept {
  return run_plan(plan, to_args, args, workspace, workspace_bytes);
}
