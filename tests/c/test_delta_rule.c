/* Every member of the arguments against the recurrence in double; what is refused; plans in the caller's memory. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "delta_fixture.h"

/* Largest difference between what was written and the recurrence from the states `initial`; infinite where one is NaN.
 * Counts the numbers of states that it checked. */
static double error_of(const delta_fixture* f, const float* initial, int* checked) {
  static double out[TOKENS * H * DV], states[TOKENS * H * STATE];
  double worst = 0;
  delta_reference(f, initial, out, states);
  *checked = 0;
  for (int b = 0; b < B; ++b)
    for (int t = 0; t < token_count(f, b); ++t) {
      const int row = first_token(f, b) + t;
      for (int i = row * H * DV; i < (row + 1) * H * DV; ++i) worst = larger(worst, out[i] - f->out[i]);
      const int64_t slot = slot_after(f, b, t);
      for (int i = 0; f->args.final_state.ndim && slot >= 0 && i < H * STATE; ++i, ++*checked)
        worst =
            larger(worst, states[row * H * STATE + i] - ((const float*)f->args.final_state.data)[slot * H * STATE + i]);
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

static void test_states_of_bf16(void) {
  static delta_fixture f;
  static uint16_t states[B * H * STATE];
  int checked;
  delta_init(&f);
  for (int i = 0; i < B * H * STATE; ++i) {
    uint32_t bits;
    memcpy(&bits, f.initial + i, 4);
    states[i] = (uint16_t)(bits >> 16), bits = (uint32_t)states[i] << 16;
    memcpy(f.initial + i, &bits, 4);
  }
  f.args.initial_state.dtype = f.args.final_state.dtype = RAPT_BF16;
  f.args.initial_state.data = f.args.final_state.data = states; /* in place */
  CHECK_OK(rapt_delta_rule(&f.args, NULL));
  for (int i = 0; i < B * H * STATE; ++i) {
    const uint32_t bits = (uint32_t)states[i] << 16;
    memcpy(f.final + i, &bits, 4);
  }
  f.args.final_state.data = f.final;
  CHECK(error_of(&f, f.initial, &checked) < 0.02 && checked == B * H * STATE);
}

#define CHECK_BAD(break_it, argument) CHECK_BAD_OF(delta_rule, delta_fixture, delta_init, break_it, argument)

static void test_refusals(void) {
  static delta_fixture good;
  delta_init(&good);
  CHECK_NULLS(delta_rule, &good.args);

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
  CHECK_BAD(f.args.final_state.dtype = RAPT_F16, "final_state");
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
  test_states_of_bf16();
  test_refusals();
  test_plans_and_sizes();
}
