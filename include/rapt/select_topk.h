/* The positions of the largest scores of each row. Part of rapt.h. */
#ifndef RAPT_SELECT_TOPK_H
#define RAPT_SELECT_TOPK_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_select_topk(&args, context) selects the positions of the n largest scores of each row, largest first; of
 * equal scores the lower position first. -0 equals 0, and NaN counts as the largest. If fewer than n scores are
 * above -inf, the other entries of indices are -1. */

/* Arguments of rapt_select_topk. Start from rapt_select_topk_args_init(). [..] stands for up to 3 dimensions. */
typedef struct rapt_select_topk_args {
  size_t struct_size;  /* sizeof(rapt_select_topk_args) as the caller was compiled */
  rapt_tensor scores;  /* f32 [.., sk]; -inf: never selected */
  rapt_tensor indices; /* written: i32 [.., n], n >= 1 */
} rapt_select_topk_args;

static inline rapt_select_topk_args rapt_select_topk_args_init(void) {
  rapt_select_topk_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
