/* Appending to caches, and merging disjoint sets of keys. */
#include <math.h>

#include "check.h"
#include "fixture.h"

enum { ROOM = 10, PAGE = 2, PAGES = 8 };

/* Keys appended to a cache in two calls are attended like those that were there from the start. */
static void test_strided(void) {
  static fixture f;
  static float k[B * HK * ROOM * D], v[B * HK * ROOM * DV];
  static const int64_t first[] = {0, 0}, rest[] = {4, 4}, all[] = {SK, SK};
  rapt_append_kv_args args = rapt_append_kv_args_init();
  fixture_init(&f);
  for (size_t i = 0; i < sizeof k / sizeof *k; ++i) k[i] = NAN;
  for (size_t i = 0; i < sizeof v / sizeof *v; ++i) v[i] = NAN;
  args.k = contiguous(k, RAPT_F32, 4, B, HK, ROOM, D);
  args.v = contiguous(v, RAPT_F32, 4, B, HK, ROOM, DV);

  args.k_new = f.args.k, args.v_new = f.args.v;
  args.k_new.shape[2] = args.v_new.shape[2] = 4;
  args.seqlens = contiguous((void*)first, RAPT_I64, 1, B, 0, 0, 0);
  CHECK_OK(rapt_append_kv(&args, NULL));

  args.k_new.data = f.k + 4 * D, args.v_new.data = f.v + 4 * DV;
  args.k_new.shape[2] = args.v_new.shape[2] = SK - 4;
  args.seqlens.data = (void*)rest;
  CHECK_OK(rapt_append_kv(&args, NULL));

  /* The answer of the keys as they were, in what attention over the cache gives. */
  rapt_attention_args cached = f.args;
  cached.k = args.k, cached.v = args.v;
  cached.kv_seqlens = contiguous((void*)all, RAPT_I64, 1, B, 0, 0, 0);
  CHECK_OK(rapt_attention(&cached, NULL));
  CHECK(reference_error(&f.args) < 2e-6);
}

static void test_paged_and_quantized(void) {
  static const int32_t table[] = {-1, 3, 5, 1}, length[] = {3};
  static float k_new[4 * D], v_new[4 * DV], k_scale[PAGES * PAGE], v_scale[PAGES * PAGE], k_zero[PAGES * PAGE];
  static signed char k[PAGES * PAGE * D], v[PAGES * PAGE * DV];
  static const int row_of[] = {3 * PAGE + 1, 5 * PAGE, 5 * PAGE + 1, 1 * PAGE};
  rapt_append_kv_args args = rapt_append_kv_args_init();
  fill(k_new, 4 * D, 3);
  fill(v_new, 4 * DV, 4);
  args.kv_kind = RAPT_KV_PAGED;
  args.k_new = contiguous(k_new, RAPT_F32, 4, 1, 1, 4, D);
  args.v_new = contiguous(v_new, RAPT_F32, 4, 1, 1, 4, DV);
  args.seqlens = contiguous((void*)length, RAPT_I32, 1, 1, 0, 0, 0);
  args.k = contiguous(k, RAPT_I8, 4, PAGES, 1, PAGE, D);
  args.v = contiguous(v, RAPT_I8, 4, PAGES, 1, PAGE, DV);
  args.block_table = contiguous((void*)table, RAPT_I32, 2, 1, 4, 0, 0);
  args.k_scale = contiguous(k_scale, RAPT_F32, 4, PAGES, 1, PAGE, 1);
  args.v_scale = contiguous(v_scale, RAPT_F32, 4, PAGES, 1, PAGE, 1);
  args.k_zero = contiguous(k_zero, RAPT_F32, 4, PAGES, 1, PAGE, 1);
  CHECK_OK(rapt_append_kv(&args, NULL));
  for (int t = 0; t < 4; ++t) {
    const int row = row_of[t];
    for (int c = 0; c < D; ++c) {
      const float x = ((float)k[row * D + c] - k_zero[row]) * k_scale[row];
      CHECK(fabsf(x - k_new[t * D + c]) <= k_scale[row] / 2 + 1e-6f);
    }
    for (int c = 0; c < DV; ++c)
      CHECK(fabsf((float)v[row * DV + c] * v_scale[row] - v_new[t * DV + c]) <= v_scale[row] / 2 + 1e-6f);
  }
  /* The same by a plan, in memory of the caller's. */
  rapt_plan* plan;
  static _Alignas(64) char workspace[4096];
  CHECK_OK(rapt_plan_create_append_kv(&args, NULL, &plan));
  const size_t bytes = rapt_plan_workspace_bytes(plan);
  CHECK(bytes > 0 && bytes <= sizeof workspace);
  const signed char before = k[row_of[0] * D];
  k[row_of[0] * D] = (signed char)(before + 1);
  CHECK_OK(rapt_plan_run_append_kv(plan, &args, workspace, bytes));
  CHECK(k[row_of[0] * D] == before);
  CHECK_REFUSED(rapt_append_kv_with_workspace(&args, NULL, workspace, bytes - 1), "workspace");
  rapt_plan_destroy(plan);
  CHECK(k_scale[0] == 0 && k[0] == 0 && k_scale[3 * PAGE] == 0);

  CHECK_REFUSED(rapt_append_kv(NULL, NULL), "args");
#define CHECK_BAD(break_it, argument)                     \
  do {                                                    \
    rapt_append_kv_args good = args;                      \
    break_it;                                             \
    CHECK_REFUSED(rapt_append_kv(&args, NULL), argument); \
    args = good;                                          \
  } while (0)
  CHECK_BAD(args.struct_size = 1, "struct_size");
  CHECK_BAD(args.kv_kind = 4, "cache.kind");
  CHECK_BAD(args.kv_kind = RAPT_KV_RAGGED, "cache.kind");
  CHECK_BAD(args.k.dtype = 10, "cache.k.dtype");
  CHECK_BAD(args.k.ndim = 5, "cache.k");
  CHECK_BAD(args.k_new.data = NULL, "k_new");
  CHECK_BAD(memset(&args.v_scale, 0, sizeof args.v_scale), "cache.v_scale");
  CHECK_BAD(args.block_table.shape[1] = 3, "seqlens");
}

