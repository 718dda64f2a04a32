/* Linear attention with a state of fixed size: the delta rule and its relatives. Part of rapt.h. */
#ifndef RAPT_DELTA_RULE_H
#define RAPT_DELTA_RULE_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_delta_rule(&args, context). For each sequence and state head, with S [d, dv] in fp32, token by token:
 * S = diag(exp(g)) S; u = beta (v - S^T k); S = S + k u^T; out = scale S^T q. Without a delta u = v. Either of hk and
 * hv divides the other, and so do hq and h; head i of the fewer serves the following ratio of the more.
 * rapt/delta_rule.hpp has the corners. */

/* How a token is written: linear S += k v^T, with a prediction S^T k taken off v (delta), after a decay (gated), or
 * both. The names are those of ONNX's LinearAttention. */
typedef enum rapt_update_rule {
  RAPT_RULE_LINEAR = 0,
  RAPT_RULE_GATED = 1,
  RAPT_RULE_DELTA = 2,
  RAPT_RULE_GATED_DELTA = 3
} rapt_update_rule;

/* Start from rapt_delta_rule_args_init(). Optional tensors are left all-zero. h is max(hk, hv), the state heads. */
typedef struct rapt_delta_rule_args {
  size_t struct_size; /* sizeof(rapt_delta_rule_args) as the caller was compiled */

  /* q, k, v, g, beta and out are f32, bf16 or f16, each by itself. */
  rapt_tensor q;             /* [b, t, hq, d]; with cu_seqlens [total, hq, d], and the others likewise. d is 1 to 256 */
  rapt_tensor k;             /* [b, t, hk, d] */
  rapt_tensor v;             /* [b, t, hv, dv]; dv is 1 to 256 */
  rapt_tensor g;             /* optional, of gated rules: log decay [h], [b, t, h] or [b, t, h, d] */
  rapt_tensor beta;          /* optional, of rules with a delta: [b, t, h]; else 1 */
  rapt_tensor out;           /* written: [b, t, max(hq, h), dv] */
  rapt_tensor initial_state; /* optional: f32 or bf16 [b, h, d, dv]; else 0 */
  rapt_tensor final_state;   /* optional, written: f32 or bf16 [b, h, d, dv]. It may be initial_state itself */
  rapt_tensor cu_seqlens;    /* optional: i32 or i64 [b + 1], 0 = c[0] <= ... <= c[b] = total */

  /* Optional: i32 or i64 [b]. The states are pools [slots, h, d, dv], and sequence i starts from slot state_slots[i]
   * and leaves its state there; of a negative slot nothing is read or written. Or [b, n]: the state after token j goes
   * to slot state_slots[i, j], and sequence i starts from state_slots[i, accepted[i] - 1]. */
  rapt_tensor state_slots;
  rapt_tensor accepted; /* optional, with state_slots [b, n]: i32 or i64 [b], 1 to n; else 1 */
  rapt_tensor a_log;    /* optional, of the gate: f32 [h]; else 0 */
  rapt_tensor dt_bias;  /* optional, of the gate: f32 [h, d] if g has d, else [h]; else 0 */

  int32_t rule;      /* rapt_update_rule; RAPT_RULE_GATED_DELTA unless set */
  int32_t has_scale; /* 0: d^-1/2 */
  float scale;       /* of q */

  int32_t l2norm_qk;            /* nonzero: q and k are divided by sqrt(sum of squares + 1e-6) */
  int32_t beta_sigmoid;         /* nonzero: beta counts as sigmoid(beta) */
  int32_t beta_double;          /* nonzero: beta, or its sigmoid, twice */
  int32_t gate;                 /* nonzero: g counts as -exp(a_log) softplus(g + dt_bias) or, with a bound, as */
  int32_t has_gate_lower_bound; /* gate_lower_bound sigmoid(exp(a_log) (g + dt_bias)) */
  float gate_lower_bound;       /* not above 0 */
} rapt_delta_rule_args;

static inline rapt_delta_rule_args rapt_delta_rule_args_init(void) {
  rapt_delta_rule_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.rule = RAPT_RULE_GATED_DELTA;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
