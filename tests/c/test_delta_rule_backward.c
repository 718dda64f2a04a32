/* Gradients against central differences of the recurrence; what is refused; plans in the caller's memory. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "delta_fixture.h"

enum {
  QK = TOKENS * HK * WIDTH,
  V = TOKENS * H * DV,
  G = TOKENS * H * WIDTH,
  BETA = TOKENS * H,
  BIAS = H * WIDTH,
  STATES = B * H * STATE
};

/* A forward call, which need not have run, the gradients of its results, and room for those of its inputs. */
typedef struct backward_fixture {
  delta_fixture forward;
  float dout[V], dfinal[STATES];
  float dq[QK], dk[QK], dv[V], dg[G], dbeta[BETA], dinitial[STATES], da_log[H], ddt_bias[BIAS];
  rapt_delta_rule_backward_args args;
} backward_fixture;

/* A gradient, and what it is the gradient of: members of the arguments, and the numbers of both. */
typedef struct gradient {
  rapt_tensor* of;
  rapt_tensor* to;
  float *inputs, *made;
  int count;
} gradient;
enum { GRADIENTS = 8 };

static void list_gradients(backward_fixture* f, gradient* all) {
  delta_fixture* const in = &f->forward;
  const gradient list[GRADIENTS] = {
      {&in->args.q, &f->args.dq, in->q, f->dq, QK},
      {&in->args.k, &f->args.dk, in->k, f->dk, QK},
      {&in->args.v, &f->args.dv, in->v, f->dv, V},
      {&in->args.g, &f->args.dg, in->g, f->dg, G},
      {&in->args.beta, &f->args.dbeta, in->beta, f->dbeta, BETA},
      {&in->args.initial_state, &f->args.dinitial_state, in->initial, f->dinitial, STATES},
      {&in->args.a_log, &f->args.da_log, in->a_log, f->da_log, H},
      {&in->args.dt_bias, &f->args.ddt_bias, in->dt_bias, f->ddt_bias, BIAS}};
  memcpy(all, list, sizeof list);
}

/* Asks for every gradient of what the forward has. */
static void want_all(backward_fixture* f) {
  gradient all[GRADIENTS];
  list_gradients(f, all);
  for (int n = 0; n < GRADIENTS; ++n) {
    *all[n].to = *all[n].of;
    if (all[n].of->ndim) all[n].to->data = all[n].made;
    fill_with_nan(all[n].made, (size_t)all[n].count);
  }
}

static void backward_init(backward_fixture* f) {
  memset(f, 0, sizeof *f);
  delta_init(&f->forward);
  fill(f->dout, V, 41), fill(f->dfinal, STATES, 42);
  f->args = rapt_delta_rule_backward_args_init();
  f->args.forward = &f->forward.args;
  f->args.dout = contiguous(f->dout, RAPT_F32, 4, B, T, H, DV);
  f->args.dfinal_state = contiguous(f->dfinal, RAPT_F32, 4, B, H, WIDTH, DV);
  want_all(f);
}
static void make_backward_ragged(backward_fixture* f) {
  make_ragged(&f->forward);
  f->args.dout = contiguous(f->dout, RAPT_F32, 3, TOKENS, H, DV, 0);
}

static double loss_of(const void* data) {
  static double out[V], states[TOKENS * H * STATE];
  const backward_fixture* const f = data;
  double loss = 0;
  delta_reference(&f->forward, f->forward.initial, out, states);
  for (int i = 0; f->args.dout.ndim && i < V; ++i) loss += f->dout[i] * out[i];
  for (int b = 0; f->args.dfinal_state.ndim && b < B; ++b) {
    const double* const last = states + (first_token(&f->forward, b) + token_count(&f->forward, b) - 1) * H * STATE;
    for (int i = 0; i < H * STATE; ++i) loss += f->dfinal[b * H * STATE + i] * last[i];
  }
  return loss;
}

static const double kTolerance = 1e-5; /* mostly of the differences: the third derivative times step^2 / 6 */

/* Of every gradient that was asked for; the others' memory has been left alone. */
static void check_gradients(backward_fixture* f) {
  gradient all[GRADIENTS];
  list_gradients(f, all);
  for (int n = 0; n < GRADIENTS; ++n) {
    const double error =
        all[n].to->ndim ? gradient_error(loss_of, f, all[n].inputs, all[n].made, all[n].count) : !isnan(all[n].made[0]);
    if (!(error < kTolerance)) fprintf(stderr, "gradient %d is off by %g\n", n, error);
    CHECK(error < kTolerance);
  }
}

