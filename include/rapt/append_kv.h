/* Writing new keys and values to a KV cache. Part of rapt.h. */
#ifndef RAPT_APPEND_KV_H
#define RAPT_APPEND_KV_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_append_kv(&args, context). Writes the new rows of sequence i at key positions seqlens[i], seqlens[i] + 1, ...,
 * rounded or quantised to the cache's type. Scales and zeros with an element for every row are computed and written,
 * others are read. v may be columns of k's memory, and v_scale their groups of k_scale's, if v_new is the same columns
 * of k_new. Refusals name the cache's tensors "cache.k", "cache.k_scale", ... rapt/kv_cache.hpp has the bounds and
 * corners. */

/* New rows for a cache. Start from rapt_append_kv_args_init(). Optional tensors are left all-zero. */
typedef struct rapt_append_kv_args {
  size_t struct_size; /* sizeof(rapt_append_kv_args) as the caller was compiled */

  rapt_tensor k_new;      /* f32, bf16 or f16 [b, hk, n, d]; with cu_seqlens [total, hk, d] */
  rapt_tensor v_new;      /* f32, bf16 or f16 [b, hk, n, dv]; with cu_seqlens [total, hk, dv] */
  rapt_tensor seqlens;    /* i32 or i64 [b]: keys of each sequence before the call */
  rapt_tensor cu_seqlens; /* optional: i32 or i64 [b + 1]; sequence i has the new rows [c[i], c[i + 1]) */

  /* The cache: rows, scales and zeros are written. */
  rapt_tensor k;           /* shape by kv_kind */
  rapt_tensor v;           /* shape by kv_kind */
  rapt_tensor block_table; /* RAPT_KV_PAGED: i32 or i64 [b, n]; only read */
  rapt_tensor k_scale;     /* optional: f32, k's shape with groups for d; sizes of 1 in b (pages) and s broadcast */
  rapt_tensor v_scale;     /* likewise, of v */
  rapt_tensor k_zero;      /* optional: k_scale's shape */
  rapt_tensor v_zero;      /* optional: v_scale's shape */

  int32_t kv_kind; /* rapt_kv_kind: strided, paged or ring */

  rapt_tensor k_tail; /* optional, beside a quantised k: f32, bf16 or f16, where the last columns of k_new go */
} rapt_append_kv_args;

static inline rapt_append_kv_args rapt_append_kv_args_init(void) {
  rapt_append_kv_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
