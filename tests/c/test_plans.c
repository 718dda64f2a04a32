/* Plans: what was chosen, running with and without workspace, texts. */
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

static void test_run(void) {
  fixture f;
  rapt_plan* plan = NULL;
  fixture_init(&f);
  CHECK_OK(rapt_plan_create_attention(&f.args, NULL, &plan));
  CHECK_OK(rapt_plan_run_attention(plan, &f.args, NULL, 0));
  CHECK(reference_error(&f.args) < 2e-6);

  const size_t bytes = rapt_plan_workspace_bytes(plan);
  CHECK(bytes > 0);
  char* workspace = aligned_alloc(64, (bytes + 127) / 64 * 64);
  fixture_init(&f);
  CHECK_OK(rapt_plan_run_attention(plan, &f.args, workspace, bytes));
  CHECK(reference_error(&f.args) < 2e-6);
  CHECK_REFUSED(rapt_plan_run_attention(plan, &f.args, workspace, bytes - 1), "workspace");
  CHECK_REFUSED(rapt_plan_run_attention(plan, &f.args, workspace + 4, bytes), "workspace");
  CHECK_REFUSED(rapt_plan_run_attention(plan, &f.args, NULL, bytes), "workspace");
  CHECK_REFUSED(rapt_plan_run_attention(plan, NULL, NULL, 0), "args");
  free(workspace);

  f.args.causal = 1; /* not the problem the plan was made for */
  f.args.align = RAPT_ALIGN_TOP_LEFT;
  CHECK(rapt_plan_run_attention(plan, &f.args, NULL, 0) == RAPT_INVALID_ARGUMENT);
  rapt_plan_destroy(plan);
}

static void test_facts(void) {
  fixture f;
  rapt_plan *plan = NULL, *same = NULL;
  const rapt_candidate* candidates = NULL;
  size_t count = 0, size = 0, chosen = 0;
  char text[256], text_of_plan[256];
  fixture_init(&f);
  CHECK_OK(rapt_plan_create_attention(&f.args, NULL, &plan));
  CHECK(strncmp(rapt_plan_entry(plan), "attention_", 10) == 0);
  CHECK(strcmp(rapt_plan_backend(plan), "cpu") == 0);
  CHECK(rapt_plan_threads(plan) >= 1 && rapt_plan_work_items(plan) >= 1);
  CHECK_OK(rapt_plan_candidates(plan, &candidates, &count));
  for (size_t i = 0; i < count; ++i) {
    if (strcmp(candidates[i].entry, rapt_plan_entry(plan)) == 0) chosen += candidates[i].refusal[0] == '\0';
  }
  CHECK(chosen == 1);

  CHECK_OK(rapt_problem_text(RAPT_OPERATION_ATTENTION, &f.args, text, sizeof text, &size));
  CHECK(strcmp(text, "attention b=2 hq=4 hk=2 sq=5 sk=7 d=8 dv=3 lse") == 0);
  CHECK(size == strlen(text) + 1);
  CHECK_OK(rapt_plan_problem_text(plan, text_of_plan, sizeof text_of_plan, NULL));
  CHECK(strcmp(text, text_of_plan) == 0);

  CHECK_OK(rapt_plan_create_from_text(text, NULL, &same));
  CHECK(strcmp(rapt_plan_entry(same), rapt_plan_entry(plan)) == 0);
  CHECK(rapt_plan_workspace_bytes(same) == rapt_plan_workspace_bytes(plan));
  CHECK_OK(rapt_plan_run_attention(same, &f.args, NULL, 0));
  CHECK(reference_error(&f.args) < 2e-6);
  rapt_plan_destroy(same);

  CHECK_OK(rapt_plan_explain(plan, NULL, 0, &size));
  char* explanation = malloc(size);
  CHECK_OK(rapt_plan_explain(plan, explanation, size, NULL));
  CHECK(strlen(explanation) + 1 == size && strstr(explanation, rapt_plan_entry(plan)) != NULL);
  memset(explanation, '#', size);
  CHECK_REFUSED(rapt_plan_explain(plan, explanation, size - 1, &size), "capacity");
  CHECK(explanation[0] == '#'); /* left alone */
  free(explanation);
  rapt_plan_destroy(plan);
}

static void test_bad_texts(void) {
  rapt_plan* plan = NULL;
  CHECK(rapt_plan_create_from_text("", NULL, &plan) == RAPT_INVALID_ARGUMENT);
  CHECK(rapt_plan_create_from_text("attention sq=8 d=4 colour=red", NULL, &plan) == RAPT_INVALID_ARGUMENT);
  CHECK(strstr(rapt_last_error(), "colour") != NULL);
  CHECK(rapt_plan_create_from_text("attention hq=3 hk=2 sq=8 d=4", NULL, &plan) == RAPT_INVALID_ARGUMENT);
  CHECK(plan == NULL);
}

void test_plans(void) {
  test_run();
  test_facts();
  test_bad_texts();
  CHECK(strchr(rapt_version(), '.') != NULL);
}
