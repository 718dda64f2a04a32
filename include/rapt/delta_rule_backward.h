/* Gradients of the delta rule. Part of rapt.h. */
#ifndef RAPT_DELTA_RULE_BACKWARD_H
#define RAPT_DELTA_RULE_BACKWARD_H

#include <string.h>

#include "rapt/delta_rule.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_delta_rule_backward(&args, context). Gradients of sum(dout * out) + sum(dfinal_state * final_state), through
 * norms, gates and sigmoid where the forward does them. States are computed again, from one in every 24 tokens, which
 * the workspace keeps. Refusals name the forward's tensors as rapt_delta_rule() does. rapt/delta_rule_backward.hpp has
 * the corners. */

/* Start from rapt_delta_rule_backward_args_init(). Optional tensors are left all-zero. Gradients that are written have
 * the shape of what they are the gradient of, and overlap nothing. */
typedef struct rapt_delta_rule_backward_args {
  size_t struct_size; /* sizeof(rapt_delta_rule_backward_args) as the caller was compiled */

  /* As the forward call had it, but for out and final_state, which are not looked at. initial_state is as it was before
   * that call; states in pools (state_slots) have no gradients. By pointer, because it may grow; only read. */
  const rapt_delta_rule_args* forward;

  rapt_tensor dout;                  /* optional: f32, bf16 or f16, shape of out; else 0 */
  rapt_tensor dfinal_state;          /* optional: f32 or bf16, shape of final_state; else 0 */
  rapt_tensor dq, dk, dv, dg, dbeta; /* optional, written: f32, bf16 or f16, each by itself */
  rapt_tensor dinitial_state;        /* optional, written: f32 or bf16 */
  rapt_tensor da_log, ddt_bias;      /* optional, written: f32; sums over all tokens, as is dg of a g of [h] */
} rapt_delta_rule_backward_args;

static inline rapt_delta_rule_backward_args rapt_delta_rule_backward_args_init(void) {
  rapt_delta_rule_backward_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
