/* Rotation of queries and keys, and appending them. */
#include <math.h>

#include "check.h"
#include "fixture.h"

enum { N = 3, ROOM = 8, R = 4 };

static void test_cache(void) {
  static float q[HQ * N * D], q_out[HQ * N * D], k_new[N * D], v_new[N * DV], k[ROOM * D], v[ROOM * DV];
  static float cos_of[ROOM * R / 2], sin_of[ROOM * R / 2];
  static const int64_t before[] = {2};
  rapt_rotary_append_kv_args args = rapt_rotary_append_kv_args_init();
  CHECK(args.norm_eps == 1e-6f);
  fill(q, HQ * N * D, 1), fill(k_new, N * D, 2), fill(v_new, N * DV, 3);
  fill(cos_of, ROOM * R / 2, 4), fill(sin_of, ROOM * R / 2, 5);
  args.q = contiguous(q, RAPT_F32, 4, 1, HQ, N, D);
  args.q_out = contiguous(q_out, RAPT_F32, 4, 1, HQ, N, D);
  args.k_new = contiguous(k_new, RAPT_F32, 4, 1, 1, N, D);
  args.v_new = contiguous(v_new, RAPT_F32, 4, 1, 1, N, DV);
  args.k = contiguous(k, RAPT_F32, 4, 1, 1, ROOM, D);
  args.v = contiguous(v, RAPT_F32, 4, 1, 1, ROOM, DV);
  args.seqlens = contiguous((void*)before, RAPT_I64, 1, 1, 0, 0, 0);
  args.cos = contiguous(cos_of, RAPT_F32, 2, ROOM, R / 2, 0, 0);
  args.sin = contiguous(sin_of, RAPT_F32, 2, ROOM, R / 2, 0, 0);
  args.rotary_dim = R, args.rotary_offset = 1, args.interleaved = 1;
  CHECK_OK(rapt_rotary_append_kv(&args, NULL));
  for (int t = 0; t < N; ++t) {
    for (int c = 0; c < DV; ++c) CHECK(v[(2 + t) * DV + c] == v_new[t * DV + c]);
    for (int pair = 0; pair < R / 2; ++pair) {
      const float c = cos_of[(2 + t) * R / 2 + pair], s = sin_of[(2 + t) * R / 2 + pair];
      const float* const x = k_new + t * D + 1 + 2 * pair;
      const float* const y = k + (2 + t) * D + 1 + 2 * pair;
      CHECK(fabsf(y[0] - (x[0] * c - x[1] * s)) < 1e-6f && fabsf(y[1] - (x[1] * c + x[0] * s)) < 1e-6f);
    }
    CHECK(k[(2 + t) * D] == k_new[t * D]);
    CHECK(q_out[t * D] == q[t * D]);
  }
  args.rotary_dim = 3;
  CHECK(rapt_rotary_append_kv(&args, NULL) == RAPT_INVALID_ARGUMENT);
  CHECK(strstr(rapt_last_error(), "rotary_dim") != NULL);
}

void test_rotary_append_kv(void) {
  test_cache();
}
