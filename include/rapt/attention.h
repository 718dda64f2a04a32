/* Attention. Part of rapt.h. */
#ifndef RAPT_ATTENTION_H
#define RAPT_ATTENTION_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_attention(&args, context) computes out = softmax(score(q k^T)) v, as docs/contract.md specifies. Extra memory
 * is O(threads x block), independent of the lengths. */

/* Arguments of rapt_attention. Start from rapt_attention_args_init(). Leave optional tensors all-zero. Symbols: b
 * batch, hq query heads, hk KV heads (hq % hk == 0; query head h reads KV head floor(h / (hq / hk))), sq query rows,
 * sk key rows, d head dimension of queries and keys, dv head dimension of values. */
typedef struct rapt_attention_args {
  size_t struct_size; /* sizeof(rapt_attention_args) as the caller was compiled */

  /* q, k, v and out are f32, bf16 or f16. k and v have one type; q and out may differ from it and from each other. q
   * may also be f8e4m3. k and v may also be quantised: i8, f8e4m3, f8e5m2 or i4x2 (rows of d / 2 and dv / 2 bytes). */
  rapt_tensor q;   /* [b, hq, sq, d]; with cu_seqlens_q [total_q, hq, d] */
  rapt_tensor k;   /* shape by kv_kind */
  rapt_tensor v;   /* shape by kv_kind */
  rapt_tensor out; /* written: [b, hq, sq, dv] ([total_q, hq, dv]). Overlaps neither an input nor itself */
  rapt_tensor lse; /* optional, written: f32 [b, hq, sq] ([total_q, hq]), log of the sum of exp of the final scores */
  rapt_tensor cu_seqlens_q; /* optional: i32 or i64 [b + 1], 0 = c[0] <= ... <= c[b] = total_q: q and out are ragged */
  rapt_tensor cu_seqlens_k; /* RAPT_KV_RAGGED: i32 or i64 [b + 1], 0 = c[0] <= ... <= c[b] = total_k */
  rapt_tensor kv_seqlens;   /* i32 or i64 [b], keys of each sequence, 0 <= len <= sk; RAPT_KV_STRIDED: optional */
  rapt_tensor block_table;  /* RAPT_KV_PAGED: i32 or i64 [b, n] */

  /* Optional; i8 and i4x2 need scales. An element x of a quantised k counts as (x - zero[g]) * scale[g], where g is
   * its group: the d elements of a row form equal groups. f32, k's shape with the number of groups in place of d; b
   * (pages, total_k) and s may be 1. A zero needs a scale with the same number of groups. The same holds for v. */
  rapt_tensor k_scale, v_scale;
  rapt_tensor k_zero, v_zero;

  /* bias, alibi and sinks are f32, bf16 or f16, each independently. */
  rapt_tensor bias;  /* optional, added to scores: broadcasts to [b, hq, sq, sk]. -inf masks */
  rapt_tensor mask;  /* optional: RAPT_BOOL, 1 = attend; shapes as for bias */
  rapt_tensor alibi; /* optional: slopes, [hq] or [b, hq]: score -= slope * |i + offset - j| */
  rapt_tensor sinks; /* optional: [hq], one extra logit per head in the softmax's denominator only; -inf = none */

  int32_t kv_kind; /* rapt_kv_kind */
  int32_t causal;  /* nonzero: keys j <= i + offset only */

  int32_t has_scale; /* 0: d^-1/2 */
  float scale;       /* any finite value, 0 and negative included */
  float softcap;     /* c > 0: x -> c * tanh(x / c); 0: none */

  int32_t has_window;   /* nonzero: keys i + offset - window_left <= j <= i + offset + window_right only */
  int64_t window_left;  /* -1: open */
  int64_t window_right; /* -1: open */

  int32_t align;        /* rapt_align; required for causal, window and alibi if query and key lengths differ */
  int64_t align_offset; /* RAPT_ALIGN_OFFSET only; may be negative */

  /* Dropout after the softmax: weights are dropped at random, and the others divided by 1 - dropout. The mask
   * depends only on dropout, seed, offset and the weight's position. lse ignores dropout. */
  float dropout; /* 0 <= dropout <= 1, the share of dropped weights, rounded to a multiple of 2^-16; 0: none */
  uint64_t dropout_seed;
  uint64_t dropout_offset;

  rapt_tensor indices;   /* RAPT_KV_GATHERED: i32 or i64 [b, sq, n], the keys of each query token */
  rapt_tensor kv_counts; /* RAPT_KV_GATHERED, optional: i32 or i64 [b, sq], entries that count, 0 <= count <= n */

  /* Optional, with a quantised k: the last columns of the keys, not quantised. f32, bf16 or f16, k's shape with the
   * number of these columns in place of d. q's head dimension counts the columns of k and k_tail. */
  rapt_tensor k_tail;

  /* Optional, with f8e4m3 queries: an element x counts as x * q_scale. f32 [b, hq, sq, 1] ([total_q, hq, 1]); b
   * (total_q) and sq may be 1. */
  rapt_tensor q_scale;
} rapt_attention_args;

/* Arguments without any tensor. Inline, so that struct_size is the caller's. */
static inline rapt_attention_args rapt_attention_args_init(void) {
  rapt_attention_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
