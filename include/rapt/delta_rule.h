/* Linear attention with a state of fixed size: the delta rule and its variants. Part of rapt.h. */
#ifndef RAPT_DELTA_RULE_H
#define RAPT_DELTA_RULE_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_delta_rule(&args, context) computes, for each sequence and state head and for one token after another, with S
 * [d, dv] in fp32: S = diag(exp(g)) S; u = beta (v - S^T k); S = S + k u^T; out = scale S^T q. Rules without a delta
 * have u = v. The smaller of hk and hv divides the larger; hq divides h or is a multiple of it. Head i of the fewer
 * heads serves the i-th of equal runs of the others. rapt/delta_rule.hpp states the corner cases. */

/* How a token is written: linear (S += k v^T), delta (the prediction S^T k is subtracted from v first), gated (after
 * a decay), or gated_delta (both). The names are those of ONNX's LinearAttention. */
typedef enum rapt_update_rule {
  RAPT_RULE_LINEAR = 0,
  RAPT_RULE_GATED = 1,
  RAPT_RULE_DELTA = 2,
  RAPT_RULE_GATED_DELTA = 3
} rapt_update_rule;

/* Arguments of rapt_delta_rule. Start from rapt_delta_rule_args_init(). Leave optional tensors all-zero. Symbols: b
 * sequences, t tokens, hq, hk and hv heads of q, k and v, h = max(hk, hv) state heads, d and dv head dimension of
 * keys and of values. */
typedef struct rapt_delta_rule_args {
  size_t struct_size; /* sizeof(rapt_delta_rule_args) as the caller was compiled */

  /* q, k, v, g, beta and out are f32, bf16 or f16, each independently. */
  rapt_tensor q;             /* [b, t, hq, d]; with cu_seqlens [total, hq, d], and the others alike. 1 <= d <= 256 */
  rapt_tensor k;             /* [b, t, hk, d] */
  rapt_tensor v;             /* [b, t, hv, dv]; 1 <= dv <= 256 */
  rapt_tensor g;             /* optional, gated rules only: log decay [h], [b, t, h] or [b, t, h, d]; default 0 */
  rapt_tensor beta;          /* optional, rules with a delta only: [b, t, h]; default 1 */
  rapt_tensor out;           /* written: [b, t, max(hq, h), dv] */
  rapt_tensor initial_state; /* optional: f32 or bf16 [b, h, d, dv]; default 0 */
  rapt_tensor final_state;   /* optional, written: f32 or bf16 [b, h, d, dv]. May be initial_state itself */
  rapt_tensor cu_seqlens;    /* optional: i32 or i64 [b + 1], 0 = c[0] <= ... <= c[b] = total */

  /* Optional: i32 or i64 [b]. States are then pools [slots, h, d, dv]. Sequence i starts from slot state_slots[i]
   * and leaves its state there. A negative slot is neither read nor written. Or [b, n]: the state after token j goes
   * to slot state_slots[i, j], and sequence i starts from slot state_slots[i, accepted[i] - 1]. */
  rapt_tensor state_slots;
  rapt_tensor accepted; /* optional, with state_slots [b, n]: i32 or i64 [b], 1 to n; default 1 */
  rapt_tensor a_log;    /* optional, of the gate: f32 [h]; default 0 */
  rapt_tensor dt_bias;  /* optional, of the gate: f32 [h, d] if g has d, else [h]; default 0 */

  int32_t rule;      /* rapt_update_rule; default RAPT_RULE_GATED_DELTA */
  int32_t has_scale; /* 0: d^-1/2 */
  float scale;       /* of q */

  int32_t l2norm_qk;            /* nonzero: q and k are divided by sqrt(sum of squares + 1e-6) */
  int32_t beta_sigmoid;         /* nonzero: sigmoid(beta) replaces beta */
  int32_t beta_double;          /* nonzero: beta, or its sigmoid, is multiplied by 2 */
  int32_t gate;                 /* nonzero: -exp(a_log) softplus(g + dt_bias) replaces g */
  int32_t has_gate_lower_bound; /* nonzero: gate_lower_bound sigmoid(exp(a_log) (g + dt_bias)) replaces g */
  float gate_lower_bound;       /* at most 0 */
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
