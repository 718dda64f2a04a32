/* Attention. Part of rapt.h. */
#ifndef RAPT_ATTENTION_H
#define RAPT_ATTENTION_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_attention(&args, context). out = softmax(score(q k^T)) v in extra memory of O(threads x block), whatever the
 * lengths. */

/* The arguments of an attention call. Start from rapt_attention_args_init(). Symbols: b batch, hq query heads, hk
 * key/value heads (hq % hk == 0; query head h reads head floor(h / (hq / hk))), sq query rows, sk key rows, d query/key
 * head size, dv value head size. Optional tensors are left all-zero. */
typedef struct rapt_attention_args {
  size_t struct_size; /* sizeof(rapt_attention_args) as the caller was compiled */

  /* q, k, v and out are f32, bf16 or f16; k and v agree, q and out may differ from them and from each other. q may also
   * be f8e4m3, k and v quantised: i8, f8e4m3, f8e5m2 or i4x2 (d / 2 and dv / 2 bytes in place of elements). */
  rapt_tensor q;   /* [b, hq, sq, d]; with cu_seqlens_q [total_q, hq, d] */
  rapt_tensor k;   /* shape by kv_kind */
  rapt_tensor v;   /* shape by kv_kind */
  rapt_tensor out; /* written: [b, hq, sq, dv] ([total_q, hq, dv]). Overlaps nothing, itself included */
  rapt_tensor lse; /* optional, written: f32 [b, hq, sq] ([total_q, hq]), log of the sum of exp of the scores */
  rapt_tensor cu_seqlens_q; /* optional: i32 or i64 [b + 1], 0 = c[0] <= ... <= c[b] = total_q: q and out are ragged */
  rapt_tensor cu_seqlens_k; /* RAPT_KV_RAGGED: i32 or i64 [b + 1], 0 = c[0] <= ... <= c[b] = total_k */
  rapt_tensor kv_seqlens;   /* i32 or i64 [b], keys in use per sequence, 0 <= len <= sk; RAPT_KV_STRIDED: optional */
  rapt_tensor block_table;  /* RAPT_KV_PAGED: i32 or i64 [b, n] */

  /* Optional; i8 and i4x2 need scales. Element i of a row of a quantised k counts as (x - zero[g]) * scale[g], where g
   * is its group: the d elements of a row are cut into equal groups. f32, shape of k with groups for d; sizes of 1 in b
   * (pages, total_k) and s broadcast. A zero needs a scale, of as many groups. Likewise for v. */
  rapt_tensor k_scale, v_scale;
  rapt_tensor k_zero, v_zero;

  /* bias, alibi and sinks are f32, bf16 or f16, each by itself. */
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

  int32_t align;        /* rapt_align; must be given for causal, window and alibi when query and key lengths differ */
  int64_t align_offset; /* RAPT_ALIGN_OFFSET only; negative is legal */

  /* After the softmax, weights are dropped at random and the others divided by 1 - dropout; which ones follows from
   * seed, offset and a weight's place alone. lse is that without dropout. */
  float dropout; /* 0 <= dropout <= 1, the share that is dropped, rounded to a multiple of 2^-16; 0: none */
  uint64_t dropout_seed;
  uint64_t dropout_offset;

  rapt_tensor indices;   /* RAPT_KV_GATHERED: i32 or i64 [b, sq, n] */
  rapt_tensor kv_counts; /* RAPT_KV_GATHERED, optional: i32 or i64 [b, sq], how many of the n count, 0 <= count <= n */

  /* Optional, beside a quantised k: the last columns of keys, which are not quantised. f32, bf16 or f16, k's shape with
   * their number for d; q's d is that of k and these. */
  rapt_tensor k_tail;

  /* Optional, of f8e4m3 queries: an element x counts as x * q_scale. f32 [b, hq, sq, 1] ([total_q, hq, 1]); sizes of 1
   * in b (total_q) and sq broadcast. */
  rapt_tensor q_scale;
} rapt_attention_args;

/* Arguments with nothing given. Inline, so that struct_size is the caller's. */
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
