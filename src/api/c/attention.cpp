// Attention in the C interface.
#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;

rapt::ScoreSpec to_score(const rapt_attention_args& a) {
  rapt::ScoreSpec score;
  if (a.has_scale) score.scale = a.scale;
  score.causal = a.causal != 0;
  if (a.has_window) score.window = {a.window_left, a.window_right};
  score.align = to_align(a.align, a.align_offset, "score.align");
  if (a.softcap != 0) score.softcap = a.softcap;
  score.bias = to_view(a.bias, "score.bias");
  score.mask = to_view(a.mask, "score.mask");
  score.alibi = to_view(a.alibi, "score.alibi");
  score.sinks = to_view(a.sinks, "score.sinks");
  if (a.dropout != 0) score.dropout = rapt::Dropout{a.dropout, a.dropout_seed, a.dropout_offset};
  return score;
}

}  // namespace

rapt::AttentionArgs rapt::c::to_attention_args(const rapt_attention_args* given) {
  const rapt_attention_args a = known_part(deref(given, "args"), "rapt_attention_args");
  rapt::AttentionArgs args;
  args.q = to_view(a.q, "q");
  args.kv.kind = to_enum(a.kv_kind, rapt::KvSource::Kind::gathered, "kv.kind");
  args.kv.k = to_view(a.k, "k");
  args.kv.v = to_view(a.v, "v");
  args.kv.seqlens = to_view(a.kv_seqlens, "kv.seqlens");
  args.kv.cu_seqlens = to_view(a.cu_seqlens_k, "kv.cu_seqlens");
  args.kv.block_table = to_view(a.block_table, "kv.block_table");
  args.kv.indices = to_view(a.indices, "kv.indices");
  args.kv.counts = to_view(a.kv_counts, "kv.counts");
  args.kv.k_scale = to_view(a.k_scale, "kv.k_scale");
  args.kv.v_scale = to_view(a.v_scale, "kv.v_scale");
  args.kv.k_zero = to_view(a.k_zero, "kv.k_zero");
  args.kv.v_zero = to_view(a.v_zero, "kv.v_zero");
  args.kv.k_tail = to_view(a.k_tail, "kv.k_tail");
  args.out = to_view(a.out, "out");
  args.score = to_score(a);
  args.lse = to_view(a.lse, "lse");
  args.cu_seqlens_q = to_view(a.cu_seqlens_q, "cu_seqlens_q");
  args.q_scale = to_view(a.q_scale, "q_scale");
  return args;
}

rapt_status rapt_attention(const rapt_attention_args* args, const rapt_context* context) noexcept {
  return rapt_attention_with_workspace(args, context, nullptr, 0);
}
rapt_status rapt_attention_with_workspace(const rapt_attention_args* args, const rapt_context* context, void* workspace,
                                          size_t workspace_bytes) noexcept {
  return guard(
      [&] { rapt::attention(to_attention_args(args), to_context(context), to_workspace(workspace, workspace_bytes)); });
}
rapt_status rapt_dropout_mask(float dropout, uint64_t seed, uint64_t offset, const rapt_tensor* mask) noexcept {
  return guard([&] { rapt::dropout_mask({dropout, seed, offset}, to_view(deref(mask, "mask"), "mask")); });
}
rapt_status rapt_plan_create(const rapt_attention_args* args, const rapt_context* context, rapt_plan** plan) noexcept {
  return create_plan(to_attention_args, args, context, plan);
}
rapt_status rapt_plan_run(const rapt_plan* plan, const rapt_attention_args* args, void* workspace,
                          size_t workspace_bytes) noexcept {
  return run_plan(plan, to_attention_args, args, workspace, workspace_bytes);
}

rapt_status rapt_problem_text(const rapt_attention_args* args, char* buffer, size_t capacity, size_t* size) noexcept {
  return guard([&] {
    if (size) *size = 0;
    copy_text(rapt::AttentionProblem::of(to_attention_args(args)).to_string(), buffer, capacity, size);
  });
}
