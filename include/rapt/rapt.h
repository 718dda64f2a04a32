/* The C interface (C11, also valid C++11): the same reach as the C++ one, which docs/contract.md specifies.
 *
 * Calls return a status. After anything but RAPT_OK, rapt_last_error() tells the calling thread what was wrong, outputs
 * through pointers are NULL or 0, and for RAPT_INVALID_ARGUMENT no tensor has been written. No exception crosses this
 * border. A NULL context always means the default one. Unless said otherwise pointers must not be NULL; those that are
 * give RAPT_INVALID_ARGUMENT. All functions may be called from several threads at once.
 *
 * Structures that begin with struct_size may grow at their end in later versions. Caller and library may be of
 * different ones: what a shorter structure does not have counts as all-zero, which means "not given", and a longer one,
 * of up to 4096 bytes, is taken if what this library does not know of it is all-zero. Any other is refused, and
 * rapt_last_error_argument() is "struct_size". */
#ifndef RAPT_RAPT_H
#define RAPT_RAPT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "rapt/export.h"

#ifdef __cplusplus
#define RAPT_NOEXCEPT noexcept
extern "C" {
#else
#define RAPT_NOEXCEPT
#endif

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

/* Sets *tensor to the row-major contiguous CPU tensor of `shape` [ndim] at `data`. */
RAPT_API rapt_status rapt_tensor_contiguous(rapt_tensor* tensor, void* data, int32_t dtype, int32_t ndim,
                                            const int64_t* shape) RAPT_NOEXCEPT;

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
  rapt_tensor bias;  /* optional, added to scores: [.., sk] broadcast over b, hq, sq. -inf masks */
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

/* What the last call that failed on this thread had to say: "<argument>: <got>; wanted <wanted>". "" before the first
 * failure; not cleared by later successes. Valid until the next failure on this thread. Never NULL. */
RAPT_API const char* rapt_last_error(void) RAPT_NOEXCEPT;
/* The argument that failure was about, by its name in the C++ API: "k", "score.scale", ...; "" if there is none. */
RAPT_API const char* rapt_last_error_argument(void) RAPT_NOEXCEPT;

/* Contexts: on which threads, with which instructions, from which memory. */

typedef struct rapt_context rapt_context;

typedef enum rapt_executor_kind {
  RAPT_EXECUTOR_DEFAULT = 0, /* oneTBB */
  RAPT_EXECUTOR_SERIAL = 1,
  RAPT_EXECUTOR_TBB = 2,          /* in the arena of the calling thread */
  RAPT_EXECUTOR_OPENMP = 3,       /* refused if rapt was built without OpenMP */
  RAPT_EXECUTOR_USER = 4,         /* user_executor */
  RAPT_EXECUTOR_LOADED_OPENMP = 5 /* of the runtime that the process has loaded, PyTorch's if there; refused if none */
} rapt_executor_kind;

/* Runs workers side by side on threads of the caller's own. `user` must live as long as every context and plan made
 * with it; so must that of the allocator, of the observer and of the handler of guards.
 *
 * Callbacks must not jump out (longjmp). Those that are written in C++ may throw, deallocate excepted, and run only
 * while no worker is running: the call then gives RAPT_INTERNAL_ERROR, or RAPT_OUT_OF_MEMORY for std::bad_alloc. */
typedef struct rapt_user_executor {
  const char* name;               /* copied; NULL: "user" */
  int (*concurrency)(void* user); /* the most workers worth starting now, at least 1 */
  /* Calls work(argument, i) once for every i in [0, workers) and returns when all have. Workers may run at the same
   * time, in any order, or one after another; a worker that is left out leaves results unwritten. `work` waits for
   * nobody but workers that have begun and are not done. */
  void (*run)(void* user, int workers, void (*work)(void* argument, int worker), void* argument);
  void* user;
} rapt_user_executor;

typedef struct rapt_allocator {
  /* NULL return on failure, which becomes RAPT_OUT_OF_MEMORY. Both or neither are given. Must be thread-safe. */
  void* (*allocate)(void* user, size_t bytes, size_t alignment);
  void (*deallocate)(void* user, void* data, size_t bytes, size_t alignment) RAPT_NOEXCEPT;
  void* user;
} rapt_allocator;

/* What a guard has to say of a call; rapt/guards.hpp explains guards. */

typedef enum rapt_guard { RAPT_GUARD_NAN = 0, RAPT_GUARD_SHADOW = 1, RAPT_GUARD_DETERMINISM = 2 } rapt_guard;

/* An element: its tensor by the name that errors have for it, "scores" for one of those ("": no element), and its index
 * there. */
typedef struct rapt_guard_place {
  const char* tensor;
  int32_t ndim;
  int64_t index[4];
} rapt_guard_place;

/* Made by the library: struct_size is its own, and what a caller of an older version does not know lies past its end.
 */
typedef struct rapt_guard_report {
  size_t struct_size;
  int32_t guard;      /* rapt_guard */
  int32_t is_finding; /* 0: the guard does not look at calls like this one, which is said once of a context */
  const char* text;   /* all of it on one line */
  const char* problem;
  const char* entry;
  rapt_guard_place place; /* of value */
  rapt_guard_place seen;  /* RAPT_GUARD_NAN: the first result that is not finite, if that is not place itself */
  double value;           /* what is there */
  double wanted;          /* RAPT_GUARD_SHADOW: of the reference; RAPT_GUARD_DETERMINISM: of the second run; else 0 */
  double bound;           /* RAPT_GUARD_SHADOW: how far value may be from wanted; else 0 */
} rapt_guard_report;

/* Start from rapt_context_options_init(). */
typedef struct rapt_context_options {
  size_t struct_size; /* sizeof(rapt_context_options) as the caller was compiled */
  int32_t executor;   /* rapt_executor_kind */
  int32_t threads;    /* most workers per call; 0: as many as the executor offers */
  int32_t has_isa;    /* 0: the environment's RAPT_ISA, else any */
  int32_t isa;        /* rapt_isa: the highest instruction set to use */
  const char* kernel; /* use this entry only; NULL: the environment's RAPT_KERNEL, else the best. Copied */
  rapt_user_executor user_executor; /* RAPT_EXECUTOR_USER only */
  rapt_allocator allocator;         /* of host memory; all-zero: aligned operator new */
  /* NULL or called after dispatch of every call with a one-line text: problem and chosen entry. Must be thread-safe. */
  void (*observer)(void* user, const char* text);
  void* observer_user;
  void* stream; /* of calls on CUDA memory: the cudaStream_t their work is queued on; NULL: the legacy default stream */
  /* File of `rapt tune`; "": the defaults; NULL: the one that the environment's RAPT_TUNING names, if any. Copied */
  const char* tuning;
  /* Checks of every call's numbers: "nan,shadow=16,tolerance=0.5,determinism", or some of these; "": none; NULL: the
   * environment's RAPT_GUARDS, else none. Copied. */
  const char* guards;
  /* NULL, for a line on standard error, or what gets a guard's reports, on the thread that called, when results are
   * written. Must be thread-safe. A report, and what it points to, is gone when it returns. */
  void (*guard_handler)(void* user, const rapt_guard_report* report);
  void* guard_user;
} rapt_context_options;

static inline rapt_context_options rapt_context_options_init(void) {
  rapt_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  return options;
}

/* Makes a context, which may be used from several threads at once. `options` NULL: the defaults. The environment is
 * read here. Refused when options or environment ask for an ISA or entry this CPU or build lacks, or for a tuning that
 * cannot be read or is not of this machine. */
RAPT_API rapt_status rapt_context_create(const rapt_context_options* options, rapt_context** context) RAPT_NOEXCEPT;
/* NULL is fine. No call may be using the context; plans made with it stay valid. */
RAPT_API void rapt_context_destroy(rapt_context* context) RAPT_NOEXCEPT;

/* Attention. */

/* out = softmax(score(q k^T)) v in extra memory of O(threads x block), whatever the lengths. */
RAPT_API rapt_status rapt_attention(const rapt_attention_args* args, const rapt_context* context) RAPT_NOEXCEPT;
/* The same in the caller's memory, on the tensors' device, 64-byte aligned, overlapping no tensor, and at least as
 * large as rapt_plan_workspace_bytes() says of the call; rapt_max_workspace_bytes() is enough for many. NULL with 0
 * uses the context's memory. */
RAPT_API rapt_status rapt_attention_with_workspace(const rapt_attention_args* args, const rapt_context* context,
                                                   void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;
/* Bytes that are enough for every call with the problem of this text ("attention b=8 hq=8 sq=512 d=64 causal"), or with
 * one that differs from it in smaller b, sq, sk, ragged_q or ragged_k only: what a server allocates once. Holds for as
 * many threads as the context now has. */
RAPT_API rapt_status rapt_max_workspace_bytes(const char* largest_problem, const rapt_context* context,
                                              size_t* bytes) RAPT_NOEXCEPT;

/* mask[b, h, i, j] = whether attention with these numbers keeps the weight of query head h, row i and key j of sequence
 * b: RAPT_BOOL [b, hq, sq, sk] in host memory. */
RAPT_API rapt_status rapt_dropout_mask(float dropout, uint64_t seed, uint64_t offset,
                                       const rapt_tensor* mask) RAPT_NOEXCEPT;

/* Plans: what a call would do and why, and doing it many times. */

typedef struct rapt_plan rapt_plan;

/* An entry dispatch looked at, and why it was passed over ("": chosen, or usable but later in order). */
typedef struct rapt_candidate {
  const char* entry;
  const char* refusal;
} rapt_candidate;

/* Validates and dispatches `args` once; tensors are not kept. */
RAPT_API rapt_status rapt_plan_create(const rapt_attention_args* args, const rapt_context* context,
                                      rapt_plan** plan) RAPT_NOEXCEPT;
/* The same without tensors, from a problem's text: "attention b=1 hq=8 sq=512 d=64 causal". */
RAPT_API rapt_status rapt_plan_create_from_text(const char* text, const rapt_context* context,
                                                rapt_plan** plan) RAPT_NOEXCEPT;
/* NULL is fine. No call may be using the plan. */
RAPT_API void rapt_plan_destroy(rapt_plan* plan) RAPT_NOEXCEPT;

/* Runs on `args`, which must give the plan's problem. `workspace`: memory of `workspace_bytes` >=
 * rapt_plan_workspace_bytes() bytes, 64-byte aligned; or NULL and 0 for the context's. */
RAPT_API rapt_status rapt_plan_run(const rapt_plan* plan, const rapt_attention_args* args, void* workspace,
                                   size_t workspace_bytes) RAPT_NOEXCEPT;

/* Facts about a plan; "" or 0 for a NULL plan. Strings live as long as the plan. */
RAPT_API const char* rapt_plan_entry(const rapt_plan* plan) RAPT_NOEXCEPT;   /* "attention_prefill.f32.avx2.q24k128" */
RAPT_API const char* rapt_plan_backend(const rapt_plan* plan) RAPT_NOEXCEPT; /* "cpu" */
RAPT_API size_t rapt_plan_workspace_bytes(const rapt_plan* plan) RAPT_NOEXCEPT;
RAPT_API int rapt_plan_threads(const rapt_plan* plan) RAPT_NOEXCEPT; /* workers that the call is spread over */
RAPT_API int64_t rapt_plan_work_items(const rapt_plan* plan) RAPT_NOEXCEPT;
/* All candidates, best first; *candidates lives as long as the plan. */
RAPT_API rapt_status rapt_plan_candidates(const rapt_plan* plan, const rapt_candidate** candidates,
                                          size_t* count) RAPT_NOEXCEPT;

/* The functions below copy a text. *size (may be NULL) becomes the bytes it takes, final NUL included. `buffer` NULL
 * only asks for that size; a buffer of fewer than *size bytes gives RAPT_INVALID_ARGUMENT and is left alone. */

/* Everything known about the plan, for people; several lines. */
RAPT_API rapt_status rapt_plan_explain(const rapt_plan* plan, char* buffer, size_t capacity,
                                       size_t* size) RAPT_NOEXCEPT;
/* The plan's problem on one line: what rapt_plan_create_from_text() reads. */
RAPT_API rapt_status rapt_plan_problem_text(const rapt_plan* plan, char* buffer, size_t capacity,
                                            size_t* size) RAPT_NOEXCEPT;
/* Validates `args` and describes them on one line. */
RAPT_API rapt_status rapt_problem_text(const rapt_attention_args* args, char* buffer, size_t capacity,
                                       size_t* size) RAPT_NOEXCEPT;

/* What this build has; the results live as long as the process. */

typedef enum rapt_operation {
  RAPT_OPERATION_ATTENTION = 0,
  RAPT_OPERATION_APPEND_KV = 1,
  RAPT_OPERATION_MERGE_STATES = 2,
  RAPT_OPERATION_ATTENTION_BACKWARD = 3,
  RAPT_OPERATION_DELTA_RULE = 4,
  RAPT_OPERATION_DELTA_RULE_BACKWARD = 5,
  RAPT_OPERATION_INDEX_SCORES = 6,
  RAPT_OPERATION_SELECT_TOPK = 7
} rapt_operation;

typedef enum rapt_phase { /* which calls of an operation an entry is for */
                          RAPT_PHASE_ALL = 0,
                          RAPT_PHASE_PREFILL = 1, /* many query rows */
                          RAPT_PHASE_DECODE = 2,  /* a few rows over many keys */
                          RAPT_PHASE_NAIVE = 3    /* attention: in three steps, with the matrix of scores in memory;
                                                   * delta_rule, attention_backward: the formulas as they are written */
} rapt_phase;

typedef struct rapt_entry_info {
  const char* name;       /* a label; the fields below say what the entry is */
  const char* backend;    /* "cpu", "cuda" */
  int32_t operation;      /* rapt_operation */
  int32_t phase;          /* rapt_phase */
  const char* arithmetic; /* what it multiplies in: "f32"; "f16x3" is fp16 by three products of bf16 components */
  const char* isa;        /* "avx2", "amx"; of GPUs "cuda" where any will do, else "sm90a" */
  uint32_t dtypes;        /* types of q, k and v that it takes: the bit 1 << t for each rapt_dtype t */
  int64_t min_head_size;  /* of d and dv */
  int64_t max_head_size;
  int64_t max_value_head_size; /* of dv alone */
  const char* unusable;        /* "", or why this machine cannot run it */
  const char* opt_in;          /* "", or why it runs only where its name, or RAPT_ISA, is forced */
} rapt_entry_info;

/* Every entry of this build, in dispatch order. */
RAPT_API rapt_status rapt_entries(const rapt_entry_info** entries, size_t* count) RAPT_NOEXCEPT;
/* Instruction sets (rapt_isa) built in and usable on this machine, best first. */
RAPT_API rapt_status rapt_usable_isas(const int32_t** isas, size_t* count) RAPT_NOEXCEPT;
/* Library version, "0.2.0". */
RAPT_API const char* rapt_version(void) RAPT_NOEXCEPT;

/* KV caches, and attention in parts. */

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

/* Writes the new rows of sequence i at key positions seqlens[i], seqlens[i] + 1, ..., rounded or quantised to the
 * cache's type. Scales and zeros with an element for every row are computed and written, others are read. v may be
 * columns of k's memory, and v_scale their groups of k_scale's, if v_new is the same columns of k_new. Refusals name
 * the cache's tensors "cache.k", "cache.k_scale", ... rapt/kv_cache.hpp has the bounds and corners. */
RAPT_API rapt_status rapt_append_kv(const rapt_append_kv_args* args, const rapt_context* context) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_append_kv_with_workspace(const rapt_append_kv_args* args, const rapt_context* context,
                                                   void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_create_append_kv(const rapt_append_kv_args* args, const rapt_context* context,
                                                rapt_plan** plan) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_run_append_kv(const rapt_plan* plan, const rapt_append_kv_args* args, void* workspace,
                                             size_t workspace_bytes) RAPT_NOEXCEPT;

/* Start from rapt_merge_states_args_init(). */
typedef struct rapt_merge_states_args {
  size_t struct_size;      /* sizeof(rapt_merge_states_args) as the caller was compiled */
  const rapt_tensor* outs; /* [count] tensors, f32, bf16 or f16 [.., dv] */
  const rapt_tensor* lses; /* [count] tensors, f32 [..] */
  size_t count;
  rapt_tensor out; /* written: f32, bf16 or f16 [.., dv] */
  rapt_tensor lse; /* optional, written: f32 [..] */
} rapt_merge_states_args;

static inline rapt_merge_states_args rapt_merge_states_args_init(void) {
  rapt_merge_states_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

/* Attention over `count` disjoint sets of keys merged into attention over all of them:
 * out = sum_i exp(lses[i] - lse) outs[i], lse = log(sum_i exp(lses[i])). rapt/merge_states.hpp has the corners. */
RAPT_API rapt_status rapt_merge_states(const rapt_merge_states_args* args, const rapt_context* context) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_merge_states_with_workspace(const rapt_merge_states_args* args, const rapt_context* context,
                                                      void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_create_merge_states(const rapt_merge_states_args* args, const rapt_context* context,
                                                   rapt_plan** plan) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_run_merge_states(const rapt_plan* plan, const rapt_merge_states_args* args,
                                                void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;

/* Gradients. */

/* Start from rapt_attention_backward_args_init(). Optional tensors are left all-zero. Gradients that are written have
 * the shape of what they are the gradient of, are f32, bf16 or f16 each by itself, and overlap nothing. */
typedef struct rapt_attention_backward_args {
  size_t struct_size; /* sizeof(rapt_attention_backward_args) as the caller was compiled */

  /* As the forward call had it, strided, ragged or gathered and not quantised. Its out and lse, which is not optional
   * here, are the forward's results. By pointer, because it may grow; only read. */
  const rapt_attention_args* forward;

  rapt_tensor dout;       /* f32, bf16 or f16, shape of out */
  rapt_tensor dlse;       /* optional: f32, shape of lse; for losses that depend on it */
  rapt_tensor dq, dk, dv; /* optional, written */
  rapt_tensor dbias;      /* optional, written; where the bias broadcasts, its gradients are summed */
  rapt_tensor dsinks;     /* optional, written */
  rapt_tensor dalibi;     /* optional, written: of the slopes */
} rapt_attention_backward_args;

static inline rapt_attention_backward_args rapt_attention_backward_args_init(void) {
  rapt_attention_backward_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

/* Gradients of sum(dout * out) + sum(dlse * lse) in extra memory of O(rows). At least one is wanted. Refusals name the
 * forward's tensors as rapt_attention() does. rapt/attention_backward.hpp has the corners. */
RAPT_API rapt_status rapt_attention_backward(const rapt_attention_backward_args* args,
                                             const rapt_context* context) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_attention_backward_with_workspace(const rapt_attention_backward_args* args,
                                                            const rapt_context* context, void* workspace,
                                                            size_t workspace_bytes) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_create_attention_backward(const rapt_attention_backward_args* args,
                                                         const rapt_context* context, rapt_plan** plan) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_run_attention_backward(const rapt_plan* plan, const rapt_attention_backward_args* args,
                                                      void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;

/* Linear attention with a state of fixed size: the delta rule and its relatives. */

/* How a token is written: linear S += k v^T, with a prediction S^T k taken off v (delta), after a decay (gated), or
 * both. The names are those of ONNX's LinearAttention. */
typedef enum rapt_update_rule {
  RAPT_RULE_LINEAR = 0,
  RAPT_RULE_GATED = 1,
  RAPT_RULE_DELTA = 2,
  RAPT_RULE_GATED_DELTA = 3
} rapt_update_rule;

/* Start from rapt_delta_rule_args_init(). Optional tensors are left all-zero. h is max(hk, hv), the state heads. */
typedef struct rapt_delta_rule_args {
  size_t struct_size; /* sizeof(rapt_delta_rule_args) as the caller was compiled */

  /* q, k, v, g, beta and out are f32, bf16 or f16, each by itself. */
  rapt_tensor q;             /* [b, t, hq, d]; with cu_seqlens [total, hq, d], and the others likewise. d is 1 to 256 */
  rapt_tensor k;             /* [b, t, hk, d] */
  rapt_tensor v;             /* [b, t, hv, dv]; dv is 1 to 256 */
  rapt_tensor g;             /* optional, of gated rules: log decay [h], [b, t, h] or [b, t, h, d] */
  rapt_tensor beta;          /* optional, of rules with a delta: [b, t, h]; else 1 */
  rapt_tensor out;           /* written: [b, t, max(hq, h), dv] */
  rapt_tensor initial_state; /* optional: f32 or bf16 [b, h, d, dv]; else 0 */
  rapt_tensor final_state;   /* optional, written: f32 or bf16 [b, h, d, dv]. It may be initial_state itself */
  rapt_tensor cu_seqlens;    /* optional: i32 or i64 [b + 1], 0 = c[0] <= ... <= c[b] = total */

  /* Optional: i32 or i64 [b]. The states are pools [slots, h, d, dv], and sequence i starts from slot state_slots[i]
   * and leaves its state there; of a negative slot nothing is read or written. Or [b, n]: the state after token j goes
   * to slot state_slots[i, j], and sequence i starts from state_slots[i, accepted[i] - 1]. */
  rapt_tensor state_slots;
  rapt_tensor accepted; /* optional, with state_slots [b, n]: i32 or i64 [b], 1 to n; else 1 */
  rapt_tensor a_log;    /* optional, of the gate: f32 [h]; else 0 */
  rapt_tensor dt_bias;  /* optional, of the gate: f32 [h, d] if g has d, else [h]; else 0 */

  int32_t rule;      /* rapt_update_rule; RAPT_RULE_GATED_DELTA unless set */
  int32_t has_scale; /* 0: d^-1/2 */
  float scale;       /* of q */

  int32_t l2norm_qk;            /* nonzero: q and k are divided by sqrt(sum of squares + 1e-6) */
  int32_t beta_sigmoid;         /* nonzero: beta counts as sigmoid(beta) */
  int32_t beta_double;          /* nonzero: beta, or its sigmoid, twice */
  int32_t gate;                 /* nonzero: g counts as -exp(a_log) softplus(g + dt_bias) or, with a bound, as */
  int32_t has_gate_lower_bound; /* gate_lower_bound sigmoid(exp(a_log) (g + dt_bias)) */
  float gate_lower_bound;       /* not above 0 */
} rapt_delta_rule_args;

static inline rapt_delta_rule_args rapt_delta_rule_args_init(void) {
  rapt_delta_rule_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.rule = RAPT_RULE_GATED_DELTA;
  return args;
}

/* For each sequence and state head, with S [d, dv] in fp32, token by token:
 * S = diag(exp(g)) S; u = beta (v - S^T k); S = S + k u^T; out = scale S^T q. Without a delta u = v. Either of hk and
 * hv divides the other, and so do hq and h; head i of the fewer serves the following ratio of the more.
 * rapt/delta_rule.hpp has the corners. */
RAPT_API rapt_status rapt_delta_rule(const rapt_delta_rule_args* args, const rapt_context* context) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_delta_rule_with_workspace(const rapt_delta_rule_args* args, const rapt_context* context,
                                                    void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_create_delta_rule(const rapt_delta_rule_args* args, const rapt_context* context,
                                                 rapt_plan** plan) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_run_delta_rule(const rapt_plan* plan, const rapt_delta_rule_args* args, void* workspace,
                                              size_t workspace_bytes) RAPT_NOEXCEPT;

/* Start from rapt_delta_rule_backward_args_init(). Optional tensors are left all-zero. Gradients that are written have
 * the shape of what they are the gradient of, and overlap nothing. */
typedef struct rapt_delta_rule_backward_args {
  size_t struct_size; /* sizeof(rapt_delta_rule_backward_args) as the caller was compiled */

  /* As the forward call had it, but for out and final_state, which are not looked at. initial_state is as it was before
   * that call; states in pools (state_slots) have no gradients. By pointer, because it may grow; only read. */
  const rapt_delta_rule_args* forward;

  rapt_tensor dout;                  /* optional: f32, bf16 or f16, shape of out; else 0 */
  rapt_tensor dfinal_state;          /* optional: f32 or bf16, shape of final_state; else 0 */
  rapt_tensor dq, dk, dv, dg, dbeta; /* optional, written: f32, bf16 or f16, each by itself */
  rapt_tensor dinitial_state;        /* optional, written: f32 or bf16 */
  rapt_tensor da_log, ddt_bias;      /* optional, written: f32; sums over all tokens, as is dg of a g of [h] */
} rapt_delta_rule_backward_args;

static inline rapt_delta_rule_backward_args rapt_delta_rule_backward_args_init(void) {
  rapt_delta_rule_backward_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

/* Gradients of sum(dout * out) + sum(dfinal_state * final_state), through norms, gates and sigmoid where the forward
 * does them. States are computed again, from one in every 24 tokens, which the workspace keeps. Refusals name the
 * forward's tensors as rapt_delta_rule() does. rapt/delta_rule_backward.hpp has the corners. */
RAPT_API rapt_status rapt_delta_rule_backward(const rapt_delta_rule_backward_args* args,
                                              const rapt_context* context) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_delta_rule_backward_with_workspace(const rapt_delta_rule_backward_args* args,
                                                             const rapt_context* context, void* workspace,
                                                             size_t workspace_bytes) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_create_delta_rule_backward(const rapt_delta_rule_backward_args* args,
                                                          const rapt_context* context, rapt_plan** plan) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_run_delta_rule_backward(const rapt_plan* plan, const rapt_delta_rule_backward_args* args,
                                                       void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;

/* The indexer of sparse attention (DeepSeek Sparse Attention, DSA): which keys a query should attend to. */

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

/* scores[i, j] = scale * k_scale[j] * sum over h of weights[i, h] * relu(q[i, h] . k[j]), for the keys j that query i
 * sees, and of each query the n keys of the largest scores: at least one of scores and indices is given. Without scores
 * a few times n of them, or about a thousand, are kept for each query at work. The selection is that of
 * rapt_select_topk(), of the keys that are seen.
 */
RAPT_API rapt_status rapt_index_scores(const rapt_index_scores_args* args, const rapt_context* context) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_index_scores_with_workspace(const rapt_index_scores_args* args, const rapt_context* context,
                                                      void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_create_index_scores(const rapt_index_scores_args* args, const rapt_context* context,
                                                   rapt_plan** plan) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_run_index_scores(const rapt_plan* plan, const rapt_index_scores_args* args,
                                                void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;

/* Start from rapt_select_topk_args_init(). */
typedef struct rapt_select_topk_args {
  size_t struct_size;  /* sizeof(rapt_select_topk_args) as the caller was compiled */
  rapt_tensor scores;  /* f32 [.., sk]; -inf: not to be selected */
  rapt_tensor indices; /* written: i32 [.., n], n >= 1 */
} rapt_select_topk_args;

static inline rapt_select_topk_args rapt_select_topk_args_init(void) {
  rapt_select_topk_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return args;
}

/* The positions of the n largest scores of each row, largest first; of equal ones the lower position first. -0 equals
 * 0, and NaN counts as the largest. Where fewer than n are above -inf the rest of indices is -1. */
RAPT_API rapt_status rapt_select_topk(const rapt_select_topk_args* args, const rapt_context* context) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_select_topk_with_workspace(const rapt_select_topk_args* args, const rapt_context* context,
                                                     void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_create_select_topk(const rapt_select_topk_args* args, const rapt_context* context,
                                                  rapt_plan** plan) RAPT_NOEXCEPT;
RAPT_API rapt_status rapt_plan_run_select_topk(const rapt_plan* plan, const rapt_select_topk_args* args,
                                               void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif
