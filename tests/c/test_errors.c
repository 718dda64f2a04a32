/* What is wrong is refused with the name of the argument, and nothing is written. */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

static fixture f;

/* rapt_attention() refuses the arguments that `break_it` makes of good ones, naming `argument`. */
#define CHECK_BAD(break_it, argument)                       \
  do {                                                      \
    static fixture before;                                  \
    fixture_init(&f);                                       \
    break_it;                                               \
    before = f;                                             \
    CHECK_REFUSED(rapt_attention(&f.args, NULL), argument); \
    CHECK(memcmp(before.out, f.out, sizeof f.out) == 0);    \
    CHECK(memcmp(before.lse, f.lse, sizeof f.lse) == 0);    \
  } while (0)

static void test_bad_fields(void) {
  static uint8_t mask[SK];
  CHECK_BAD(f.args.struct_size = 0, "struct_size");
  CHECK_BAD(f.args.kv_kind = 5, "kv.kind");
  CHECK_BAD(f.args.kv_kind = -1, "kv.kind");
  CHECK_BAD(f.args.kv_kind = RAPT_KV_PAGED, "kv.block_table");
  CHECK_BAD(f.args.kv_kind = RAPT_KV_RING, "kv.seqlens");
  CHECK_BAD((f.args.k.dtype = RAPT_I8, f.args.v.dtype = RAPT_I8), "kv.k_scale");
  CHECK_BAD(f.args.k_scale = contiguous(f.q, RAPT_F32, 4, 1, HK, 1, 1), "kv.k_scale"); /* f32 has none */
  CHECK_BAD(f.args.v_zero = contiguous(f.q, RAPT_F32, 4, 1, HK, 1, 1), "kv.v_zero");
  CHECK_BAD(f.args.q_scale = contiguous(f.k, RAPT_F32, 4, 1, HQ, 1, 1), "q_scale"); /* nor have queries of f32 */
  CHECK_BAD(f.args.q_scale.dtype = (f.args.q_scale.ndim = 1, -1), "q_scale.dtype");
  CHECK_BAD(f.args.q.dtype = RAPT_F8E5M2, "q");
  CHECK_BAD(f.args.k_zero.dtype = (f.args.k_zero.ndim = 1, -1), "kv.k_zero.dtype");
  CHECK_BAD(f.args.align = 4, "score.align");
  CHECK_BAD(f.args.q.ndim = 5, "q");
  CHECK_BAD(f.args.q.ndim = -1, "q");
  CHECK_BAD(f.args.q.dtype = 256, "q.dtype"); /* would be f32 if cut to a byte */
  CHECK_BAD(f.args.v.dtype = -1, "v.dtype");
  CHECK_BAD(f.args.mask.data = mask, "score.mask"); /* data without a shape is no "not given" */
  CHECK_BAD(memset(&f.args.q, 0, sizeof f.args.q), "q");
  CHECK_BAD(f.args.q.dtype = RAPT_I32, "q");
  CHECK_BAD(f.args.k.dtype = RAPT_BF16, "v"); /* k and v of two types */
  CHECK_BAD(f.args.lse.dtype = RAPT_F16, "lse");
  CHECK_BAD((f.args.q.dtype = RAPT_F16, f.args.q.data = (char*)f.q + 1), "q");
  CHECK_BAD(f.args.k.data = NULL, "k");
  CHECK_BAD(f.args.k.shape[1] = f.args.v.shape[1] = 3, "k");
  CHECK_BAD(f.args.v.strides[0] = -1, "v");
  CHECK_BAD(f.args.v.device_type = RAPT_CUDA, "v");
  CHECK_BAD(f.args.v.device_index = 1, "v");
  CHECK_BAD(f.args.causal = 1, "score.align"); /* lengths differ and no alignment is given */
  CHECK_BAD((f.args.has_scale = 1, f.args.scale = 1.0f / 0.0f), "score.scale");
  CHECK_BAD(f.args.softcap = -1, "score.softcap");
  CHECK_BAD(f.args.dropout = 1.5f, "score.dropout");
  CHECK_BAD(f.args.out.data = f.q, "out");
}

static void test_bad_dropout_masks(void) {
  uint8_t kept[24];
  memset(kept, 5, sizeof kept);
  rapt_tensor mask = contiguous(kept, RAPT_BOOL, 4, 1, 2, 3, 4);
  CHECK_REFUSED(rapt_dropout_mask(-1, 1, 2, &mask), "dropout");
  CHECK_REFUSED(rapt_dropout_mask(0.5f, 1, 2, NULL), "mask");
  mask.dtype = RAPT_I8;
  CHECK_REFUSED(rapt_dropout_mask(0.5f, 1, 2, &mask), "mask");
  memset(&mask, 0, sizeof mask);
  CHECK_REFUSED(rapt_dropout_mask(0.5f, 1, 2, &mask), "mask");
  CHECK(kept[0] == 5 && kept[23] == 5);
}