#define CHECK_GRADIENTS(change)                        \
  do {                                                 \
    static backward_fixture f;                         \
    backward_init(&f);                                 \
    change;                                            \
    want_all(&f);                                      \
    CHECK_OK(rapt_delta_rule_backward(&f.args, NULL)); \
    check_gradients(&f);                               \
  } while (0)
#define NONE(tensor) memset(&f.tensor, 0, sizeof f.tensor)
#define NO_GATE (f.forward.args.gate = 0, NONE(forward.args.a_log), NONE(forward.args.dt_bias))

static void test_gradients(void) {
  CHECK_GRADIENTS((void)0);
  CHECK_GRADIENTS((f.forward.args.has_scale = 1, f.forward.args.scale = -0.5f));
  CHECK_GRADIENTS((f.forward.args.l2norm_qk = 1, f.forward.args.beta_sigmoid = 1));
  CHECK_GRADIENTS((f.forward.args.beta_sigmoid = 1, f.forward.args.beta_double = 1, NONE(forward.args.initial_state)));
  CHECK_GRADIENTS((f.forward.args.has_gate_lower_bound = 1, f.forward.args.gate_lower_bound = -5));
  CHECK_GRADIENTS((NONE(forward.args.a_log), NONE(forward.args.dt_bias)));
  CHECK_GRADIENTS((NO_GATE, make_decays(&f.forward)));
  CHECK_GRADIENTS((f.forward.args.rule = RAPT_RULE_GATED, NONE(forward.args.beta)));
  CHECK_GRADIENTS((f.forward.args.rule = RAPT_RULE_DELTA, NO_GATE, NONE(forward.args.g), NONE(forward.args.beta)));
  CHECK_GRADIENTS((f.forward.args.rule = RAPT_RULE_LINEAR, NO_GATE, NONE(forward.args.g), NONE(forward.args.beta)));
  CHECK_GRADIENTS(make_backward_ragged(&f));
  CHECK_GRADIENTS(NONE(args.dout));
  CHECK_GRADIENTS((NONE(args.dfinal_state), NONE(forward.args.final_state), NONE(forward.args.out)));
}

/* Some gradients only, in types of their own. */
static void test_some_and_types(void) {
  static backward_fixture f;
  static uint16_t dq[QK], dbeta[BETA];
  backward_init(&f);
  NONE(args.dk), NONE(args.dg), NONE(args.dinitial_state), NONE(args.da_log);
  CHECK_OK(rapt_delta_rule_backward(&f.args, NULL));
  check_gradients(&f);

  f.args.dq.data = dq, f.args.dq.dtype = RAPT_BF16;
  f.args.dbeta.data = dbeta, f.args.dbeta.dtype = RAPT_F16;
  CHECK_OK(rapt_delta_rule_backward(&f.args, NULL));
  for (int i = 0; i < QK; ++i) CHECK(fabs(from_half(dq[i], RAPT_BF16) - f.dq[i]) <= 0x1p-8 * fabsf(f.dq[i]));
  for (int i = 0; i < BETA; ++i)
    CHECK(fabs(from_half(dbeta[i], RAPT_F16) - f.dbeta[i]) <= 0x1p-11 * fabsf(f.dbeta[i]) + 0x1p-25);
}

#define CHECK_BAD(break_it, argument) \
  CHECK_BAD_OF(delta_rule_backward, backward_fixture, backward_init, break_it, argument)

