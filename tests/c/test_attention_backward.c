/* Gradients against central differences of the definition; what is refused; plans in the caller's memory. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

enum { Q = B * HQ * SQ * D, K = B * HK * SK * D, V = B * HK * SK * DV, OUT = B * HQ * SQ * DV, ROWS = B * HQ * SQ };

/* A forward call with every score modifier, its results, and room for every gradient. */
typedef struct backward_fixture {
  fixture forward;
  float bias[HQ * SK], slopes[HQ], sinks[HQ];
  float dout[OUT], dlse[ROWS];
  float dq[Q], dk[K], dv[V], dbias[HQ * SK], dslopes[HQ], dsinks[HQ];
  int32_t lengths[B];
  rapt_attention_backward_args args;
} backward_fixture;

/* Runs the forward call, too. */
static void backward_init(backward_fixture* f) {
  rapt_attention_args* const forward = &f->forward.args;
  fixture_init(&f->forward);
  fill(f->bias, HQ * SK, 21);
  fill(f->slopes, HQ, 22);
  fill(f->sinks, HQ, 23);
  fill(f->dout, OUT, 24);
  fill(f->dlse, ROWS, 25);
  f->bias[3] = -INFINITY;
  f->lengths[0] = SK, f->lengths[1] = SK - 2;
  forward->bias = contiguous(f->bias, RAPT_F32, 3, HQ, 1, SK, 0);
  forward->alibi = contiguous(f->slopes, RAPT_F32, 1, HQ, 0, 0, 0);
  forward->sinks = contiguous(f->sinks, RAPT_F32, 1, HQ, 0, 0, 0);
  forward->kv_seqlens = contiguous(f->lengths, RAPT_I32, 1, B, 0, 0, 0);
  forward->causal = 1;
  forward->align = RAPT_ALIGN_OFFSET;
  forward->align_offset = 1;
  forward->softcap = 2;
  CHECK_OK(rapt_attention(forward, NULL));

  fill_with_nan(f->dq, Q), fill_with_nan(f->dk, K), fill_with_nan(f->dv, V);
  fill_with_nan(f->dbias, HQ * SK), fill_with_nan(f->dslopes, HQ), fill_with_nan(f->dsinks, HQ);
  f->args = rapt_attention_backward_args_init();
  f->args.forward = forward;
  f->args.dout = contiguous(f->dout, RAPT_F32, 4, B, HQ, SQ, DV);
  f->args.dlse = contiguous(f->dlse, RAPT_F32, 3, B, HQ, SQ, 0);
  f->args.dq = contiguous(f->dq, RAPT_F32, 4, B, HQ, SQ, D);
  f->args.dk = contiguous(f->dk, RAPT_F32, 4, B, HK, SK, D);
  f->args.dv = contiguous(f->dv, RAPT_F32, 4, B, HK, SK, DV);
  f->args.dbias = contiguous(f->dbias, RAPT_F32, 3, HQ, 1, SK, 0);
  f->args.dalibi = contiguous(f->dslopes, RAPT_F32, 1, HQ, 0, 0, 0);
  f->args.dsinks = contiguous(f->dsinks, RAPT_F32, 1, HQ, 0, 0, 0);
}

static double loss_of(const void* data) {
  const backward_fixture* const f = data;
  return reference_loss(&f->forward.args, f->dout, f->args.dlse.ndim ? f->dlse : NULL);
}
static double worst(const backward_fixture* f, float* inputs, const float* got, int count) {
  return gradient_error(loss_of, f, inputs, got, count);
}

static const double kTolerance = 2e-5; /* mostly of the differences: the third derivative times step^2 / 6 */

