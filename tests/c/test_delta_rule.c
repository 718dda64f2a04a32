/* Every member of the arguments against the recurrence in double; what is refused; plans in the caller's memory. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

/* Two sequences of T tokens, or ragged ones of 3 and 7 that are the same rows; HK key heads serve H value heads. */
enum { T = 5, H = 4, WIDTH = 6, POOL = 5, TOKENS = B * T, STATE = WIDTH * DV };

typedef struct delta_fixture {
  float q[TOKENS * HK * WIDTH], k[TOKENS * HK * WIDTH], v[TOKENS * H * DV], g[TOKENS * H * WIDTH], beta[TOKENS * H];
  float a_log[H], dt_bias[H * WIDTH], out[TOKENS * H * DV];
  float initial[POOL * H * STATE], final[POOL * H * STATE];
  int32_t cu_seqlens[B + 1];
  int64_t slots[B * 7], accepted[B];
  rapt_delta_rule_args args;
} delta_fixture;

static void delta_init(delta_fixture* f) {
  memset(f, 0, sizeof *f);
  fill(f->q, TOKENS * HK * WIDTH, 31), fill(f->k, TOKENS * HK * WIDTH, 32), fill(f->v, TOKENS * H * DV, 33);
  fill(f->g, TOKENS * H * WIDTH, 34), fill(f->beta, TOKENS * H, 35), fill(f->a_log, H, 36);
  fill(f->dt_bias, H * WIDTH, 37), fill(f->initial, POOL * H * STATE, 38);
  for (int i = 0; i < TOKENS * H * DV; ++i) f->out[i] = NAN;
  for (int i = 0; i < POOL * H * STATE; ++i) f->final[i] = NAN;
  f->cu_seqlens[1] = 3, f->cu_seqlens[2] = TOKENS;
  f->args = rapt_delta_rule_args_init();
  f->args.q = contiguous(f->q, RAPT_F32, 4, B, T, HK, WIDTH);
  f->args.k = contiguous(f->k, RAPT_F32, 4, B, T, HK, WIDTH);
  f->args.v = contiguous(f->v, RAPT_F32, 4, B, T, H, DV);
  f->args.g = contiguous(f->g, RAPT_F32, 4, B, T, H, WIDTH);
  f->args.beta = contiguous(f->beta, RAPT_F32, 3, B, T, H, 0);
  f->args.out = contiguous(f->out, RAPT_F32, 4, B, T, H, DV);
  f->args.gate = 1;
  f->args.a_log = contiguous(f->a_log, RAPT_F32, 1, H, 0, 0, 0);
  f->args.dt_bias = contiguous(f->dt_bias, RAPT_F32, 2, H, WIDTH, 0, 0);
  f->args.initial_state = contiguous(f->initial, RAPT_F32, 4, B, H, WIDTH, DV);
  f->args.final_state = contiguous(f->final, RAPT_F32, 4, B, H, WIDTH, DV);
}
static void make_ragged(delta_fixture* f) {
  rapt_delta_rule_args* const a = &f->args;
  a->q = contiguous(f->q, RAPT_F32, 3, TOKENS, HK, WIDTH, 0),
  a->k = contiguous(f->k, RAPT_F32, 3, TOKENS, HK, WIDTH, 0);
  a->v = contiguous(f->v, RAPT_F32, 3, TOKENS, H, DV, 0), a->g = contiguous(f->g, RAPT_F32, 3, TOKENS, H, WIDTH, 0);
  a->beta = contiguous(f->beta, RAPT_F32, 2, TOKENS, H, 0, 0);
  a->out = contiguous(f->out, RAPT_F32, 3, TOKENS, H, DV, 0);
  a->cu_seqlens = contiguous(f->cu_seqlens, RAPT_I32, 1, B + 1, 0, 0, 0);
}
static void make_pool(delta_fixture* f, int steps) {
  f->args.initial_state.shape[0] = f->args.final_state.shape[0] = POOL;
  f->args.state_slots = contiguous(f->slots, RAPT_I64, steps ? 2 : 1, B, steps, 0, 0);
}

/* g as it is without a gate. */
static void make_decays(delta_fixture* f) {
  for (int i = 0; i < TOKENS * H * WIDTH; ++i) f->g[i] = -fabsf(f->g[i]);
}

static double norm(const float* row) {
  double sum = 1e-6;
  for (int i = 0; i < WIDTH; ++i) sum += (double)row[i] * row[i];
  return sqrt(sum);
}

