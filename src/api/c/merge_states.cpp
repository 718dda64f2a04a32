// merge_states in the C interface.
#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;

struct Args {
  std::vector<rapt::TensorView> outs, lses;
  rapt::MutableTensorView out, lse;

  explicit Args(const rapt_merge_states_args* given) {
    const rapt_merge_states_args a = known_part(deref(given, "args"), "rapt_merge_states_args");
    if (a.count) deref(a.outs, "outs"), deref(a.lses, "lses");
    for (std::size_t i = 0; i < a.count; ++i) {
      outs.push_back(to_view(a.outs[i], "outs[" + std::to_string(i) + "]"));
      lses.push_back(to_view(a.lses[i], "lses[" + std::to_string(i) + "]"));
    }
    out = to_view(a.out, "out"), lse = to_view(a.lse, "lse");
  }
  operator rapt::MergeStatesArgs() const { return {outs, lses, out, lse}; }
};

Args to_args(const rapt_merge_states_args* given) {
  return Args(given);
}

}  // namespace

rapt_status rapt_merge_states(const rapt_merge_states_args* args, const rapt_context* context) noexcept {
  return rapt_merge_states_with_workspace(args, context, nullptr, 0);
}
rapt_status rapt_merge_states_with_workspace(const rapt_merge_states_args* args, const rapt_context* context,
                                             void* workspace, size_t workspace_bytes) noexcept {
  return guard(
      [&] { rapt::merge_states(to_args(args), to_context(context), to_workspace(workspace, workspace_bytes)); });
}
rapt_status rapt_plan_create_merge_states(const rapt_merge_states_args* args, const rapt_context* context,
                                          rapt_plan** plan) noexcept {
  return create_plan(to_args, args, context, plan);
}
rapt_status rapt_plan_run_merge_states(const rapt_plan* plan, const rapt_merge_states_args* args, void* workspace,
                                       size_t workspace_bytes) noexcept {
  return run_plan(plan, to_args, args, workspace, workspace_bytes);
}
