/* Rotary embedding of queries and keys, with their norms, and appending to a KV cache. Part of rapt.h. */
#ifndef RAPT_ROTARY_APPEND_KV_H
#define RAPT_ROTARY_APPEND_KV_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_rotary_append_kv(&args, context). Normalises (where there are weights) and rotates the rows of q and k_new.
 * Those of q go to q_out, those of k_new with v_new to the cache, as with rapt_append_kv(), or without a cache to
 * k_out. Arithmetic is fp32; what goes out is rounded once. rapt/rotary_append_kv.hpp has formulas, bounds and corners.
 */

/* Start from rapt_rotary_append_kv_args_init(). Optional tensors are left all-zero. */
typedef struct rapt_rotary_append_kv_args {
  size_t struct_size; /* sizeof(rapt_rotary_append_kv_args) as the caller was compiled */

  rapt_tensor q;          /* optional: f32, bf16 or f16 [b, hq, n, d]; with cu_seqlens [total, hq, d] */
  rapt_tensor q_out;      /* with q, written: f32, bf16 or f16 of its shape. It may be q itself */
  rapt_tensor k_new;      /* f32, bf16 or f16 [b, hk, n, d]; with cu_seqlens [total, hk, d] */
  rapt_tensor k_out;      /* without a cache, written: f32, bf16 or f16 of k_new's shape. It may be k_new itself */
  rapt_tensor v_new;      /* with a cache: f32, bf16 or f16 [b, hk, n, dv]; with cu_seqlens [total, hk, dv] */
  rapt_tensor seqlens;    /* i32 or i64 [b]: keys of each sequence before the call; optional without a cache */
  rapt_tensor cu_seqlens; /* optional: i32 or i64 [b + 1]; sequence i has the new rows [c[i], c[i + 1]) */

  /* Tables [positions, r], or a row for each new row: [b or 1, n, r]; with cu_seqlens [1, total, r]. f32, bf16 or f16.
   * r is rotary_dim or half of it. */
  rapt_tensor cos;
  rapt_tensor sin;
  rapt_tensor positions; /* optional, of tables: i32 or i64 [b or 1, n] or [1, total]; else seqlens[i] + t */
  rapt_tensor q_norm;    /* optional: f32, bf16 or f16 [d], the weights of an RMS norm of q */
  rapt_tensor k_norm;    /* optional, likewise of k_new */

  /* The cache, all-zero for none: as in rapt_append_kv_args. */
  rapt_tensor k;
  rapt_tensor v;
  rapt_tensor block_table;
  rapt_tensor k_scale;
  rapt_tensor v_scale;
  rapt_tensor k_zero;
  rapt_tensor v_zero;
  rapt_tensor k_tail;
  int32_t kv_kind; /* rapt_kv_kind: strided, paged or ring */

  int32_t interleaved;   /* nonzero: pairs are channels 2i and 2i + 1; else i and i + rotary_dim / 2 */
  int32_t norm_plus_one; /* nonzero: norms multiply by 1 + weight */
  float norm_eps;        /* 1e-6 unless set */
  int64_t rotary_dim;    /* channels that are rotated; 0: the last size of cos */
  int64_t rotary_offset; /* the first of them */
} rapt_rotary_append_kv_args;

static inline rapt_rotary_append_kv_args rapt_rotary_append_kv_args_init(void) {
  rapt_rotary_append_kv_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.norm_eps = 1e-6f;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
