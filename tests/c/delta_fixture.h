/* A small problem of the delta rule with data, and the recurrence in double. */
#ifndef RAPT_TESTS_C_DELTA_FIXTURE_H
#define RAPT_TESTS_C_DELTA_FIXTURE_H

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

/* Fills the inputs with fixed numbers in [-1, 1) and the outputs with NaN; there is a gate, and every tensor but
 * cu_seqlens and those of pools. */
void delta_init(delta_fixture* f);
void make_ragged(delta_fixture* f);
void make_pool(delta_fixture* f, int steps); /* the states lie in pools; the caller sets slots */
void make_decays(delta_fixture* f);          /* g is what it is without a gate: not above 0 */

/* The recurrence from the states `initial`: out [TOKENS * H * DV], and the state after each token [TOKENS * H * STATE].
 * Contiguous fp32 tensors with g [.., d]; reads every other field of the arguments. */
void delta_reference(const delta_fixture* f, const float* initial, double* out, double* states);

/* Of sequence b: its first token, how many it has, and the slot where token t of it leaves its state, -1 for none. */
int first_token(const delta_fixture* f, int b);
int token_count(const delta_fixture* f, int b);
int64_t slot_after(const delta_fixture* f, int b, int t);

#endif
