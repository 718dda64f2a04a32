/* Rotary embedding of queries and keys, with optional RMS norms, and appending to a KV cache. Part of rapt.h. */
#ifndef RAPT_ROTARY_APPEND_KV_H
#define RAPT_ROTARY_APPEND_KV_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_rotary_append_kv(&args, context) normalises (if norm weights are given) and rotates the rows of q and k_new.
 * It writes those of q to q_out. It appends those of k_new, with v_new, to the cache as rapt_append_kv() does, or
 * without a cache writes them to k_out. Arithmetic is fp32; results are rounded once. rapt/rotary_append_kv.hpp
 * states formulas, bounds and corner cases. */

/* Arguments of rapt_rotary_append_kv. Start from rapt_rotary_append_kv_args_init(). Leave optional tensors all-zero.
 * Symbols: b sequences, hq query heads, hk KV heads, n new rows per sequence, d and dv head dimension of keys and of
 * values. */
typedef struct rapt_rotary_append_kv_args {
  size_t struct_size; /* sizeof(rapt_rotary_append_kv_args) as the caller was compiled */

  rapt_tensor q;       /* optional: f32, bf16 or f16 [b, hq, n, d]; with cu_seqlens [total, hq, d] */
  rapt_tensor q_out;   /* with q, written: f32, bf16 or f16, shape of q. May be q itself */
  rapt_tensor k_new;   /* f32, bf16 or f16 [b, hk, n, d]; with cu_seqlens [total, hk, d] */
  rapt_tensor k_out;   /* without a cache, written: f32, bf16 or f16, shape of k_new. May be k_new itself */
  rapt_tensor v_new;   /* with a cache: f32, bf16 or f16 [b, hk, n, dv]; with cu_seqlens [total, hk, dv] */
  rapt_tensor seqlens; /* i32 or i64 [b]: number of keys of each sequence before the call; optional without a cache */
  rapt_tensor cu_seqlens; /* optional: i32 or i64 [b + 1]; the new rows of sequence i are [c[i], c[i + 1]) */

  /* Tables [positions, r], or a row for each new row: [b or 1, n, r]; with cu_seqlens [1, total, r]. f32, bf16 or
   * f16. r is rotary_dim or half of it. */
  rapt_tensor cos;
  rapt_tensor sin;
  rapt_tensor positions; /* optional, tables only: i32 or i64 [b or 1, n] or [1, total]; default seqlens[i] + t */
  rapt_tensor q_norm;    /* optional: f32, bf16 or f16 [d], weights of an RMS norm of q */
  rapt_tensor k_norm;    /* optional: the same for k_new */

  /* The cache, as in rapt_append_kv_args. All-zero: no cache. */
  rapt_tensor k;
  rapt_tensor v;
  rapt_tensor block_table;
  rapt_tensor k_scale;
  rapt_tensor v_scale;
  rapt_tensor k_zero;
  rapt_tensor v_zero;
  rapt_tensor k_tail;
  int32_t kv_kind; /* rapt_kv_kind: strided, paged or ring */

  int32_t interleaved;   /* nonzero: pairs are channels 2i and 2i + 1; 0: i and i + rotary_dim / 2 */
  int32_t norm_plus_one; /* nonzero: norms multiply by 1 + weight */
  float norm_eps;        /* added to the mean of squares, 0 or more; rapt_rotary_append_kv_args_init() sets 1e-6 */
  int64_t rotary_dim;    /* number of rotated channels, even; 0: the last size of cos */
  int64_t rotary_offset; /* the first rotated channel */
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
