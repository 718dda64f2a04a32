// append_kv in the C interface.
#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;

rapt::AppendKvArgs to_args(const rapt_append_kv_args* given) {
  const rapt_append_kv_args a = known_part(deref(given, "args"), "rapt_append_kv_args");
  rapt::AppendKvArgs args;
  args.k_new = to_view(a.k_new, "k_new");
  args.v_new = to_view(a.v_new, "v_new");
  args.seqlens = to_view(a.seqlens, "seqlens");
  args.cu_seqlens = to_view(a.cu_seqlens, "cu_seqlens");
  rapt::KvCache& cache = args.cache;
  cache.kind = to_enum(a.kv_kind, rapt::KvSource::Kind::ring, "cache.kind");
  cache.k = to_view(a.k, "cache.k");
  cache.v = to_view(a.v, "cache.v");
  cache.block_table = to_view(a.block_table, "cache.block_table");
  cache.k_scale = to_view(a.k_scale, "cache.k_scale");
  cache.v_scale = to_view(a.v_scale, "cache.v_scale");
  cache.k_zero = to_view(a.k_zero, "cache.k_zero");
  cache.v_zero = to_view(a.v_zero, "cache.v_zero");
  cache.k_tail = to_view(a.k_tail, "cache.k_tail");
  return args;
}

}  // namespace

rapt_status rapt_append_kv(const rapt_append_kv_args* args, const rapt_context* context) noexcept {
  return rapt_append_kv_with_workspace(args, context, nullptr, 0);
}
rapt_status rapt_append_kv_with_workspace(const rapt_append_kv_args* args, const rapt_context* context, void* workspace,
                                          size_t workspace_bytes) noexcept {
  return guard([&] { rapt::append_kv(to_args(args), to_context(context), to_workspace(workspace, workspace_bytes)); });
}
rapt_status rapt_plan_create_append_kv(const rapt_append_kv_args* args, const rapt_context* context,
                                       rapt_plan** plan) noexcept {
  return create_plan(to_args, args, context, plan);
}
rapt_status rapt_plan_run_append_kv(const rapt_plan* plan, const rapt_append_kv_args* args, void* workspace,
                                    size_t workspace_bytes) noexcept {
  return run_plan(plan, to_args, args, workspace, workspace_bytes);
}
