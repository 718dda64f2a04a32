/* The C interface (C11, also valid C++11). It has the functions of the C++ interface, and docs/contract.md specifies
 * it.
 *
 * Calls return a status. After any status but RAPT_OK, rapt_last_error() returns the message for the calling thread,
 * and outputs through pointers are NULL or 0. After RAPT_INVALID_ARGUMENT, no tensor has been written. No exception
 * crosses the interface. A NULL context means the default one. Other pointers must not be NULL unless stated: a NULL
 * gives RAPT_INVALID_ARGUMENT. All functions are thread-safe.
 *
 * Structures that begin with struct_size may grow at their end in later versions, so caller and library may have
 * different versions. Members that a shorter structure lacks count as all-zero, which means "not given". A longer
 * structure, of up to 4096 bytes, is accepted if the members that this library does not know are all-zero. Otherwise
 * the call fails and rapt_last_error_argument() is "struct_size". */
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

/* The message of the last failed call on this thread: "<argument>: <got>; wanted <wanted>". "" before the first
 * failure; later successes do not clear it. Valid until the next failure on this thread. Never NULL. */
RAPT_API const char* rapt_last_error(void) RAPT_NOEXCEPT;
/* The argument of that failure, by its name in the C++ API: "k", "score.scale" and so on; "" if there is none. */
RAPT_API const char* rapt_last_error_argument(void) RAPT_NOEXCEPT;

/* Contexts: threads, instruction sets and memory of calls. */

/* How calls run: threads, ISA, memory, observers and guards. rapt/context.hpp describes it. */
typedef struct rapt_context rapt_context;

/* The threads of a call. */
typedef enum rapt_executor_kind {
  RAPT_EXECUTOR_DEFAULT = 0, /* oneTBB */
  RAPT_EXECUTOR_SERIAL = 1,
  RAPT_EXECUTOR_TBB = 2,          /* oneTBB, in the arena of the calling thread */
  RAPT_EXECUTOR_OPENMP = 3,       /* an error if rapt was built without OpenMP */
  RAPT_EXECUTOR_USER = 4,         /* rapt_context_options.user_executor */
  RAPT_EXECUTOR_LOADED_OPENMP = 5 /* the process's loaded OpenMP runtime, PyTorch's if loaded; else an error */
} rapt_executor_kind;

/* Runs the workers of a call on the caller's own threads. `user` must outlive every context and plan made with it.
 * The same holds for the `user` of the allocator, the observer and the handler of guards.
 *
 * Callbacks must not longjmp. Callbacks in C++ may throw, except deallocate, while no worker is running. The call
 * then returns RAPT_INTERNAL_ERROR, or RAPT_OUT_OF_MEMORY for std::bad_alloc. */
typedef struct rapt_user_executor {
  const char* name;               /* copied; NULL: "user" */
  int (*concurrency)(void* user); /* the largest number of workers worth starting now, at least 1 */
  /* Calls work(argument, i) once for every i in [0, workers), and returns when all calls have returned. Workers may
   * run simultaneously, in any order, or one after another. Results of a worker that is never run are unwritten.
   * `work` waits only for workers that have begun and are not done. */
  void (*run)(void* user, int workers, void (*work)(void* argument, int worker), void* argument);
  void* user;
} rapt_user_executor;

/* Allocates workspace in host memory. Give both functions or neither. Both must be thread-safe. */
typedef struct rapt_allocator {
  /* Returns NULL on failure, which becomes RAPT_OUT_OF_MEMORY. */
  void* (*allocate)(void* user, size_t bytes, size_t alignment);
  void (*deallocate)(void* user, void* data, size_t bytes, size_t alignment) RAPT_NOEXCEPT;
  void* user;
} rapt_allocator;

/* Guards: optional checks of what calls read and compute; rapt/guards.hpp describes them. */

typedef enum rapt_guard { RAPT_GUARD_NAN = 0, RAPT_GUARD_SHADOW = 1, RAPT_GUARD_DETERMINISM = 2 } rapt_guard;

/* An element: its tensor by the name that errors use, "scores" for an element of the scores, or "" for no element,
 * and its index. */
typedef struct rapt_guard_place {
  const char* tensor;
  int32_t ndim;
  int64_t index[4];
} rapt_guard_place;

/* A guard's report of a call. The library makes it and sets struct_size to its own size. Members that an older
 * caller does not know are at the end. */
typedef struct rapt_guard_report {
  size_t struct_size;
  int32_t guard;      /* rapt_guard */
  int32_t is_finding; /* 0: the guard does not check calls like this one, which it reports once per context */
  const char* text;   /* the whole report on one line */
  const char* problem;
  const char* entry;
  rapt_guard_place place; /* the element with value */
  rapt_guard_place seen;  /* RAPT_GUARD_NAN: the first result that is not finite, if it is not place itself */
  double value;           /* the element's value */
  double wanted; /* RAPT_GUARD_SHADOW: the reference's value; RAPT_GUARD_DETERMINISM: the second run's; else 0 */
  double bound;  /* RAPT_GUARD_SHADOW: the largest allowed difference of value and wanted; else 0 */
} rapt_guard_report;

