/* The indexer of sparse attention (DeepSeek Sparse Attention, DSA): which keys a query should attend to. Part of
 * rapt.h. */
#ifndef RAPT_INDEX_SCORES_H
#define RAPT_INDEX_SCORES_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_index_scores(&args, context). scores[i, j] = scale * k_scale[j] * sum over h of weights[i, h] * relu(q[i, h] .
 * k[j]), for the keys j that query i sees, and of each query the n keys of the largest scores: at least one of scores
 * and indices is given. Without scores a few times n of them, or about a thousand, are kept for each query at work. The
 * selection is that of rapt_select_topk(), of the keys that are seen.
 */

/* Start from rapt_index_scores_args_init(). Symbols: b sequences of sq queries with h index heads each, and sk keys,
 * which all heads share; d head size. Optional tensors are left all-zero. */
typedef struct rapt_index_scores_args {
  size_t struct_size; /* sizeof(rapt_index_scores_args) as the caller was compiled */

  rapt_tensor q;       /* f32, bf16 or f16 [b, sq, h, d] */
  rapt_tensor k;       /* these types, i8, f8e4m3 or f8e5m2 [b, sk, d]; with block_table [pages, page_size, d] */
  rapt_tensor weights; /* f32 [b, sq, h] */
  rapt_tensor scores;  /* optional, written: f32 [b, sq, sk]; -inf for keys that a query does not see */
  rapt_tensor indices; /* optional, written: i32 [b, sq, n], n >= 1: the n best keys of each query, best first */
  rapt_tensor k_scale; /* f32 [b, sk] ([pages, page_size]): one for each row of a quantised k; i8 needs it */
  rapt_tensor seqlens; /* optional: i32 or i64 [b], keys in use, 0 <= len <= sk. Rows past it are never read */
  /* Optional: i32 or i64 [b, m]: key j of sequence i is row j % page_size of page block_table[i, j / page_size]; needs
   * seqlens. */
  rapt_tensor block_table;
  rapt_tensor key_begin, key_end; /* optional: i32 or i64 [b, sq]: a query sees keys [begin, end) only */

  int32_t has_scale; /* 0: d^-1/2 */
  float scale;       /* any finite value */
  int32_t relu;      /* nonzero: of each head's product, before it is weighted. Nonzero unless set */
  int32_t causal;    /* nonzero: keys j <= i + offset only. Nonzero unless set */

  int32_t align;        /* rapt_align; must be given for causal when query and key lengths differ */
  int64_t align_offset; /* RAPT_ALIGN_OFFSET only; negative is legal */
} rapt_index_scores_args;

static inline rapt_index_scores_args rapt_index_scores_args_init(void) {
  rapt_index_scores_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.relu = args.causal = 1;
  return args;
}

#ifdef __cplusplus
}
#endif

#endif
