/* Checks that count failures and go on, so that one run shows all of them. */
#ifndef RAPT_TESTS_C_CHECK_H
#define RAPT_TESTS_C_CHECK_H

#include <stdio.h>
#include <string.h>

extern int failures;

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      ++failures;                                                            \
      fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
    }                                                                        \
  } while (0)

#define CHECK_OK(call)                                                                                \
  do {                                                                                                \
    const rapt_status status_ = (call);                                                               \
    if (status_ != RAPT_OK) {                                                                         \
      ++failures;                                                                                     \
      fprintf(stderr, "%s:%d: %s = %d: %s\n", __FILE__, __LINE__, #call, status_, rapt_last_error()); \
    }                                                                                                 \
  } while (0)

/* The call is refused with a message that starts with `argument`. */
#define CHECK_REFUSED(call, argument)                                                                             \
  do {                                                                                                            \
    const rapt_status status_ = (call);                                                                           \
    const int named_ = strcmp(rapt_last_error_argument(), argument) == 0;                                         \
    if (status_ != RAPT_INVALID_ARGUMENT || !named_ || strncmp(rapt_last_error(), argument, strlen(argument))) {  \
      ++failures;                                                                                                 \
      fprintf(stderr, "%s:%d: %s = %d, argument \"%s\", wanted \"%s\": %s\n", __FILE__, __LINE__, #call, status_, \
              rapt_last_error_argument(), argument, rapt_last_error());                                           \
    }                                                                                                             \
  } while (0)

/* rapt_<operation>() refuses what `break_it` makes of a good fixture f, naming `argument`, and writes nothing. */
#define CHECK_BAD_OF(operation, fixture_type, init, break_it, argument) \
  do {                                                                  \
    static fixture_type f, before;                                      \
    init(&f);                                                           \
    break_it;                                                           \
    memcpy(&before, &f, sizeof f);                                      \
    CHECK_REFUSED(rapt_##operation(&f.args, NULL), argument);           \
    CHECK(memcmp(&before, &f, sizeof f) == 0);                          \
  } while (0)

/* What every operation refuses beside bad arguments; `good` points to good ones. */
#define CHECK_NULLS(operation, good)                                                     \
  do {                                                                                   \
    rapt_plan* plan_ = (rapt_plan*)(good);                                               \
    CHECK_REFUSED(rapt_##operation(NULL, NULL), "args");                                 \
    CHECK_REFUSED(rapt_plan_create_##operation(NULL, NULL, &plan_), "args");             \
    CHECK(plan_ == NULL);                                                                \
    CHECK_REFUSED(rapt_plan_create_##operation(good, NULL, NULL), "plan");               \
    CHECK_REFUSED(rapt_plan_run_##operation(NULL, good, NULL, 0), "plan");               \
    CHECK_REFUSED(rapt_##operation##_with_workspace(good, NULL, NULL, 64), "workspace"); \
  } while (0)

#endif