/* Largest difference between what was written and the recurrence from the states `initial`; infinite where one is NaN.
 * Contiguous fp32 tensors with g [.., d]; reads every other field of the arguments. Counts the slots it checked. */
static double error_of(const delta_fixture* f, const float* initial, int* checked) {
  const rapt_delta_rule_args* const a = &f->args;
  const int steps = a->state_slots.ndim == 2 ? (int)a->state_slots.shape[1] : 1;
  double worst = 0;
  *checked = 0;
  for (int b = 0; b < B; ++b)
    for (int h = 0; h < H; ++h) {
      double S[WIDTH][DV] = {{0}};
      const int first = a->cu_seqlens.ndim ? f->cu_seqlens[b] : b * T,
                end = a->cu_seqlens.ndim ? f->cu_seqlens[b + 1] : first + T;
      const int start = a->accepted.ndim ? (int)f->accepted[b] - 1 : 0;
      const int64_t from = a->state_slots.ndim ? f->slots[b * steps + start] : b;
      for (int i = 0; a->initial_state.ndim && from >= 0 && i < STATE; ++i)
        S[i / DV][i % DV] = initial[(from * H + h) * STATE + i];
      for (int t = first; t < end; ++t) {
        const float *q = f->q + (t * HK + h / (H / HK)) * WIDTH, *k = f->k + (t * HK + h / (H / HK)) * WIDTH;
        const double nq = a->l2norm_qk ? norm(q) : 1, nk = a->l2norm_qk ? norm(k) : 1;
        const double scale = a->has_scale ? a->scale : 1 / sqrt(WIDTH);
        double beta = a->beta.ndim ? f->beta[t * H + h] : 1;
        if (a->beta_sigmoid) beta = 1 / (1 + exp(-beta));
        if (a->beta_double) beta *= 2;
        for (int i = 0; i < WIDTH && a->g.ndim; ++i) {
          double g = f->g[(t * H + h) * WIDTH + i];
          const double A = exp(a->a_log.ndim ? f->a_log[h] : 0);
          if (a->gate) {
            g += a->dt_bias.ndim ? f->dt_bias[h * WIDTH + i] : 0;
            g = a->has_gate_lower_bound ? a->gate_lower_bound / (1 + exp(-A * g)) : -A * log1p(exp(g));
          }
          for (int j = 0; j < DV; ++j) S[i][j] *= exp(g);
        }
        for (int j = 0; j < DV; ++j) {
          double u = f->v[(t * H + h) * DV + j], out = 0;
          if (a->rule >= RAPT_RULE_DELTA) {
            for (int i = 0; i < WIDTH; ++i) u -= S[i][j] * k[i] / nk;
            u *= beta;
          }
          for (int i = 0; i < WIDTH; ++i) S[i][j] += k[i] / nk * u, out += scale * S[i][j] * q[i] / nq;
          const double difference = fabs(out - f->out[(t * H + h) * DV + j]);
          worst = isnan(difference) ? INFINITY : fmax(worst, difference);
        }
        if (steps == 1 && t + 1 < end) continue;
        const int64_t to = a->state_slots.ndim ? f->slots[b * steps + (steps == 1 ? 0 : t - first)] : b;
        for (int i = 0; a->final_state.ndim && to >= 0 && i < STATE; ++i) {
          const float got = ((const float*)a->final_state.data)[(to * H + h) * STATE + i];
          const double difference = fabs(S[i / DV][i % DV] - got);
          worst = isnan(difference) ? INFINITY : fmax(worst, difference);
          ++*checked;
        }
      }
    }
  return worst;
}

static const double kTolerance = 2e-6;

#define CHECK_DELTA(change)                             \
  do {                                                  \
    static delta_fixture f;                             \
    static float before[POOL * H * STATE];              \
    int checked;                                        \
    delta_init(&f);                                     \
    change;                                             \
    memcpy(before, f.initial, sizeof before);           \
    CHECK_OK(rapt_delta_rule(&f.args, NULL));           \
    CHECK(error_of(&f, before, &checked) < kTolerance); \
    CHECK(f.args.final_state.ndim == 0 || checked > 0); \
  } while (0)
#define NONE(tensor) memset(&f.args.tensor, 0, sizeof f.args.tensor)