/* Options of a context. Start from rapt_context_options_init(). */
typedef struct rapt_context_options {
  size_t struct_size; /* sizeof(rapt_context_options) as the caller was compiled */
  int32_t executor;   /* rapt_executor_kind */
  int32_t threads;    /* largest number of workers per call; 0: as many as the executor offers */
  int32_t has_isa;    /* 0: the environment's RAPT_ISA, else any */
  int32_t isa;        /* rapt_isa: the highest instruction set to use */
  const char* kernel; /* use this entry only; NULL: the environment's RAPT_KERNEL, else the best. Copied */
  rapt_user_executor user_executor; /* RAPT_EXECUTOR_USER only */
  rapt_allocator allocator;         /* of host memory; all-zero: aligned operator new */
  /* NULL, or called after dispatch of every call with one line: problem and chosen entry. Must be thread-safe. */
  void (*observer)(void* user, const char* text);
  void* observer_user;
  void* stream; /* the cudaStream_t on which calls on CUDA memory are queued; NULL: the legacy default stream */
  /* Guards that check every call: "nan,shadow=16,tolerance=0.5,determinism", or some of these; "": none; NULL: the
   * environment's RAPT_GUARDS, else none. Copied. */
  const char* guards;
  /* Receives the guards' reports, on the calling thread, after results are written. Must be thread-safe. A report,
   * and the memory it points to, is valid only during the call. NULL: each report is one line on standard error. */
  void (*guard_handler)(void* user, const rapt_guard_report* report);
  void* guard_user;
} rapt_context_options;

/* Default options. Inline, so that struct_size is the caller's. */
static inline rapt_context_options rapt_context_options_init(void) {
  rapt_context_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  return options;
}

/* Makes a context, which several threads may use. NULL `options` are the defaults. Reads the environment. Fails if
 * the options or the environment ask for an ISA or an entry that this CPU or build lacks. */
RAPT_API rapt_status rapt_context_create(const rapt_context_options* options, rapt_context** context) RAPT_NOEXCEPT;
/* Destroys a context that no call is using. `context` may be NULL. Plans made with it stay valid. */
RAPT_API void rapt_context_destroy(rapt_context* context) RAPT_NOEXCEPT;

/* Operations. Each has a header of its name, which this one includes, with its arguments: rapt_select_topk takes
 * rapt_select_topk_args, which start from rapt_select_topk_args_init(). */

/* The operations of rapt; operations.def lists them. */
typedef enum rapt_operation {
#define RAPT_OPERATION(name, Name, NAME) RAPT_OPERATION_##NAME,
#include "rapt/operations.def"
} rapt_operation;

/* Runs an operation (one of rapt_operation) on its arguments in the caller's `workspace`: memory on the tensors'
 * device, aligned to 64 bytes, overlapping no tensor, with at least rapt_plan_workspace_bytes() bytes for this call.
 * rapt_max_workspace_bytes() is enough for many calls. NULL with 0 uses the context's memory. The functions at the
 * end of this file are typed forms of this one. */
RAPT_API rapt_status rapt_run(int32_t operation, const void* args, const rapt_context* context, void* workspace,
                              size_t workspace_bytes) RAPT_NOEXCEPT;
/* Bytes of workspace that are enough for every call with the problem of this text ("attention b=8 hq=8 sq=512 d=64
 * causal"), and for every problem that differs only in smaller batches and lengths: what a server allocates once.
 * The C++ header of an operation names these fields. Holds for the context's current number of threads. */
RAPT_API rapt_status rapt_max_workspace_bytes(const char* largest_problem, const rapt_context* context,
                                              size_t* bytes) RAPT_NOEXCEPT;

/* Writes the dropout mask: mask[b, h, i, j] is 1 if attention with this dropout, seed and offset keeps the weight of
 * query head h, row i and key j of sequence b. `mask` is RAPT_BOOL [b, hq, sq, sk] in host memory. */
RAPT_API rapt_status rapt_dropout_mask(float dropout, uint64_t seed, uint64_t offset,
                                       const rapt_tensor* mask) RAPT_NOEXCEPT;

/* Plans: which kernel a call runs and why, and repeated calls without dispatch. */

/* A validated, dispatched call, for use by all calls with the same problem. */
typedef struct rapt_plan rapt_plan;

/* An entry that dispatch considered, and why it was passed over. The refusal is "" for the chosen entry and for
 * usable ones later in the order. */
typedef struct rapt_candidate {
  const char* entry;
  const char* refusal;
} rapt_candidate;

/* Validates and dispatches the arguments once. The plan does not keep the tensors. */
RAPT_API rapt_status rapt_plan_create(int32_t operation, const void* args, const rapt_context* context,
                                      rapt_plan** plan) RAPT_NOEXCEPT;
/* Makes a plan from a problem's text, without tensors: "attention b=1 hq=8 sq=512 d=64 causal". */
RAPT_API rapt_status rapt_plan_create_from_text(const char* text, const rapt_context* context,
                                                rapt_plan** plan) RAPT_NOEXCEPT;