static void test_refusals(void) {
  static backward_fixture good;
  backward_init(&good);
  CHECK_NULLS(delta_rule_backward, &good.args);

  CHECK_BAD(f.args.struct_size = 0, "struct_size");
  CHECK(strstr(rapt_last_error(), "rapt_delta_rule_backward_args_init") != NULL);
  CHECK_BAD(f.forward.args.struct_size = 0, "struct_size");
  CHECK(strstr(rapt_last_error(), "rapt_delta_rule_args_init") != NULL);
  CHECK_BAD(f.args.forward = NULL, "forward");
  CHECK_BAD(f.forward.args.rule = 4, "rule");
  CHECK_BAD(f.forward.args.k.shape[1] = T - 1, "k");
  CHECK_BAD(f.forward.args.gate = 0, "a_log");
  CHECK_BAD(f.args.dout.shape[3] = DV - 1, "dout");
  CHECK_BAD(f.args.dout.dtype = RAPT_I32, "dout");
  CHECK_BAD(f.args.dfinal_state.dtype = RAPT_F16, "dfinal_state");
  CHECK_BAD(f.args.dfinal_state.shape[0] = 1, "dfinal_state");
  CHECK_BAD(f.args.dq.shape[3] = WIDTH - 1, "dq");
  CHECK_BAD(f.args.dk.dtype = 100, "dk.dtype");
  CHECK_BAD(f.args.dv.dtype = RAPT_I32, "dv");
  CHECK_BAD(NONE(forward.args.beta), "dbeta");
  CHECK_BAD(NONE(forward.args.initial_state), "dinitial_state");
  CHECK_BAD(NONE(forward.args.a_log), "da_log");
  CHECK_BAD(f.args.da_log.dtype = RAPT_F16, "da_log");
  CHECK_BAD(f.args.ddt_bias.ndim = 1, "ddt_bias");
  CHECK_BAD(f.args.dg.data = f.forward.g, "dg");
  CHECK_BAD(f.args.dk.data = f.dq, "dk");
  CHECK_BAD(f.forward.args.final_state.data = f.forward.initial, "initial_state");
  CHECK_BAD(make_pool(&f.forward, 0), "state_slots");
}

static void test_plans_and_sizes(void) {
  static struct {
    backward_fixture f;
    char more[16]; /* behind args */
  } padded;
  backward_fixture* const f = &padded.f;
  rapt_plan *plan, *same;
  char text[200];
  backward_init(f);
  CHECK_OK(rapt_plan_create_delta_rule_backward(&f->args, NULL, &plan));
  CHECK(strncmp(rapt_plan_entry(plan), "delta_rule_backward", 19) == 0);
  const size_t bytes = rapt_plan_workspace_bytes(plan);
  CHECK(bytes > 0);
  char* workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
  CHECK_OK(rapt_plan_run_delta_rule_backward(plan, &f->args, workspace, bytes));
  check_gradients(f);
  backward_init(f);
  CHECK_REFUSED(rapt_delta_rule_backward_with_workspace(&f->args, NULL, workspace, bytes - 1), "workspace");
  CHECK(isnan(f->dq[0]));
  CHECK_OK(rapt_delta_rule_backward_with_workspace(&f->args, NULL, workspace, bytes));
  check_gradients(f);
  free(workspace);

  CHECK_OK(rapt_plan_problem_text(plan, text, sizeof text, NULL));
  CHECK(strcmp(text, "delta_rule_backward decay=channel b=2 hq=2 hv=4 t=5 d=6 dv=3 beta gate state") == 0);
  CHECK_OK(rapt_plan_create_from_text(text, NULL, &same));
  CHECK_OK(rapt_plan_run_delta_rule_backward(same, &f->args, NULL, 0));
  size_t enough = 0;
  CHECK_OK(rapt_max_workspace_bytes(text, NULL, &enough));
  CHECK(enough >= bytes);
  CHECK(rapt_plan_run_delta_rule(plan, &f->forward.args, NULL, 0) == RAPT_INVALID_ARGUMENT); /* another operation */
  rapt_plan_destroy(same);
  rapt_plan_destroy(plan);

  /* Structures of other versions: an older caller's lacks gradients, a newer one's may have zeros more. */
  backward_init(f);
  f->args.struct_size = offsetof(rapt_delta_rule_backward_args, dinitial_state);
  CHECK_OK(rapt_delta_rule_backward(&f->args, NULL));
  memset(&f->args.dinitial_state, 0, 3 * sizeof(rapt_tensor));
  check_gradients(f);
  backward_init(f);
  f->args.struct_size = sizeof f->args + 8;
  CHECK_OK(rapt_delta_rule_backward(&f->args, NULL));
  padded.more[0] = 1;
  CHECK_REFUSED(rapt_delta_rule_backward(&f->args, NULL), "struct_size");
  padded.more[0] = 0;
  f->forward.args.struct_size = offsetof(rapt_delta_rule_args, gate); /* the forward's has a size of its own */
  CHECK_REFUSED(rapt_delta_rule_backward(&f->args, NULL), "a_log");

  const rapt_entry_info* entries;
  size_t count, found = 0;
  CHECK_OK(rapt_entries(&entries, &count));
  for (size_t i = 0; i < count; ++i) found += entries[i].operation == RAPT_OPERATION_DELTA_RULE_BACKWARD;
  CHECK(found > 0);
}

void test_delta_rule_backward(void) {
  test_gradients();
  test_some_and_types();
  test_refusals();
  test_plans_and_sizes();
}
