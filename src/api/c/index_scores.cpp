// index_scores in the C interface.
#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;

rapt::IndexScoresArgs to_args(const rapt_index_scores_args* given) {
  const rapt_index_scores_args a = known_part(deref(given, "args"), "rapt_index_scores_args");
  rapt::IndexScoresArgs args;
  args.q = to_view(a.q, "q");
  args.k = to_view(a.k, "k");
  args.weights = to_view(a.weights, "weights");
  args.scores = to_view(a.scores, "scores");
  args.indices = to_view(a.indices, "indices");
  args.k_scale = to_view(a.k_scale, "k_scale");
  args.seqlens = to_view(a.seqlens, "seqlens");
  args.block_table = to_view(a.block_table, "block_table");
  args.key_begin = to_view(a.key_begin, "key_begin");
  args.key_end = to_view(a.key_end, "key_end");
  if (a.has_scale) args.scale = a.scale;
  args.relu = a.relu != 0;
  args.causal = a.causal != 0;
  args.align = to_align(a.align, a.align_offset, "align");
  return args;
}

}  // namespace

rapt_status rapt_index_scores(const rapt_index_scores_args* args, const rapt_context* context) noexcept {
  return rapt_index_scores_with_workspace(args, context, nullptr, 0);
}
rapt_status rapt_index_scores_with_workspace(const rapt_index_scores_args* args, const rapt_context* context,
                                             void* workspace, size_t workspace_bytes) noexcept {
  return guard(
      [&] { rapt::index_scores(to_args(args), to_context(context), to_workspace(workspace, workspace_bytes)); });
}
rapt_status rapt_plan_create_index_scores(const rapt_index_scores_args* args, const rapt_context* context,
                                          rapt_plan** plan) noexcept {
  return create_plan(to_args, args, context, plan);
}
rapt_status rapt_plan_run_index_scores(const rapt_plan* plan, const rapt_index_scores_args* args, void* workspace,
                                       size_t workspace_bytes) noexcept {
  return run_plan(plan, to_args, args, workspace, workspace_bytes);
}
