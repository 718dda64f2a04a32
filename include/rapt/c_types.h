/* Types of the C interface that every operation has. Part of rapt.h. */
#ifndef RAPT_C_TYPES_H
#define RAPT_C_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef enum rapt_status {
  RAPT_OK = 0,
  RAPT_INVALID_ARGUMENT = 1, /* refused; rapt_last_error_argument() names the culprit */
  RAPT_OUT_OF_MEMORY = 2,    /* workspace or a handle could not be had; output tensors are unspecified */
  RAPT_INTERNAL_ERROR =
      3 /* what CUDA refuses, a bug in rapt, or an exception from a callback; output tensors are unspecified */
} rapt_status;

/* Enumerations are stored as int32_t, so that a wrong value is an error and never undefined behaviour. */
typedef enum rapt_dtype {
  RAPT_F32 = 0,
  RAPT_F16 = 1,  /* IEEE binary16 */
  RAPT_BF16 = 2, /* the upper half of an f32 */
  RAPT_BOOL = 3, /* one byte, 0 or 1 */
  RAPT_I32 = 4,
  RAPT_I64 = 5,
  RAPT_I8 = 6,
  RAPT_F8E4M3 = 7, /* OCP 8-bit floats; this one has NaN but no infinity (the "fn" kind) */
  RAPT_F8E5M2 = 8, /* the upper half of an f16 */
  RAPT_I4X2 = 9    /* a byte of two signed integers, that of even index in the lower half; shapes count bytes */
} rapt_dtype;

/* DLPack's codes. */
typedef enum rapt_device_type { RAPT_CPU = 1, RAPT_CUDA = 2 } rapt_device_type;

/* Instruction sets by feature; on one architecture a higher value is a superset of a lower one. */
typedef enum rapt_isa {
  RAPT_ISA_GENERIC = 0,
  RAPT_ISA_AVX2 = 1,   /* x86-64-v3 */
  RAPT_ISA_AVX512 = 2, /* x86-64-v4 */
  RAPT_ISA_NEON = 3,
  RAPT_ISA_AVX512BF16 = 4, /* with VBMI and VBMI2 */
  RAPT_ISA_AMX = 5,
  RAPT_ISA_NEONBF16 = 6 /* FEAT_BF16 */
} rapt_isa;

typedef enum rapt_kv_kind {
  RAPT_KV_STRIDED = 0, /* k [b, hk, sk, d], v [b, hk, sk, dv], optionally kv_seqlens [b] */
  RAPT_KV_RAGGED = 1,  /* k [total_k, hk, d], v [total_k, hk, dv], cu_seqlens_k [b + 1] */
  /* k [pages, hk, page_size, d], v [pages, hk, page_size, dv], block_table [b, n], kv_seqlens [b]: key j of sequence i
   * is row j % page_size of page block_table[i, j / page_size]. Sequences may share pages. Rows past a length, entries
   * past the page of a sequence's last key, and entries of pages that no row sees (a window has left them) are never
   * read. */
  RAPT_KV_PAGED = 2,
  /* k [b, hk, sk, d], v [b, hk, sk, dv], kv_seqlens [b] of any length: key j lies in row j % sk, and the last sk keys
   * are there. Takes no bias and no mask. Refused where a query row would see a key that is overwritten: windows need
   * window_left + query rows <= sk; open to the left, rows see the last sk keys if they see the last one. */
  RAPT_KV_RING = 3,
  /* k [b, hk, sk, d], v [b, hk, sk, dv], indices [b, sq, n], optionally kv_counts [b, sq]: token t of sequence i
   * attends to rows indices[i, t, :] of its k and v, in all heads. With a first dimension of 1, k and v are a pool of
   * rows that all sequences share. A negative entry (-1), and entries at or past the token's count, stand for no key;
   * nothing is read for them. A key counts as often as it is listed; entries of sk or more are refused, and so are
   * causal, window, align, bias, mask, alibi, dropout and cu_seqlens_q. */
  RAPT_KV_GATHERED = 4
} rapt_kv_kind;

/* Where query row 0 sits among the keys: row i of a sequence sits at key position i + offset. */
typedef enum rapt_align {
  RAPT_ALIGN_NONE = 0,         /* not given; refused where it matters (see rapt_attention_args) */
  RAPT_ALIGN_TOP_LEFT = 1,     /* offset 0 */
  RAPT_ALIGN_BOTTOM_RIGHT = 2, /* offset len_k - len_q of that sequence */
  RAPT_ALIGN_OFFSET = 3        /* align_offset */
} rapt_align;

/* A strided view of memory that the caller keeps alive. All-zero means "no tensor given". Sizes and strides are in
 * elements, outermost dimension first; strides may be anything but negative, and 0 repeats a dimension (inputs only).
 * Inputs are only read. */
typedef struct rapt_tensor {
  void* data;
  int32_t dtype;        /* rapt_dtype */
  int32_t device_type;  /* rapt_device_type; 0 is read as RAPT_CPU */
  int32_t device_index; /* 0 for the CPU */
  int32_t ndim;         /* 1 to 4; 0 only when no tensor is given */
  int64_t shape[4];
  int64_t strides[4];
} rapt_tensor;

#endif
