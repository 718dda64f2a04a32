/* Contexts: executors, instruction sets, kernels, allocators, observers. */
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

/* Makes a context of `options`, runs the fixture on it and compares: results may be off by less than `limit`. */
static void run_within(double limit, const rapt_context_options* options) {
  fixture f;
  rapt_context* context = NULL;
  fixture_init(&f);
  CHECK_OK(rapt_context_create(options, &context));
  CHECK(context != NULL);
  CHECK_OK(rapt_attention(&f.args, context));
  CHECK(reference_error(&f.args) < limit);
  rapt_context_destroy(context);
}

static void run_with(const rapt_context_options* options) {
  run_within(2e-6, options);
}

/* The context can be made, but its entry does not take the fixture. */
static void refused_with(const rapt_context_options* options) {
  fixture f;
  rapt_context* context = NULL;
  fixture_init(&f);
  CHECK_OK(rapt_context_create(options, &context));
  CHECK(rapt_attention(&f.args, context) == RAPT_INVALID_ARGUMENT);
  CHECK(strstr(rapt_last_error(), "element types") != NULL);
  rapt_context_destroy(context);
}

typedef struct pool {
  int runs;
  int workers;
} pool;

static int pool_concurrency(void* user) {
  (void)user;
  return 3;
}

/* Last worker first: the order is the executor's to choose. */
static void pool_run(void* user, int workers, void (*work)(void* argument, int index), void* argument) {
  pool* p = user;
  ++p->runs;
  p->workers += workers;
  for (int i = workers - 1; i >= 0; --i) work(argument, i);
}

static void test_executors(void) {
  rapt_context_options options = rapt_context_options_init();
  rapt_context* context;
  run_with(NULL);
  run_with(&options);
  options.threads = 2;
  options.executor = RAPT_EXECUTOR_SERIAL;
  run_with(&options);
  options.executor = RAPT_EXECUTOR_TBB;
  run_with(&options);
  const int openmp[] = {RAPT_EXECUTOR_OPENMP, RAPT_EXECUTOR_LOADED_OPENMP};
  for (int i = 0; i < 2; ++i) {
    options.executor = openmp[i];
    if (rapt_context_create(&options, &context) == RAPT_OK) { /* else built without it, which must be said */
      rapt_context_destroy(context);
      run_with(&options);
    } else {
      CHECK(strstr(rapt_last_error(), "OpenMP") != NULL);
    }
  }

  options.executor = 6;
  CHECK_REFUSED(rapt_context_create(&options, &context), "executor");
  options.executor = RAPT_EXECUTOR_SERIAL;
  options.threads = -1;
  CHECK(rapt_context_create(&options, &context) == RAPT_INVALID_ARGUMENT);
}

/* A problem that is worth more than one worker, run by the caller's own threads. */
static void test_user_executor(void) {
  enum { S = 256, LONG_D = 64, HEADS = 8, COUNT = HEADS * S * LONG_D };
  rapt_context_options options = rapt_context_options_init();
  rapt_context* context = NULL;
  rapt_plan* plan = NULL;
  pool user = {0, 0};
  float* data = calloc(4 * COUNT, sizeof *data);
  float* serial_out = data + 3 * COUNT;
  float* out = calloc(COUNT, sizeof *out);
  fill(data, 3 * COUNT, 10);

  rapt_attention_args args = rapt_attention_args_init();
  args.q = contiguous(data, RAPT_F32, 4, 1, HEADS, S, LONG_D);
  args.k = contiguous(data + COUNT, RAPT_F32, 4, 1, HEADS, S, LONG_D);
  args.v = contiguous(data + 2 * COUNT, RAPT_F32, 4, 1, HEADS, S, LONG_D);
  args.out = contiguous(out, RAPT_F32, 4, 1, HEADS, S, LONG_D);

  options.executor = RAPT_EXECUTOR_USER;
  options.user_executor.user = &user;
  CHECK_REFUSED(rapt_context_create(&options, &context), "user_executor.concurrency");
  options.user_executor.concurrency = pool_concurrency;
  CHECK_REFUSED(rapt_context_create(&options, &context), "user_executor.run");
  options.user_executor.run = pool_run;
  CHECK_OK(rapt_context_create(&options, &context));
  CHECK_OK(rapt_plan_create_attention(&args, context, &plan));
  CHECK(rapt_plan_threads(plan) > 1 && rapt_plan_threads(plan) <= 3);
  CHECK_OK(rapt_attention(&args, context));
  CHECK(user.runs > 0 && user.workers >= 2);
  rapt_plan_destroy(plan);
  rapt_context_destroy(context);

  options = rapt_context_options_init();
  options.executor = RAPT_EXECUTOR_SERIAL;
  CHECK_OK(rapt_context_create(&options, &context));
  args.out.data = serial_out;
  CHECK_OK(rapt_attention(&args, context));
  CHECK(memcmp(out, serial_out, COUNT * sizeof *out) == 0); /* the schedule leaves the bits alone */
  rapt_context_destroy(context);
  free(out);
  free(data);
}

typedef struct heap {
  size_t live_bytes;
  int allocations;
  int failing;
} heap;

