/* The indexer of DeepSeek Sparse Attention (DSA): chooses the keys that a query attends to. Part of rapt.h. */
#ifndef RAPT_INDEX_SCORES_H
#define RAPT_INDEX_SCORES_H

#include <string.h>

#include "rapt/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rapt_index_scores(&args, context) computes scores[i, j] = scale * k_scale[j] * sum over h of weights[i, h] *
 * relu(q[i, h] . k[j]) for the keys j that query i sees, and the n keys with the largest scores of each query. Give
 * scores, indices or both. Without scores, the call keeps a few times n of them, or about a thousand, per query that
 * it works on. The selection follows the order of rapt_select_topk(), among the keys that the query sees. */

/* Arguments of rapt_index_scores. Start from rapt_index_scores_args_init(). Leave optional tensors all-zero.
 * Symbols: b sequences, sq queries with h index heads each, sk keys, which all index heads share, d head dimension. */
typedef struct rapt_index_scores_args {
  size_t struct_size; /* sizeof(rapt_index_scores_args) as the caller was compiled */

  rapt_tensor q;       /* f32, bf16 or f16 [b, sq, h, d] */
  rapt_tensor k;       /* f32, bf16, f16, i8, f8e4m3 or f8e5m2 [b, sk, d]; with block_table [pages, page_size, d] */
  rapt_tensor weights; /* f32 [b, sq, h] */
  rapt_tensor scores;  /* optional, written: f32 [b, sq, sk]; -inf for keys that a query does not see */
  rapt_tensor indices; /* optional, written: i32 [b, sq, n], n >= 1: the n best keys of each query, best first */
  rapt_tensor k_scale; /* f32 [b, sk] ([pages, page_size]): one scale per row of a quantised k; required for i8 */
  rapt_tensor seqlens; /* optional: i32 or i64 [b], number of keys, 0 <= len <= sk. Rows past it are never read */
  /* Optional: i32 or i64 [b, m]: key j of sequence i is row j % page_size of page block_table[i, j / page_size].
   * Requires seqlens. */
  rapt_tensor block_table;
  rapt_tensor key_begin, key_end; /* optional: i32 or i64 [b, sq]: a query sees keys [begin, end) only */

  int32_t has_scale; /* 0: d^-1/2 */
  float scale;       /* any finite value */
  int32_t relu;      /* nonzero (default): ReLU of each head's product, before its weight */
  int32_t causal;    /* nonzero (default): keys j <= i + offset only */

  int32_t align;        /* rapt_align; required for causal if query and key lengths differ */
  int64_t align_offset; /* RAPT_ALIGN_OFFSET only; may be negative */
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