/* Destroys a plan that no call is using. `plan` may be NULL. */
RAPT_API void rapt_plan_destroy(rapt_plan* plan) RAPT_NOEXCEPT;

/* Runs on arguments that have the plan's problem. `workspace` has at least rapt_plan_workspace_bytes() bytes and is
 * aligned to 64 bytes; NULL with 0 uses the context's memory. */
RAPT_API rapt_status rapt_plan_run(const rapt_plan* plan, int32_t operation, const void* args, void* workspace,
                                   size_t workspace_bytes) RAPT_NOEXCEPT;

/* Facts about a plan; "" or 0 for a NULL plan. Strings live as long as the plan. */
RAPT_API const char* rapt_plan_entry(const rapt_plan* plan) RAPT_NOEXCEPT;   /* "attention_prefill.f32.avx2.q24k128" */
RAPT_API const char* rapt_plan_backend(const rapt_plan* plan) RAPT_NOEXCEPT; /* "cpu" */
RAPT_API size_t rapt_plan_workspace_bytes(const rapt_plan* plan) RAPT_NOEXCEPT;
RAPT_API int rapt_plan_threads(const rapt_plan* plan) RAPT_NOEXCEPT; /* number of workers of the call */
RAPT_API int64_t rapt_plan_work_items(const rapt_plan* plan) RAPT_NOEXCEPT;
/* All candidates, best first. *candidates lives as long as the plan. */
RAPT_API rapt_status rapt_plan_candidates(const rapt_plan* plan, const rapt_candidate** candidates,
                                          size_t* count) RAPT_NOEXCEPT;

/* The functions below copy a text to `buffer`. *size (`size` may be NULL) is set to its bytes, including the final
 * NUL. A NULL `buffer` asks for the size only. A buffer of fewer than *size bytes gives RAPT_INVALID_ARGUMENT and
 * stays unchanged. */

/* A description of the plan for people, on several lines. */
RAPT_API rapt_status rapt_plan_explain(const rapt_plan* plan, char* buffer, size_t capacity,
                                       size_t* size) RAPT_NOEXCEPT;
/* The plan's problem on one line, which rapt_plan_create_from_text() reads. */
RAPT_API rapt_status rapt_plan_problem_text(const rapt_plan* plan, char* buffer, size_t capacity,
                                            size_t* size) RAPT_NOEXCEPT;
/* Validates the arguments and describes them on one line. */
RAPT_API rapt_status rapt_problem_text(int32_t operation, const void* args, char* buffer, size_t capacity,
                                       size_t* size) RAPT_NOEXCEPT;

/* Facts about this build. Results live as long as the process. */

/* Which calls of an operation an entry is for. */
typedef enum rapt_phase {
  RAPT_PHASE_ALL = 0,
  RAPT_PHASE_PREFILL = 1, /* many query rows; delta_rule: prompts, in chunks of tokens */
  RAPT_PHASE_DECODE = 2,  /* a few rows over many keys; delta_rule: one token per sequence */
  RAPT_PHASE_NAIVE = 3    /* attention: in three steps, with the matrix of scores in memory;
                           * delta_rule, attention_backward: the formulas as they are written */
} rapt_phase;

/* A kernel of this build of rapt. */
typedef struct rapt_entry_info {
  const char* name;       /* a label; the fields below describe the entry */
  const char* backend;    /* "cpu", "cuda" */
  int32_t operation;      /* rapt_operation */
  int32_t phase;          /* rapt_phase */
  const char* arithmetic; /* the type of its products: "f32"; "f16x3" is fp16 by three products of bf16 components */
  const char* isa;        /* "avx2", "amx"; GPUs: "cuda" for any GPU, otherwise "sm90a" */
  uint32_t dtypes;        /* types that it takes for q, k and v: the bit 1 << t for each rapt_dtype t */
  int64_t min_head_dim;   /* smallest head dimension, of d and dv */
  int64_t max_head_dim;   /* largest head dimension, of d and dv */
  int64_t max_value_head_dim; /* largest dv */
  const char* unusable;       /* "", or why this machine cannot run it */
  const char* opt_in;         /* "", or why it runs only if its name or RAPT_ISA is forced */
} rapt_entry_info;

/* Every entry of this build, in dispatch order. */
RAPT_API rapt_status rapt_entries(const rapt_entry_info** entries, size_t* count) RAPT_NOEXCEPT;
/* Instruction sets (rapt_isa) built in and usable on this machine, best first. */
RAPT_API rapt_status rapt_usable_isas(const int32_t** isas, size_t* count) RAPT_NOEXCEPT;
/* Library version: "0.2.0", or "0.3.0.dev0" before the release of 0.3.0. */
RAPT_API const char* rapt_version(void) RAPT_NOEXCEPT;

/* For each operation, typed forms of rapt_run() and of the plan functions: rapt_attention(),
 * rapt_attention_with_workspace(), rapt_plan_create_attention(), rapt_plan_run_attention() and so on. */
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