static void test_results(void) {
  CHECK_DELTA((void)0);
  CHECK_DELTA((f.args.has_scale = 1, f.args.scale = -0.5f));
  CHECK_DELTA((f.args.l2norm_qk = 1, f.args.beta_sigmoid = 1));
  CHECK_DELTA((f.args.beta_sigmoid = 1, f.args.beta_double = 1, NONE(initial_state)));
  CHECK_DELTA((f.args.has_gate_lower_bound = 1, f.args.gate_lower_bound = -5, NONE(final_state)));
  CHECK_DELTA((NONE(a_log), NONE(dt_bias)));
  CHECK_DELTA((f.args.gate = 0, NONE(a_log), NONE(dt_bias), make_decays(&f)));
  CHECK_DELTA((f.args.rule = RAPT_RULE_GATED, NONE(beta)));
  CHECK_DELTA((f.args.rule = RAPT_RULE_DELTA, f.args.gate = 0, NONE(g), NONE(a_log), NONE(dt_bias), NONE(beta)));
  CHECK_DELTA((f.args.rule = RAPT_RULE_LINEAR, f.args.gate = 0, NONE(g), NONE(a_log), NONE(dt_bias), NONE(beta)));
  CHECK_DELTA(make_ragged(&f));
  CHECK_DELTA(f.args.final_state.data = f.initial); /* in place */
}

static void test_pools(void) {
  CHECK_DELTA((make_pool(&f, 0), f.slots[0] = 3, f.slots[1] = 1));
  static delta_fixture f;
  static float before[POOL * H * STATE];
  int checked;
  /* In place, a sequence without a slot: other slots keep their bits. */
  delta_init(&f);
  make_pool(&f, 0);
  f.slots[0] = -1, f.slots[1] = 4;
  f.args.final_state.data = f.initial;
  memcpy(before, f.initial, sizeof before);
  CHECK_OK(rapt_delta_rule(&f.args, NULL));
  CHECK(error_of(&f, before, &checked) < kTolerance && checked == H * STATE);
  CHECK(memcmp(before, f.initial, 4 * H * STATE * sizeof(float)) == 0);

  /* Speculative decoding: a state after every token, from the one that was accepted. */
  enum { STEPS = 2 };
  delta_init(&f);
  for (int b = 0; b < B; ++b)
    for (int i = 0; i < STEPS; ++i) f.slots[b * STEPS + i] = 4 - b * STEPS - i;
  make_pool(&f, STEPS);
  f.accepted[0] = 2, f.accepted[1] = 1;
  f.args.accepted = contiguous(f.accepted, RAPT_I64, 1, B, 0, 0, 0);
  make_ragged(&f);
  f.cu_seqlens[1] = 1, f.cu_seqlens[2] = 3;
  rapt_tensor* const rows[] = {&f.args.q, &f.args.k, &f.args.v, &f.args.g, &f.args.beta, &f.args.out};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) rows[i]->shape[0] = 3;
  f.args.final_state.data = f.initial;
  memcpy(before, f.initial, sizeof before);
  CHECK_OK(rapt_delta_rule(&f.args, NULL));
  CHECK(error_of(&f, before, &checked) < kTolerance && checked == 3 * H * STATE);
  CHECK(memcmp(before, f.initial, H * STATE * sizeof(float)) == 0);                                 /* no token's */
  CHECK(memcmp(before + 3 * H * STATE, f.initial + 3 * H * STATE, H * STATE * sizeof(float)) == 0); /* slot 3 */
}

/* rapt_delta_rule() refuses what `break_it` makes of good arguments, naming `argument`, and writes nothing. */
#define CHECK_BAD(break_it, argument)                        \
  do {                                                       \
    static delta_fixture f, before;                          \
    delta_init(&f);                                          \
    break_it;                                                \
    memcpy(&before, &f, sizeof f);                           \
    CHECK_REFUSED(rapt_delta_rule(&f.args, NULL), argument); \
    CHECK(memcmp(&before, &f, sizeof f) == 0);               \
  } while (0)

