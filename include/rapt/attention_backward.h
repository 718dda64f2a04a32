/* Gradients of attention. Part of rapt.h. */
#ifndef RAPT_ATTENTION_BACKWARD_H
#define RAPT_ATTENTION_BACKWARD_H

#include <string.h>

#include "rapt/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_attention_backward(&args, context) computes the gradients of sum(dout * out) + sum(dlse * lse), in O(rows)
 * extra memory. Give at least one gradient to write. Errors name the forward's tensors as rapt_attention() does.
 * rapt/attention_backward.hpp states the corner cases. */

/* Arguments of rapt_attention_backward. Start from rapt_attention_backward_args_init(). Leave optional tensors
 * all-zero. Each gradient that is written has the shape of its input, is f32, bf16 or f16 independently, and
 * overlaps no other tensor. */
typedef struct rapt_attention_backward_args {
  size_t struct_size; /* sizeof(rapt_attention_backward_args) as the caller was compiled */

  /* The forward call's arguments. Keys are strided, ragged or gathered, and not quantised. out and lse, which is
   * required here, are the forward's results, and only read. A pointer, because the structure may grow. */
  const rapt_attention_args* forward;

  rapt_tensor dout;       /* f32, bf16 or f16, shape of out */
  rapt_tensor dlse;       /* optional: f32, shape of lse; for losses that depend on lse */
  rapt_tensor dq, dk, dv; /* optional, written */
  rapt_tensor dbias;      /* optional, written; the sum over the dimensions that broadcast */
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