static void check_gradients(backward_fixture* f) {
  fixture* const in = &f->forward;
  if (f->args.dq.ndim) CHECK(worst(f, in->q, f->dq, Q) < kTolerance);
  if (f->args.dk.ndim) CHECK(worst(f, in->k, f->dk, K) < kTolerance);
  if (f->args.dv.ndim) CHECK(worst(f, in->v, f->dv, V) < kTolerance);
  if (f->args.dbias.ndim) CHECK(worst(f, f->bias, f->dbias, HQ * SK) < kTolerance);
  if (f->args.dalibi.ndim) CHECK(worst(f, f->slopes, f->dslopes, HQ) < kTolerance);
  if (f->args.dsinks.ndim) CHECK(worst(f, f->sinks, f->dsinks, HQ) < kTolerance);
}

static void test_gradients(void) {
  backward_fixture f;
  backward_init(&f);
  CHECK_OK(rapt_attention_backward(&f.args, NULL));
  check_gradients(&f);

  backward_init(&f);
  memset(&f.args.dlse, 0, sizeof f.args.dlse);
  CHECK_OK(rapt_attention_backward(&f.args, NULL));
  check_gradients(&f);

  backward_init(&f);
  f.forward.args.dropout = 0.25f, f.forward.args.dropout_seed = 7, f.forward.args.dropout_offset = 1;
  CHECK_OK(rapt_attention(&f.forward.args, NULL));
  CHECK_OK(rapt_attention_backward(&f.args, NULL));
  CHECK(worst(&f, f.bias, f.dbias, HQ * SK) < kTolerance);
  CHECK(worst(&f, f.sinks, f.dsinks, HQ) < kTolerance);

  /* Some gradients only; the others' memory is left alone. */
  backward_init(&f);
  memset(&f.args.dk, 0, sizeof f.args.dk);
  memset(&f.args.dbias, 0, sizeof f.args.dbias);
  CHECK_OK(rapt_attention_backward(&f.args, NULL));
  check_gradients(&f);
  CHECK(isnan(f.dk[0]) && isnan(f.dbias[0]));
}

/* Every token has the list of all keys, backwards and with gaps. */
static void test_gathered_gradients(void) {
  enum { N = 2 * SK };
  static backward_fixture f;
  int32_t indices[B * SQ * N];
  backward_init(&f);
  for (int i = 0; i < B * SQ * N; ++i) indices[i] = i % 2 ? -1 : SK - 1 - i % N / 2;
  rapt_attention_args* const dense = &f.forward.args;
  memset(&dense->bias, 0, sizeof dense->bias), memset(&dense->alibi, 0, sizeof dense->alibi);
  memset(&dense->kv_seqlens, 0, sizeof dense->kv_seqlens);
  dense->causal = 0, dense->align = RAPT_ALIGN_NONE, dense->align_offset = 0;
  rapt_attention_args gathered = *dense;
  gathered.kv_kind = RAPT_KV_GATHERED;
  gathered.indices = contiguous(indices, RAPT_I32, 3, B, SQ, N, 0);
  CHECK_OK(rapt_attention(&gathered, NULL));
  f.args.forward = &gathered;
  memset(&f.args.dbias, 0, sizeof f.args.dbias), memset(&f.args.dalibi, 0, sizeof f.args.dalibi);
  CHECK_OK(rapt_attention_backward(&f.args, NULL));
  check_gradients(&f);
  indices[0] = SK;
  CHECK_REFUSED(rapt_attention_backward(&f.args, NULL), "kv.indices");
}

/* Every gradient has a type of its own. */
static void test_types(void) {
  backward_fixture f;
  static uint16_t dout[OUT], dv[V], dq[Q];
  backward_init(&f);
  for (int i = 0; i < OUT; ++i) {
    dout[i] = to_half(f.dout[i], RAPT_BF16);
    f.dout[i] = (float)from_half(dout[i], RAPT_BF16);
  }
  f.args.dout.data = dout, f.args.dout.dtype = RAPT_BF16;
  f.args.dv.data = dv, f.args.dv.dtype = RAPT_BF16;
  f.args.dq.data = dq, f.args.dq.dtype = RAPT_F16;
  CHECK_OK(rapt_attention_backward(&f.args, NULL));
  for (int i = 0; i < V; ++i) f.dv[i] = (float)from_half(dv[i], RAPT_BF16);
  for (int i = 0; i < Q; ++i) f.dq[i] = (float)from_half(dq[i], RAPT_F16);
  CHECK(worst(&f, f.forward.k, f.dk, K) < kTolerance);
  CHECK(worst(&f, f.forward.v, f.dv, V) < 4 * 0x1p-8); /* of numbers below 4, rounded once */
  CHECK(worst(&f, f.forward.q, f.dq, Q) < 4 * 0x1p-11);
}

