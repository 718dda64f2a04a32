/* Merging attention over disjoint sets of keys. Part of rapt.h. */
#ifndef RAPT_MERGE_STATES_H
#define RAPT_MERGE_STATES_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_merge_states(&args, context) merges attention over `count` disjoint sets of keys into attention over all of
 * them: out = sum_i exp(lses[i] - lse) outs[i], lse = log(sum_i exp(lses[i])). rapt/merge_states.hpp states the
 * corner cases. */

/* Arguments of rapt_merge_states. Start from rapt_merge_states_args_init(). */
typedef struct rapt_merge_states_args {
  size_t struct_size;      /* sizeof(rapt_merge_states_args) as the caller was compiled */
  const rapt_tensor* outs; /* [count] tensors, f32, bf16 or f16 [.., dv] */
  const rapt_tensor* lses; /* [count] tensors, f32 [..] */
  size_t count;
  rapt_tensor out; /* written: f32, bf16 or f16 [.., dv] */
  rapt_tensor lse; /* optional, written: f32 [..] */
} rapt_merge_states_args;

static inline rapt_merge_states_args rapt_merge_states_args_init(void) {
  rapt_merge_states_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
