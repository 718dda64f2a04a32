#include "check.h"

int failures = 0;

#define RAPT_C_TEST(name) void name(void);
#include "tests.def"
#undef RAPT_C_TEST

int main(void) {
#define RAPT_C_TEST(name) name();
#include "tests.def"
  if (failures) fprintf(stderr, "%d checks failed\n", failures);
  return failures != 0;
}