#define CHECK_BAD(break_it, argument) \
  CHECK_BAD_OF(attention_backward, backward_fixture, backward_init, break_it, argument)

static void test_refusals(void) {
  backward_fixture good;
  backward_init(&good);
  CHECK_NULLS(attention_backward, &good.args);

  CHECK_BAD(f.args.struct_size = 0, "struct_size");
  CHECK_BAD(f.forward.args.struct_size = 0, "struct_size");
  CHECK(strstr(rapt_last_error(), "rapt_attention_args_init") != NULL);
  CHECK_BAD(f.args.forward = NULL, "forward");
  CHECK_BAD(memset(&f.args.dout, 0, sizeof f.args.dout), "dout");
  CHECK_BAD(memset(&f.forward.args.lse, 0, sizeof f.forward.args.lse), "lse");
  CHECK_BAD(memset(&f.forward.args.out, 0, sizeof f.forward.args.out), "out");
  CHECK_BAD(f.forward.args.q.shape[3] = D - 1, "k");
  CHECK_BAD(f.forward.args.kv_kind = RAPT_KV_PAGED, "kv.block_table"); /* as the forward call would */
  CHECK_BAD(f.args.dout.shape[3] = DV + 1, "dout");
  CHECK_BAD(f.args.dlse.dtype = RAPT_BF16, "dlse");
  CHECK_BAD(f.args.dlse.shape[0] = 1, "dlse");
  CHECK_BAD(f.args.dq.shape[2] = SQ - 1, "dq");
  CHECK_BAD(f.args.dk.shape[1] = 1, "dk");
  CHECK_BAD(f.args.dv.ndim = 3, "dv");
  CHECK_BAD(f.args.dv.dtype = RAPT_I32, "dv");
  CHECK_BAD(f.args.dv.dtype = 100, "dv.dtype");
  CHECK_BAD(f.args.dbias.shape[1] = SQ, "dbias");
  CHECK_BAD(f.args.dsinks.shape[0] = 1, "dsinks");
  CHECK_BAD(f.args.dalibi.ndim = 5, "dalibi");
  CHECK_BAD(memset(&f.forward.args.alibi, 0, sizeof f.forward.args.alibi), "dalibi");
  CHECK_BAD(f.args.dq.data = f.forward.q, "dq");
  CHECK_BAD(f.forward.args.q.dtype = RAPT_F8E4M3, "q");
  CHECK_BAD(f.forward.args.q_scale = contiguous(f.forward.k, RAPT_F32, 4, 1, HQ, 1, 1), "q_scale");
}