static void test_refusals(void) {
  static delta_fixture good;
  rapt_plan* plan = (rapt_plan*)&good;
  CHECK_REFUSED(rapt_delta_rule(NULL, NULL), "args");
  CHECK_REFUSED(rapt_plan_create_delta_rule(NULL, NULL, &plan), "args");
  CHECK(plan == NULL);
  delta_init(&good);
  CHECK_REFUSED(rapt_plan_create_delta_rule(&good.args, NULL, NULL), "plan");
  CHECK_REFUSED(rapt_plan_run_delta_rule(NULL, &good.args, NULL, 0), "plan");
  CHECK_REFUSED(rapt_delta_rule_with_workspace(&good.args, NULL, NULL, 64), "workspace");

  CHECK_BAD(f.args.struct_size = 0, "struct_size");
  CHECK(strstr(rapt_last_error(), "rapt_delta_rule_args_init") != NULL);
  CHECK_BAD(f.args.rule = 4, "rule");
  CHECK_BAD(f.args.rule = -1, "rule");
  CHECK_BAD(NONE(q), "q");
  CHECK_BAD(NONE(out), "out");
  CHECK_BAD(f.args.k.shape[1] = T - 1, "k");
  CHECK_BAD(f.args.v.dtype = RAPT_I32, "v");
  CHECK_BAD(f.args.v.dtype = 100, "v.dtype");
  CHECK_BAD(f.args.g.shape[3] = WIDTH - 1, "g");
  CHECK_BAD(f.args.beta.shape[2] = 1, "beta");
  CHECK_BAD(f.args.rule = RAPT_RULE_GATED, "beta");
  CHECK_BAD(f.args.rule = RAPT_RULE_DELTA, "g");
  CHECK_BAD(f.args.gate = 0, "a_log");
  CHECK_BAD((f.args.gate = 0, NONE(a_log)), "dt_bias");
  CHECK_BAD((f.args.has_gate_lower_bound = 1, f.args.gate_lower_bound = 1), "gate_lower_bound");
  CHECK_BAD(f.args.initial_state.shape[2] = DV, "initial_state");
  CHECK_BAD(f.args.final_state.dtype = RAPT_BF16, "final_state");
  CHECK_BAD(f.args.final_state.data = f.initial + 1, "final_state");
  CHECK_BAD((make_pool(&f, 0), f.slots[1] = f.slots[0] = 2), "state_slots");
  CHECK_BAD((make_pool(&f, 0), f.slots[0] = POOL), "state_slots");
  CHECK_BAD(f.args.accepted = contiguous(f.accepted, RAPT_I64, 1, B, 0, 0, 0), "accepted");
  CHECK_BAD((make_ragged(&f), f.cu_seqlens[2] = TOKENS - 1), "cu_seqlens");
}

static void test_plans_and_sizes(void) {
  static delta_fixture f;
  int checked;
  delta_init(&f);
  rapt_plan* plan;
  CHECK_OK(rapt_plan_create_delta_rule(&f.args, NULL, &plan));
  const size_t bytes = rapt_plan_workspace_bytes(plan);
  CHECK(bytes > 0);
  char* workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
  CHECK_OK(rapt_plan_run_delta_rule(plan, &f.args, workspace, bytes));
  CHECK(error_of(&f, f.initial, &checked) < kTolerance);
  delta_init(&f);
  CHECK_OK(rapt_delta_rule_with_workspace(&f.args, NULL, workspace, bytes));
  CHECK(error_of(&f, f.initial, &checked) < kTolerance);
  CHECK_REFUSED(rapt_delta_rule_with_workspace(&f.args, NULL, workspace, bytes - 1), "workspace");
  free(workspace);

  char text[200];
  rapt_plan* same;
  CHECK_OK(rapt_plan_problem_text(plan, text, sizeof text, NULL));
  CHECK(strcmp(text, "delta_rule decay=channel b=2 hq=2 hv=4 t=5 d=6 dv=3 beta gate state") == 0);
  CHECK_OK(rapt_plan_create_from_text(text, NULL, &same));
  CHECK(strcmp(rapt_plan_entry(same), rapt_plan_entry(plan)) == 0);
  rapt_plan_destroy(same);
  rapt_plan_destroy(plan);

  /* An older caller's structure, without the last members; a newer one's, with something that is not known here. */
  delta_init(&f);
  f.args.struct_size = offsetof(rapt_delta_rule_args, gate);
  CHECK_REFUSED(rapt_delta_rule(&f.args, NULL), "a_log");
  struct {
    rapt_delta_rule_args args;
    int64_t more;
  } newer = {rapt_delta_rule_args_init(), 1};
  newer.args.struct_size = sizeof newer;
  CHECK_REFUSED(rapt_delta_rule(&newer.args, NULL), "struct_size");

  const rapt_entry_info* entries;
  size_t count, found = 0;
  CHECK_OK(rapt_entries(&entries, &count));
  for (size_t i = 0; i < count; ++i) found += entries[i].operation == RAPT_OPERATION_DELTA_RULE;
  CHECK(found > 0);
}

void test_delta_rule(void) {
  test_results();
  test_pools();
  test_refusals();
  test_plans_and_sizes();
}
