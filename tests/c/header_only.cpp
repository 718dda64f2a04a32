// rapt.h is complete on its own and valid C++11.
#include "rapt/rapt.h"

static_assert(noexcept(rapt_attention(nullptr, nullptr)), "no exception crosses the border");

int main() {
  rapt_attention_args args = rapt_attention_args_init();
  rapt_context_options options = rapt_context_options_init();
  rapt_append_kv_args append = rapt_append_kv_args_init();
  rapt_attention_backward_args backward = rapt_attention_backward_args_init();
  rapt_delta_rule_args rule = rapt_delta_rule_args_init();
  if (rule.struct_size != sizeof rule || rule.rule != RAPT_RULE_GATED_DELTA) return 1;
  rapt_index_scores_args index = rapt_index_scores_args_init();
  if (index.struct_size != sizeof index || !index.relu || !index.causal) return 1;
  if (rapt_select_topk_args_init().struct_size != sizeof(rapt_select_topk_args)) return 1;
  const bool sizes = args.struct_size == sizeof args && options.struct_size == sizeof options;
  return sizes && append.struct_size == sizeof append && backward.struct_size == sizeof backward ? 0 : 1;
}
