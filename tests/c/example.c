/* The C examples of docs/guide/cpp.md, run. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

void test_examples(void) {
  enum { b = 2, h = 3, s = 9, d = 4, COUNT = b * h * s * d };
  float* q = malloc(4 * COUNT * sizeof(float));
  float *k = q + COUNT, *v = k + COUNT, *out = v + COUNT;
  fill(q, 4 * COUNT, 11);

  const int64_t shape[] = {b, h, s, d};
  rapt_attention_args args = rapt_attention_args_init();
  rapt_tensor_contiguous(&args.q, q, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&args.k, k, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&args.v, v, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&args.out, out, RAPT_F32, 4, shape);
  args.causal = 1;
  if (rapt_attention(&args, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  CHECK(reference_error(&args) < 2e-6);
  for (int i = 0; i < COUNT; ++i) out[i] = NAN;

  rapt_context_options options = rapt_context_options_init();
  options.threads = 2;
  rapt_context* context = NULL;
  rapt_plan* plan = NULL;
  if (rapt_context_create(&options, &context) != RAPT_OK || rapt_plan_create(&args, context, &plan) != RAPT_OK ||
      rapt_plan_run(plan, &args, NULL, 0) != RAPT_OK)
    fprintf(stderr, "%s: %s\n", rapt_last_error_argument(), rapt_last_error());
  printf("%s on %d threads\n", rapt_plan_entry(plan), rapt_plan_threads(plan));
  rapt_plan_destroy(plan);
  rapt_context_destroy(context);

  CHECK(reference_error(&args) < 2e-6);

  enum { ROOM = 16 };
  float* k_cache = malloc(2 * b * h * ROOM * d * sizeof(float));
  float* v_cache = k_cache + b * h * ROOM * d;
  const rapt_tensor k_rows = args.k, v_rows = args.v;

  const int64_t batch[] = {b}, room[] = {b, h, ROOM, d};
  int64_t lengths[] = {0, 0};
  rapt_append_kv_args append = rapt_append_kv_args_init();
  append.k_new = k_rows;
  append.v_new = v_rows;
  append.kv_kind = RAPT_KV_STRIDED;
  rapt_tensor_contiguous(&append.seqlens, lengths, RAPT_I64, 1, batch);
  rapt_tensor_contiguous(&append.k, k_cache, RAPT_F32, 4, room);
  rapt_tensor_contiguous(&append.v, v_cache, RAPT_F32, 4, room);
  if (rapt_append_kv(&append, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());
  for (int i = 0; i < b; ++i) lengths[i] += s;
  args.k = append.k;
  args.v = append.v;
  args.kv_seqlens = append.seqlens;
  args.align = RAPT_ALIGN_BOTTOM_RIGHT;
  if (rapt_attention(&args, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  args.k = k_rows;
  args.v = v_rows;
  memset(&args.kv_seqlens, 0, sizeof args.kv_seqlens);
  CHECK(reference_error(&args) < 2e-6);
  free(k_cache);
  free(q);
}
