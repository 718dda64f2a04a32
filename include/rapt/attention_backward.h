/* Gradients of attention. Part of rapt.h. */
#ifndef RAPT_ATTENTION_BACKWARD_H
#define RAPT_ATTENTION_BACKWARD_H

#include <string.h>

#include "rapt/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_attention_backward(&args, context). Gradients of sum(dout * out) + sum(dlse * lse) in extra memory of O(rows).
 * At least one is wanted. Refusals name the forward's tensors as rapt_attention() does. rapt/attention_backward.hpp has
 * the corners. */

/* Start from rapt_attention_backward_args_init(). Optional tensors are left all-zero. Gradients that are written have
 * the shape of what they are the gradient of, are f32, bf16 or f16 each by itself, and overlap nothing. */
typedef struct rapt_attention_backward_args {
  size_t struct_size; /* sizeof(rapt_attention_backward_args) as the caller was compiled */

  /* As the forward call had it, strided, ragged or gathered and not quantised. Its out and lse, which is not optional
   * here, are the forward's results. By pointer, because it may grow; only read. */
  const rapt_attention_args* forward;

  rapt_tensor dout;       /* f32, bf16 or f16, shape of out */
  rapt_tensor dlse;       /* optional: f32, shape of lse; for losses that depend on it */
  rapt_tensor dq, dk, dv; /* optional, written */
  rapt_tensor dbias;      /* optional, written; where the bias broadcasts, its gradients are summed */
  rapt_tensor dsinks;     /* optional, written */
  rapt_tensor dalibi;     /* optional, written: of the slopes */
} rapt_attention_backward_args;

static inline rapt_attention_backward_args rapt_attention_backward_args_init(void) {
  rapt_attention_backward_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