static void test_bad_operations(void) {
  const int32_t wrong[] = {-1, RAPT_OPERATION_SELECT_TOPK + 1000, INT32_MAX};
  fixture_init(&f);
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    rapt_plan* plan = NULL;
    CHECK_REFUSED(rapt_run(wrong[i], &f.args, NULL, NULL, 0), "operation");
    CHECK_REFUSED(rapt_plan_create(wrong[i], &f.args, NULL, &plan), "operation");
    CHECK_REFUSED(rapt_problem_text(wrong[i], &f.args, NULL, 0, NULL), "operation");
    CHECK(plan == NULL);
  }
}

static void test_null_pointers(void) {
  rapt_plan* plan = NULL;
  rapt_context* context = NULL;
  const rapt_candidate* candidates;
  const rapt_entry_info* entries;
  const int32_t* isas;
  size_t size = 1;
  const int64_t shape[] = {1};
  rapt_tensor tensor;
  fixture_init(&f);

  CHECK_REFUSED(rapt_attention(NULL, NULL), "args");
  CHECK_REFUSED(rapt_tensor_contiguous(NULL, f.q, RAPT_F32, 1, shape), "tensor");
  CHECK_REFUSED(rapt_tensor_contiguous(&tensor, f.q, RAPT_F32, 1, NULL), "shape");
  CHECK_REFUSED(rapt_context_create(NULL, NULL), "context");
  CHECK_REFUSED(rapt_plan_create_attention(NULL, NULL, &plan), "args");
  CHECK_REFUSED(rapt_plan_create_attention(&f.args, NULL, NULL), "plan");
  CHECK_REFUSED(rapt_plan_create_from_text(NULL, NULL, &plan), "text");
  CHECK_REFUSED(rapt_plan_create_from_text("attention sq=1 d=1", NULL, NULL), "plan");
  CHECK_REFUSED(rapt_plan_run_attention(NULL, &f.args, NULL, 0), "plan");
  CHECK_REFUSED(rapt_plan_candidates(NULL, &candidates, &size), "plan");
  CHECK(candidates == NULL && size == 0);
  CHECK_REFUSED(rapt_plan_explain(NULL, NULL, 0, &size), "plan");
  CHECK_REFUSED(rapt_plan_problem_text(NULL, NULL, 0, &size), "plan");
  CHECK_REFUSED(rapt_problem_text(RAPT_OPERATION_ATTENTION, NULL, NULL, 0, &size), "args");
  CHECK_REFUSED(rapt_entries(NULL, &size), "entries");
  CHECK_REFUSED(rapt_entries(&entries, NULL), "count");
  CHECK_REFUSED(rapt_usable_isas(NULL, &size), "isas");
  CHECK_REFUSED(rapt_usable_isas(&isas, NULL), "count");

  rapt_context_destroy(NULL);
  rapt_plan_destroy(NULL);
  CHECK(strcmp(rapt_plan_entry(NULL), "") == 0 && strcmp(rapt_plan_backend(NULL), "") == 0);
  CHECK(rapt_plan_workspace_bytes(NULL) == 0 && rapt_plan_threads(NULL) == 0 && rapt_plan_work_items(NULL) == 0);

  rapt_context_options options = rapt_context_options_init();
  options.struct_size = 4;
  context = (rapt_context*)&options;
  CHECK_REFUSED(rapt_context_create(&options, &context), "struct_size");
  CHECK(context == NULL); /* a failed call leaves no stale handle */
}

static void test_tensor_contiguous(void) {
  rapt_tensor tensor;
  const int64_t shape[] = {2, 3, 4, 5};
  CHECK_OK(rapt_tensor_contiguous(&tensor, f.q, RAPT_F32, 4, shape));
  CHECK(tensor.data == f.q && tensor.dtype == RAPT_F32 && tensor.device_type == RAPT_CPU && tensor.ndim == 4);
  CHECK(tensor.strides[0] == 60 && tensor.strides[1] == 20 && tensor.strides[2] == 5 && tensor.strides[3] == 1);
  CHECK_REFUSED(rapt_tensor_contiguous(&tensor, f.q, RAPT_F32, 5, shape), "ndim");
  CHECK_REFUSED(rapt_tensor_contiguous(&tensor, f.q, 10, 4, shape), "dtype");
  const int64_t huge[] = {INT64_MAX, 2};
  CHECK(rapt_tensor_contiguous(&tensor, f.q, RAPT_F32, 2, huge) == RAPT_INVALID_ARGUMENT);
  CHECK(tensor.data == NULL && tensor.ndim == 0);
}

