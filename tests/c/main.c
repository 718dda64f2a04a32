#include "check.h"

int failures = 0;

int main(void) {
  test_attention();
  test_attention_backward();
  test_caches();
  test_errors();
  test_contexts();
  test_delta_rule();
  test_delta_rule_backward();
  test_dsa();
  test_plans();
  test_kv_caches();
  test_examples();
  if (failures) fprintf(stderr, "%d checks failed\n", failures);
  return failures != 0;
}
