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

#endif