static void* heap_allocate(void* user, size_t bytes, size_t alignment) {
  heap* h = user;
  if (h->failing) return NULL;
  ++h->allocations;
  h->live_bytes += bytes;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void heap_deallocate(void* user, void* data, size_t bytes, size_t alignment) {
  heap* h = user;
  (void)alignment;
  h->live_bytes -= bytes;
  free(data);
}

static void test_allocator(void) {
  fixture f;
  heap user = {0, 0, 0};
  rapt_context* context = NULL;
  rapt_plan* plan = NULL;
  rapt_context_options options = rapt_context_options_init();
  options.executor = RAPT_EXECUTOR_SERIAL;
  options.allocator.user = &user;
  options.allocator.deallocate = heap_deallocate;
  CHECK_REFUSED(rapt_context_create(&options, &context), "allocator.allocate");
  options.allocator.allocate = heap_allocate;
  run_with(&options);
  CHECK(user.allocations > 0 && user.live_bytes == 0);

  user.failing = 1;
  fixture_init(&f);
  CHECK_OK(rapt_context_create(&options, &context));
  CHECK(rapt_attention(&f.args, context) == RAPT_OUT_OF_MEMORY);
  CHECK(strcmp(rapt_last_error_argument(), "") == 0 && rapt_last_error()[0] != '\0');
  user.failing = 0;
  CHECK_OK(rapt_attention(&f.args, context)); /* the context survives */
  CHECK(reference_error(&f.args) < 2e-6);

  CHECK_OK(rapt_plan_create_attention(&f.args, context, &plan)); /* a plan keeps what it needs of its context */
  rapt_context_destroy(context);
  CHECK_OK(rapt_plan_run_attention(plan, &f.args, NULL, 0));
  rapt_plan_destroy(plan);
  CHECK(user.live_bytes == 0);
}

static void test_isa_and_kernel(void) {
  const int32_t* isas = NULL;
  const rapt_entry_info* entries = NULL;
  size_t isa_count = 0, entry_count = 0, usable = 0;
  rapt_context* context = NULL;

  CHECK_OK(rapt_usable_isas(&isas, &isa_count));
  CHECK(isa_count > 0);
  for (size_t i = 0; i < isa_count; ++i) {
    rapt_context_options options = rapt_context_options_init();
    options.has_isa = 1;
    options.isa = isas[i];
    run_with(&options);
  }
  rapt_context_options options = rapt_context_options_init();
  options.has_isa = 1;
  options.isa = RAPT_ISA_NEONBF16 + 1; /* none of this version */
  CHECK_REFUSED(rapt_context_create(&options, &context), "isa");

  CHECK_OK(rapt_entries(&entries, &entry_count));
  CHECK(entry_count > 0);
  for (size_t i = 0; i < entry_count; ++i) {
    CHECK(entries[i].name[0] != '\0' && entries[i].backend[0] != '\0' && entries[i].isa[0] != '\0');
    CHECK(entries[i].dtypes != 0 && entries[i].max_head_dim >= entries[i].min_head_dim);
    if (entries[i].operation != RAPT_OPERATION_ATTENTION) continue;
    if (entries[i].unusable[0] != '\0') continue;
    ++usable;
    options = rapt_context_options_init();
    options.kernel = entries[i].name;
    if ((entries[i].dtypes & 1u << RAPT_F32) == 0) {
      refused_with(&options); /* the fixture is of f32 */
    } else {
      run_within(2e-6, &options);
    }
  }
  CHECK(usable > 0);
  options.kernel = "no_such_kernel";
  CHECK(rapt_context_create(&options, &context) == RAPT_INVALID_ARGUMENT && context == NULL);
  CHECK(strstr(rapt_last_error(), "no_such_kernel") != NULL);
}

static void observe(void* user, const char* text) {
  snprintf(user, 512, "%s", text);
}

static void test_observer(void) {
  char seen[512] = "";
  rapt_context_options options = rapt_context_options_init();
  options.observer = observe;
  options.observer_user = seen;
  run_with(&options);
  CHECK(strstr(seen, "attention b=2 hq=4 hk=2 sq=5 sk=7 d=8 dv=3 lse") != NULL);
  CHECK(strstr(seen, "attention_") != NULL);
}

typedef struct seen_report {
  int reports;
  char place[32], seen[32];
  int64_t index[4];
} seen_report;

static void note_report(void* user, const rapt_guard_report* report) {
  seen_report* s = user;
  ++s->reports;
  CHECK(report->struct_size == sizeof *report);
  CHECK(report->guard == RAPT_GUARD_NAN && report->is_finding);
  CHECK(strstr(report->text, report->problem) != NULL && strstr(report->text, report->entry) != NULL);
  CHECK(report->value != report->value && report->place.ndim == 4 && report->seen.ndim == 4);
  snprintf(s->place, sizeof s->place, "%s", report->place.tensor);
  snprintf(s->seen, sizeof s->seen, "%s", report->seen.tensor);
  memcpy(s->index, report->place.index, sizeof s->index);
}

static void test_guards(void) {
  fixture f;
  seen_report seen = {0};
  rapt_context* context = NULL;
  rapt_context_options options = rapt_context_options_init();
  options.guards = "nan,shadows";
  CHECK_REFUSED(rapt_context_create(&options, &context), "guards");
  options.guards = "nan,shadow=4,determinism";
  options.guard_handler = note_report;
  options.guard_user = &seen;
  run_with(&options);
  CHECK(seen.reports == 0);

  fixture_init(&f);
  CHECK_OK(rapt_context_create(&options, &context));
  float* q = f.args.q.data;
  q[f.args.q.strides[0] + 3 * f.args.q.strides[2]] = (float)strtod("nan", NULL);
  CHECK_OK(rapt_attention(&f.args, context));
  CHECK(seen.reports == 1 && strcmp(seen.place, "q") == 0 && strcmp(seen.seen, "out") == 0);
  CHECK(seen.index[0] == 1 && seen.index[1] == 0 && seen.index[2] == 3 && seen.index[3] == 0);
  rapt_context_destroy(context);
}

void test_contexts(void) {
  test_executors();
  test_user_executor();
  test_allocator();
  test_isa_and_kernel();
  test_observer();
  test_guards();
}
