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

#include "rapt/c_types.h"
#include "rapt/export.h"
#include "rapt/operations.h"

#ifdef __cplusplus
#define RAPT_NOEXCEPT noexcept
extern "C" {
#else
#define RAPT_NOEXCEPT
#endif

/* Sets *tensor to the row-major contiguous CPU tensor of `shape` [ndim] at `data`. */
RAPT_API rapt_status rapt_tensor_contiguous(rapt_tensor* tensor, void* data, int32_t dtype, int32_t ndim,
                                            const int64_t* shape) RAPT_NOEXCEPT;

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
 * read here. Refused when options or environment ask for an ISA or entry this CPU or build lacks. */
RAPT_API rapt_status rapt_context_create(const rapt_context_options* options, rapt_context** context) RAPT_NOEXCEPT;
/* NULL is fine. No call may be using the context; plans made with it stay valid. */
RAPT_API void rapt_context_destroy(rapt_context* context) RAPT_NOEXCEPT;

/* Operations. Each has its arguments and what they mean in a header of its name, which this one includes:
 * rapt_select_topk takes rapt_select_topk_args, which start from rapt_select_topk_args_init(). */

typedef enum rapt_operation {
#define RAPT_OPERATION(name, Name, NAME) RAPT_OPERATION_##NAME,
#include "rapt/operations.def"
} rapt_operation;

/* Carries out an operation (one of rapt_operation) on its arguments in the caller's `workspace`: memory on the tensors'
 * device, 64-byte aligned, overlapping no tensor, and at least as large as rapt_plan_workspace_bytes() says of the
 * call; rapt_max_workspace_bytes() is enough for many. NULL with 0 uses the context's memory. The functions at the end
 * of this file are this one with types. */
RAPT_API rapt_status rapt_run(int32_t operation, const void* args, const rapt_context* context, void* workspace,
                              size_t workspace_bytes) RAPT_NOEXCEPT;
/* Bytes that are enough for every call with the problem of this text ("attention b=8 hq=8 sq=512 d=64 causal"), or with
 * one that differs from it only in smaller batches and lengths (the C++ header of an operation names these fields):
 * what a server allocates once. Holds for as many threads as the context now has. */
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

/* Validates and dispatches the arguments once; tensors are not kept. */
RAPT_API rapt_status rapt_plan_create(int32_t operation, const void* args, const rapt_context* context,
                                      rapt_plan** plan) RAPT_NOEXCEPT;
/* The same without tensors, from a problem's text: "attention b=1 hq=8 sq=512 d=64 causal". */
RAPT_API rapt_status rapt_plan_create_from_text(const char* text, const rapt_context* context,
                                                rapt_plan** plan) RAPT_NOEXCEPT;
/* NULL is fine. No call may be using the plan. */
RAPT_API void rapt_plan_destroy(rapt_plan* plan) RAPT_NOEXCEPT;

/* Runs on arguments that give the plan's problem. `workspace`: memory of `workspace_bytes` >=
 * rapt_plan_workspace_bytes() bytes, 64-byte aligned; or NULL and 0 for the context's. */
RAPT_API rapt_status rapt_plan_run(const rapt_plan* plan, int32_t operation, const void* args, void* workspace,
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
/* Validates the arguments and describes them on one line. */
RAPT_API rapt_status rapt_problem_text(int32_t operation, const void* args, char* buffer, size_t capacity,
                                       size_t* size) RAPT_NOEXCEPT;

/* What this build has; the results live as long as the process. */

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

/* For each operation, rapt_run() and plans of its arguments' type: rapt_attention(), rapt_attention_with_workspace(),
 * rapt_plan_create_attention(), rapt_plan_run_attention(), ... */
#define RAPT_OPERATION(name, Name, NAME)                                                                              \
  static inline rapt_status rapt_##name(const rapt_##name##_args* args, const rapt_context* context) RAPT_NOEXCEPT {  \
    return rapt_run(RAPT_OPERATION_##NAME, args, context, NULL, 0);                                                   \
  }                                                                                                                   \
  static inline rapt_status rapt_##name##_with_workspace(const rapt_##name##_args* args, const rapt_context* context, \
                                                         void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT {     \
    return rapt_run(RAPT_OPERATION_##NAME, args, context, workspace, workspace_bytes);                                \
  }                                                                                                                   \
  static inline rapt_status rapt_plan_create_##name(const rapt_##name##_args* args, const rapt_context* context,      \
                                                    rapt_plan** plan) RAPT_NOEXCEPT {                                 \
    return rapt_plan_create(RAPT_OPERATION_##NAME, args, context, plan);                                              \
  }                                                                                                                   \
  static inline rapt_status rapt_plan_run_##name(const rapt_plan* plan, const rapt_##name##_args* args,               \
                                                 void* workspace, size_t workspace_bytes) RAPT_NOEXCEPT {             \
    return rapt_plan_run(plan, RAPT_OPERATION_##NAME, args, workspace, workspace_bytes);                              \
  }
#include "rapt/operations.def"

#ifdef __cplusplus
}
#endif

#endif
