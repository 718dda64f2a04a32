/* Writing new keys and values to a KV cache. Part of rapt.h. */
#ifndef RAPT_APPEND_KV_H
#define RAPT_APPEND_KV_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_append_kv(&args, context) writes new keys and values to a KV cache. The new rows of sequence i go to key
 * positions seqlens[i], seqlens[i] + 1, and so on, rounded or quantised to the cache's type. Scales and zeros with
 * an element for every row are computed and written. Scales and zeros that broadcast are inputs. v may be a range of
 * k's columns, if v_new is the same range of k_new's columns. v_scale is then the same groups of k_scale. Errors
 * name the cache's tensors "cache.k", "cache.k_scale" and so on. rapt/append_kv.hpp states bounds and corner cases. */

/* Arguments of rapt_append_kv. Start from rapt_append_kv_args_init(). Leave optional tensors all-zero. Symbols: b
 * sequences, hk KV heads, n new rows per sequence, d and dv head dimension of keys and of values. */
typedef struct rapt_append_kv_args {
  size_t struct_size; /* sizeof(rapt_append_kv_args) as the caller was compiled */

  rapt_tensor k_new;      /* f32, bf16 or f16 [b, hk, n, d]; with cu_seqlens [total, hk, d] */
  rapt_tensor v_new;      /* f32, bf16 or f16 [b, hk, n, dv]; with cu_seqlens [total, hk, dv] */
  rapt_tensor seqlens;    /* i32 or i64 [b]: number of keys of each sequence before the call */
  rapt_tensor cu_seqlens; /* optional: i32 or i64 [b + 1]; the new rows of sequence i are [c[i], c[i + 1]) */

  /* The cache. The call writes rows, and computed scales and zeros. */
  rapt_tensor k;           /* shape by kv_kind */
  rapt_tensor v;           /* shape by kv_kind */
  rapt_tensor block_table; /* RAPT_KV_PAGED: i32 or i64 [b, n]; only read */
  rapt_tensor k_scale; /* optional: f32, k's shape with the number of groups in place of d; b (pages) and s may be 1 */
  rapt_tensor v_scale; /* optional: the same for v */
  rapt_tensor k_zero;  /* optional: k_scale's shape */
  rapt_tensor v_zero;  /* optional: v_scale's shape */

  int32_t kv_kind; /* rapt_kv_kind: strided, paged or ring */

  rapt_tensor k_tail; /* optional, with a quantised k: f32, bf16 or f16. Receives the last columns of k_new */
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
