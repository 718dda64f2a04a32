/* The C examples of docs/guide/cpp.md, run. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

static void print_report(void* user, const rapt_guard_report* report) {
  (void)user;
  CHECK(!report->text); /* nothing is wrong here */
}

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
  if (rapt_context_create(&options, &context) != RAPT_OK ||
      rapt_plan_create_attention(&args, context, &plan) != RAPT_OK ||
      rapt_plan_run_attention(plan, &args, NULL, 0) != RAPT_OK)
    fprintf(stderr, "%s\n", rapt_last_error());
  else printf("%s on %d threads\n", rapt_plan_entry(plan), rapt_plan_threads(plan));
  rapt_plan_destroy(plan);
  rapt_context_destroy(context);

  CHECK(reference_error(&args) < 2e-6);

  rapt_context_options guarded = rapt_context_options_init();
  guarded.guards = "nan,shadow=16";
  guarded.guard_handler = print_report; /* gets a rapt_guard_report; NULL: a line on standard error */

  CHECK_OK(rapt_context_create(&guarded, &context));
  CHECK_OK(rapt_attention(&args, context));
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

  float lse[b * h * s], *dout = malloc(4 * COUNT * sizeof(float));
  float *dq = dout + COUNT, *dk = dq + COUNT, *dv = dk + COUNT;
  fill(dout, COUNT, 12);

  rapt_tensor_contiguous(&args.lse, lse, RAPT_F32, 3, shape);
  if (rapt_attention(&args, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  rapt_attention_backward_args backward = rapt_attention_backward_args_init();
  backward.forward = &args;
  rapt_tensor_contiguous(&backward.dout, dout, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&backward.dq, dq, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&backward.dk, dk, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&backward.dv, dv, RAPT_F32, 4, shape);
  if (rapt_attention_backward(&backward, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  /* Along the gradient, the loss grows by step times the gradient's square. */
  float* const inputs[] = {q, k, v};
  const float* const gradients[] = {dq, dk, dv};
  const double loss = reference_loss(&args, dout, NULL), step = 0x1p-10;
  for (int n = 0; n < 3; ++n) {
    double square = 0;
    for (int i = 0; i < COUNT; ++i) {
      square += (double)gradients[n][i] * gradients[n][i];
      inputs[n][i] += (float)step * gradients[n][i];
    }
    const double growth = reference_loss(&args, dout, NULL) - loss;
    for (int i = 0; i < COUNT; ++i) inputs[n][i] -= (float)step * gradients[n][i];
    CHECK(fabs(growth / step / square - 1) < 0.01);
  }

  enum { MORE = COUNT + b * h * d };
  static float decays[COUNT], ddecays[COUNT], state[b * h * d * d];
  for (int i = 0; i < COUNT; ++i) decays[i] = -fabsf(k[i]);

  const int64_t rows[] = {b, s, h, d}, states[] = {b, h, d, d};
  rapt_delta_rule_args rule = rapt_delta_rule_args_init();
  rapt_tensor_contiguous(&rule.q, q, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&rule.k, k, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&rule.v, v, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&rule.g, decays, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&rule.out, out, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&rule.final_state, state, RAPT_F32, 4, states);
  rule.l2norm_qk = 1;
  if (rapt_delta_rule(&rule, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  rapt_delta_rule_backward_args learn = rapt_delta_rule_backward_args_init();
  learn.forward = &rule;
  rapt_tensor_contiguous(&learn.dout, dout, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&learn.dq, dq, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&learn.dk, dk, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&learn.dv, dv, RAPT_F32, 4, rows);
  rapt_tensor_contiguous(&learn.dg, ddecays, RAPT_F32, 4, rows);
  if (rapt_delta_rule_backward(&learn, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  /* The output is linear in the values; queries and keys count by their direction only. */
  double by_q = 0, by_k = 0, by_v = 0, of_out = 0;
  for (int i = 0; i < COUNT; ++i) {
    by_q += (double)dq[i] * q[i], by_k += (double)dk[i] * k[i], by_v += (double)dv[i] * v[i];
    of_out += (double)dout[i] * out[i];
    CHECK(isfinite(ddecays[i]));
  }
  CHECK(fabs(by_v - of_out) < 1e-4 && fabs(of_out) > 1e-2 && fabs(by_q) < 1e-4 && fabs(by_k) < 1e-4);
  free(dout);

  rule.initial_state = rule.final_state;
  rule.q.shape[1] = rule.k.shape[1] = rule.v.shape[1] = rule.g.shape[1] = rule.out.shape[1] = 1;
  if (rapt_delta_rule(&rule, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  /* All tokens at once, with the first one at the end again. */
  static float longer[5][MORE], whole[b * h * d * d];
  const float* const from[] = {q, k, v, decays};
  rapt_tensor* const to[] = {&rule.q, &rule.k, &rule.v, &rule.g, &rule.out};
  const int64_t all[] = {b, s + 1, h, d};
  for (int n = 0; n < 5; ++n) {
    for (int i = 0; n < 4 && i < MORE; ++i)
      longer[n][i] = from[n][i / ((s + 1) * h * d) * (s * h * d) + i % ((s + 1) * h * d) % (s * h * d)];
    rapt_tensor_contiguous(to[n], longer[n], RAPT_F32, 4, all);
  }
  memset(&rule.initial_state, 0, sizeof rule.initial_state);
  rule.final_state.data = whole;
  CHECK_OK(rapt_delta_rule(&rule, NULL));
  for (int i = 0; i < b * h * d * d; ++i) CHECK(fabsf(whole[i] - state[i]) < 1e-6f);
  for (int i = 0; i < b * h * d; ++i)
    CHECK(fabsf(out[i / (h * d) * (s * h * d) + i % (h * d)] -
                longer[4][i / (h * d) * ((s + 1) * h * d) + s * h * d + i % (h * d)]) < 1e-6f);

  int32_t indices[b * s * 4];
  const int64_t queries[] = {b, s, 2, d}, keys[] = {b, s, d}, per_head[] = {b, s, 2}, best[] = {b, s, 4};
  rapt_index_scores_args index = rapt_index_scores_args_init();
  rapt_tensor_contiguous(&index.q, q, RAPT_F32, 4, queries);
  rapt_tensor_contiguous(&index.k, k, RAPT_F32, 3, keys);
  rapt_tensor_contiguous(&index.weights, v, RAPT_F32, 3, per_head);
  rapt_tensor_contiguous(&index.indices, indices, RAPT_I32, 3, best);
  if (rapt_index_scores(&index, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  /* Each is a key up to the query's own, once; the rest is -1. */
  for (int i = 0; i < b * s * 4; ++i) {
    const int token = i / 4 % s, place = i % 4;
    CHECK(place <= token ? indices[i] >= 0 && indices[i] <= token : indices[i] == -1);
    for (int other = i - place; other < i; ++other) CHECK(indices[other] != indices[i] || indices[i] == -1);
  }
  free(q);
}
