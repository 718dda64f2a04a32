/* Gradients of the delta rule. Part of rapt.h. */
#ifndef RAPT_DELTA_RULE_BACKWARD_H
#define RAPT_DELTA_RULE_BACKWARD_H

#include <string.h>

#include "rapt/delta_rule.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_delta_rule_backward(&args, context) computes the gradients of sum(dout * out) + sum(dfinal_state *
 * final_state), through norms, gates and sigmoid if the forward has them. It recomputes the states from one state
 * per 24 tokens, which the workspace keeps. Errors name the forward's tensors as rapt_delta_rule() does.
 * rapt/delta_rule_backward.hpp states the corner cases. */

/* Arguments of rapt_delta_rule_backward. Start from rapt_delta_rule_backward_args_init(). Leave optional tensors
 * all-zero. Each gradient that is written has the shape of its input and overlaps no other tensor. */
typedef struct rapt_delta_rule_backward_args {
  size_t struct_size; /* sizeof(rapt_delta_rule_backward_args) as the caller was compiled */

  /* The forward call's arguments. out and final_state are ignored. initial_state holds the values from before the
   * forward call. States in pools (state_slots) have no gradients. A pointer, because the structure may grow; only
   * read. */
  const rapt_delta_rule_args* forward;

  rapt_tensor dout;                  /* optional: f32, bf16 or f16, shape of out; default 0 */
  rapt_tensor dfinal_state;          /* optional: f32 or bf16, shape of final_state; default 0 */
  rapt_tensor dq, dk, dv, dg, dbeta; /* optional, written: f32, bf16 or f16, each independently */
  rapt_tensor dinitial_state;        /* optional, written: f32 or bf16 */
  rapt_tensor da_log, ddt_bias;      /* optional, written: f32; sums over all tokens, like dg of a g of [h] */
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