/* Structures of other versions: an older caller's lacks gradients, a newer one's may have zeros more. */
static void test_struct_sizes(void) {
  struct {
    backward_fixture f;
    char more[16]; /* behind args */
  } padded;
  memset(&padded, 0, sizeof padded);
  backward_fixture* const f = &padded.f;
  backward_init(f);
  f->args.struct_size = offsetof(rapt_attention_backward_args, dbias);
  CHECK_OK(rapt_attention_backward(&f->args, NULL));
  CHECK(worst(f, f->forward.k, f->dk, K) < kTolerance);
  CHECK(isnan(f->dbias[0]) && isnan(f->dsinks[0]) && isnan(f->dslopes[0]));

  backward_init(f);
  f->args.struct_size = sizeof f->args + 8;
  CHECK_OK(rapt_attention_backward(&f->args, NULL));
  CHECK(worst(f, f->sinks, f->dsinks, HQ) < kTolerance);
  padded.more[0] = 1;
  CHECK_REFUSED(rapt_attention_backward(&f->args, NULL), "struct_size");
  f->args.struct_size = sizeof f->args;
  CHECK_OK(rapt_attention_backward(&f->args, NULL));

  /* The forward's has a size of its own. */
  fixture_init(&f->forward);
  f->forward.args.struct_size = offsetof(rapt_attention_args, cu_seqlens_q);
  CHECK_OK(rapt_attention(&f->forward.args, NULL));
  CHECK_REFUSED(rapt_attention_backward(&f->args, NULL), "dbias"); /* the forward has no bias now */
  memset(&f->args.dbias, 0, sizeof(rapt_tensor) * 3);
  CHECK_OK(rapt_attention_backward(&f->args, NULL));
  CHECK(worst(f, f->forward.q, f->dq, Q) < kTolerance);
}

static void test_plan(void) {
  static backward_fixture f;
  rapt_plan *plan = NULL, *same = NULL;
  char text[256];
  backward_init(&f);
  CHECK_OK(rapt_plan_create_attention_backward(&f.args, NULL, &plan));
  CHECK(strncmp(rapt_plan_entry(plan), "attention_backward.", 19) == 0);
  const size_t bytes = rapt_plan_workspace_bytes(plan);
  CHECK(bytes > 0);
  char* workspace = aligned_alloc(64, (bytes + 127) / 64 * 64);
  CHECK_OK(rapt_plan_run_attention_backward(plan, &f.args, workspace, bytes));
  check_gradients(&f);
  backward_init(&f);
  CHECK_OK(rapt_attention_backward_with_workspace(&f.args, NULL, workspace, bytes));
  check_gradients(&f);
  backward_init(&f);
  CHECK_REFUSED(rapt_plan_run_attention_backward(plan, &f.args, workspace, bytes - 1), "workspace");
  CHECK_REFUSED(rapt_plan_run_attention_backward(plan, NULL, workspace, bytes), "args");
  CHECK(isnan(f.dq[0]));

  CHECK_OK(rapt_plan_problem_text(plan, text, sizeof text, NULL));
  CHECK(strncmp(text, "attention_backward ", 19) == 0 && strstr(text, " dlse dbias dsinks dalibi") != NULL);
  CHECK_OK(rapt_plan_create_from_text(text, NULL, &same));
  CHECK_OK(rapt_plan_run_attention_backward(same, &f.args, NULL, 0));
  check_gradients(&f);
  size_t enough = 0;
  CHECK_OK(rapt_max_workspace_bytes(text, NULL, &enough));
  CHECK(enough >= bytes);
  rapt_plan_destroy(same);

  /* A plan runs its own operation and problem only. */
  CHECK(rapt_plan_run_attention(plan, &f.forward.args, NULL, 0) == RAPT_INVALID_ARGUMENT);
  memset(&f.args.dlse, 0, sizeof f.args.dlse);
  CHECK(rapt_plan_run_attention_backward(plan, &f.args, NULL, 0) == RAPT_INVALID_ARGUMENT);
  rapt_plan_destroy(plan);
  free(workspace);

  const rapt_entry_info* entries = NULL;
  size_t count = 0, found = 0;
  CHECK_OK(rapt_entries(&entries, &count));
  for (size_t i = 0; i < count; ++i)
    if (entries[i].operation == RAPT_OPERATION_ATTENTION_BACKWARD)
      found += strncmp(entries[i].name, "attention_backward.", 19) == 0;
  CHECK(found > 0);
}

void test_attention_backward(void) {
  test_gradients();
  test_gathered_gradients();
  test_types();
  test_refusals();
  test_struct_sizes();
  test_plan();
}