#define CHECK_MERGE_REFUSED(break_it, argument)              \
  do {                                                       \
    rapt_merge_states_args good = args;                      \
    break_it;                                                \
    CHECK_REFUSED(rapt_merge_states(&args, NULL), argument); \
    args = good;                                             \
  } while (0)

static void test_merge(void) {
  static fixture f;
  static float out[2][B * HQ * SQ * DV], lse[2][B * HQ * SQ];
  rapt_tensor outs[2], lses[2];
  fixture_init(&f);
  for (int i = 0; i < 2; ++i) {
    rapt_attention_args part = f.args;
    part.out.data = out[i], part.lse.data = lse[i];
    part.k.data = f.k + (i ? 3 * D : 0), part.v.data = f.v + (i ? 3 * DV : 0);
    part.k.shape[2] = part.v.shape[2] = i ? SK - 3 : 3;
    CHECK_OK(rapt_attention(&part, NULL));
    outs[i] = part.out, lses[i] = part.lse;
  }
  rapt_merge_states_args args = rapt_merge_states_args_init();
  args.outs = outs, args.lses = lses, args.count = 2, args.out = f.args.out, args.lse = f.args.lse;
  CHECK_OK(rapt_merge_states(&args, NULL));
  CHECK(reference_error(&f.args) < 2e-6);
  f.out[0] = NAN;
  memset(&args.lse, 0, sizeof args.lse);
  CHECK_OK(rapt_merge_states(&args, NULL));
  CHECK(reference_error(&f.args) < 2e-6);

  /* The same by a plan, in memory of the caller's. */
  rapt_plan* plan;
  CHECK_OK(rapt_plan_create_merge_states(&args, NULL, &plan));
  static _Alignas(64) char workspace[4096];
  const size_t bytes = rapt_plan_workspace_bytes(plan);
  CHECK(bytes > 0 && bytes <= sizeof workspace);
  f.out[0] = NAN;
  CHECK_OK(rapt_plan_run_merge_states(plan, &args, workspace, bytes));
  CHECK(reference_error(&f.args) < 2e-6);
  CHECK_OK(rapt_merge_states_with_workspace(&args, NULL, workspace, bytes));
  CHECK_REFUSED(rapt_merge_states_with_workspace(&args, NULL, workspace, bytes - 1), "workspace");
  rapt_plan_destroy(plan);

  CHECK_REFUSED(rapt_merge_states(NULL, NULL), "args");
  CHECK_MERGE_REFUSED(args.count = 0, "outs");
  CHECK_MERGE_REFUSED(args.outs = NULL, "outs");
  CHECK(strstr(rapt_last_error(), "NULL") != NULL);
  CHECK_MERGE_REFUSED(args.lses = NULL, "lses");
  CHECK(strstr(rapt_last_error(), "NULL") != NULL);
  CHECK_MERGE_REFUSED(memset(&args.out, 0, sizeof args.out), "out");
  CHECK_MERGE_REFUSED(args.out = outs[1], "out");
  outs[1].shape[3] = 1;
  CHECK_REFUSED(rapt_merge_states(&args, NULL), "outs[1]");
}

void test_kv_caches(void) {
  test_strided();
  test_paged_and_quantized();
  test_merge();
}