static void* first_error_of_thread(void* unused) {
  (void)unused;
  CHECK(strcmp(rapt_last_error(), "") == 0 && strcmp(rapt_last_error_argument(), "") == 0);
  CHECK_REFUSED(rapt_attention(NULL, NULL), "args");
  return NULL;
}

static void test_messages_are_per_thread(void) {
  pthread_t thread;
  CHECK_REFUSED(rapt_plan_run_attention(NULL, NULL, NULL, 0), "plan");
  CHECK(pthread_create(&thread, NULL, first_error_of_thread, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(strcmp(rapt_last_error_argument(), "plan") == 0);
  CHECK(rapt_version()[0] != '\0'); /* a success leaves the message alone */
  CHECK(strncmp(rapt_last_error(), "plan: ", 6) == 0);
}

/* `size` bytes as a caller passes them whose structure has that size: those of `given`, then zeros, then what is none
 * of the structure's. */
static void* resized(const void* given, size_t known, size_t size) {
  char* block = malloc(size + 4096);
  memset(block, 0xff, size + 4096);
  memset(block, 0, size);
  memcpy(block, given, size < known ? size : known);
  if (size >= sizeof size) memcpy(block, &size, sizeof size);
  return block;
}

static rapt_status attention_of_size(size_t size, int last_byte) {
  fixture_init(&f);
  char* args = resized(&f.args, sizeof f.args, size);
  if (size > sizeof f.args) args[size - 1] = (char)last_byte;
  const rapt_status status = rapt_attention((const rapt_attention_args*)args, NULL);
  free(args);
  return status;
}

static void test_older_and_newer_callers(void) {
  const size_t all = sizeof(rapt_attention_args);
  /* An older caller's structure ends early: the rest counts as not given. */
  CHECK_OK(attention_of_size(offsetof(rapt_attention_args, cu_seqlens_q), 0));
  CHECK(reference_error(&f.args) < 2e-6);
  CHECK_OK(attention_of_size(offsetof(rapt_attention_args, window_left), 0));
  CHECK(reference_error(&f.args) < 2e-6);
  CHECK_REFUSED(attention_of_size(offsetof(rapt_attention_args, out), 0), "out");
  CHECK_REFUSED(attention_of_size(sizeof(size_t), 0), "q");
  /* A newer caller's is longer: fine as long as nothing is asked for that this version cannot do. */
  CHECK_OK(attention_of_size(all + 8, 0));
  CHECK(reference_error(&f.args) < 2e-6);
  CHECK_OK(attention_of_size(4096, 0));
  CHECK(reference_error(&f.args) < 2e-6);
  CHECK_REFUSED(attention_of_size(all + 8, 1), "struct_size");
  CHECK_REFUSED(attention_of_size(4096, 1), "struct_size");
  /* No sizes of any version. */
  CHECK_REFUSED(attention_of_size(all - 1, 0), "struct_size");
  CHECK_REFUSED(attention_of_size(4096 + 8, 0), "struct_size");

  rapt_context_options options = rapt_context_options_init();
  rapt_context* context = NULL;
  options.executor = RAPT_EXECUTOR_SERIAL;
  void* older = resized(&options, sizeof options, offsetof(rapt_context_options, user_executor));
  CHECK_OK(rapt_context_create(older, &context));
  rapt_context_destroy(context);
  char* newer = resized(&options, sizeof options, sizeof options + 8);
  CHECK_OK(rapt_context_create((rapt_context_options*)newer, &context));
  rapt_context_destroy(context);
  newer[sizeof options] = 1;
  CHECK_REFUSED(rapt_context_create((rapt_context_options*)newer, &context), "struct_size");
  rapt_append_kv_args append = rapt_append_kv_args_init();
  append.struct_size = offsetof(rapt_append_kv_args, k);
  CHECK_REFUSED(rapt_append_kv(&append, NULL), "cache.k");
  free(older);
  free(newer);
}

/* A message longer than its buffer is cut, not dropped. */
static void test_long_message(void) {
  enum { LENGTH = 10000 };
  char* text = malloc(LENGTH + 1);
  rapt_plan* plan;
  memset(text, 'x', LENGTH);
  text[LENGTH] = '\0';
  CHECK(rapt_plan_create_from_text(text, NULL, &plan) == RAPT_INVALID_ARGUMENT);
  CHECK(plan == NULL && strlen(rapt_last_error()) > 10 && strlen(rapt_last_error_argument()) > 0);
  free(text);
}

void test_errors(void) {
  test_bad_fields();
  test_bad_dropout_masks();
  test_bad_operations();
  test_null_pointers();
  test_tensor_contiguous();
  test_older_and_newer_callers();
  test_messages_are_per_thread();
  test_long_message();
}
