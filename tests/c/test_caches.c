/* Caches: pages, rings and quantised keys and values give what the same numbers give as plain f32 tensors. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

enum { PAGE = 2, PAGES = 12, TABLE = 4, CACHE_DV = 4, GROUPS = 2 };

static const double kTolerance = 2e-6;

/* The value of an 8-bit float with `digits` fraction bits; e5m2's infinities and NaN aside. */
static float from_float8(uint8_t code, int digits) {
  const int bias = digits == 3 ? 7 : 15, exponent = (code & 0x7f) >> digits, fraction = code & ((1 << digits) - 1);
  const double value =
      exponent ? ldexp(fraction + (1 << digits), exponent - bias - digits) : ldexp(fraction, 1 - bias - digits);
  return (float)(code >> 7 ? -value : value);
}

/* Element i of a row of codes. */
static float decode(const uint8_t* row, int i, int32_t dtype) {
  if (dtype == RAPT_I8) return (float)(int8_t)row[i];
  if (dtype == RAPT_F8E4M3) return from_float8(row[i], 3);
  if (dtype == RAPT_F8E5M2) return from_float8(row[i], 2);
  const int half = i % 2 ? row[i / 2] >> 4 : row[i / 2] & 15;
  return (float)(half < 8 ? half : half - 16);
}

/* Codes that are finite numbers, of moderate size if they are floats. */
static void fill_codes(uint8_t* codes, size_t count, int32_t dtype, unsigned seed) {
  float* numbers = malloc(count * sizeof *numbers);
  fill(numbers, count, seed);
  for (size_t i = 0; i < count; ++i) {
    codes[i] = (uint8_t)(int8_t)(numbers[i] * 127);
    if (dtype == RAPT_F8E4M3) codes[i] = (uint8_t)((codes[i] & 0x80) | (codes[i] & 0x3f)); /* below 2 */
    if (dtype == RAPT_F8E5M2) codes[i] = (uint8_t)((codes[i] & 0x80) | (codes[i] & 0x3f));
  }
  free(numbers);
}

/* Calls with quantised pages, and checks against f32 keys and values of [B, HK, SK, .] that mean the same. */
static void test_pages(int32_t dtype, int scales, int zeros) {
  fixture f;
  const int packed = dtype == RAPT_I4X2 ? 2 : 1;
  static uint8_t k[PAGES * HK * PAGE * D], v[PAGES * HK * PAGE * CACHE_DV];
  static float out[B * HQ * SQ * CACHE_DV], plain_k[B * HK * SK * D], plain_v[B * HK * SK * CACHE_DV];
  float k_scale[PAGES * HK * PAGE * GROUPS], v_scale[HK * GROUPS], k_zero[HK * GROUPS], v_zero[HK * GROUPS];
  /* Sequences of 7 and 3 keys, the first page in common; entries of no page. */
  const int32_t table[B * TABLE] = {3, 0, 10, 5, 3, 7, -1, 1 << 30};
  const int64_t lengths[B] = {SK, 3};
  fixture_init(&f);
  fill_codes(k, sizeof k, dtype, 11);
  fill_codes(v, sizeof v, dtype, 12);
  fill(k_scale, PAGES * HK * PAGE * GROUPS, 13);
  fill(v_scale, HK * GROUPS, 14);
  fill(k_zero, HK * GROUPS, 15);
  fill(v_zero, HK * GROUPS, 16);
  if (dtype == RAPT_I8 || dtype == RAPT_I4X2) { /* numbers of about 1 */
    const float size = dtype == RAPT_I8 ? 127 : 7;
    for (int i = 0; i < PAGES * HK * PAGE * GROUPS; ++i) k_scale[i] /= size;
    for (int i = 0; i < HK * GROUPS; ++i) v_scale[i] /= size, k_zero[i] *= size / 4, v_zero[i] *= size / 4;
  }
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < HK; ++h) {
      for (int j = 0; j < lengths[b]; ++j) {
        const int row = (table[b * TABLE + j / PAGE] * HK + h) * PAGE + j % PAGE, to = (b * HK + h) * SK + j;
        for (int i = 0; i < D; ++i) {
          const int group = i / (D / GROUPS);
          float x = decode(k + row * D / packed, i, dtype);
          if (zeros) x -= k_zero[h * GROUPS + group];
          plain_k[to * D + i] = scales ? x * k_scale[row * GROUPS + group] : x;
        }
        for (int i = 0; i < CACHE_DV; ++i) {
          const int group = i / (CACHE_DV / GROUPS);
          float x = decode(v + row * CACHE_DV / packed, i, dtype);
          if (zeros) x -= v_zero[h * GROUPS + group];
          plain_v[to * CACHE_DV + i] = scales ? x * v_scale[h * GROUPS + group] : x;
        }
      }
    }
  }
  f.args.out = contiguous(out, RAPT_F32, 4, B, HQ, SQ, CACHE_DV);
  f.args.kv_seqlens = contiguous((void*)(uintptr_t)lengths, RAPT_I64, 1, B, 0, 0, 0);
  f.args.causal = 1;
  f.args.align = RAPT_ALIGN_BOTTOM_RIGHT;
  rapt_attention_args paged = f.args;
  paged.kv_kind = RAPT_KV_PAGED;
  paged.k = contiguous(k, dtype, 4, PAGES, HK, PAGE, D / packed);
  paged.v = contiguous(v, dtype, 4, PAGES, HK, PAGE, CACHE_DV / packed);
  paged.block_table = contiguous((void*)(uintptr_t)table, RAPT_I32, 2, B, TABLE, 0, 0);
  if (scales) {
    paged.k_scale = contiguous(k_scale, RAPT_F32, 4, PAGES, HK, PAGE, GROUPS);
    paged.v_scale = contiguous(v_scale, RAPT_F32, 4, 1, HK, 1, GROUPS);
  }
  if (zeros) {
    paged.k_zero = contiguous(k_zero, RAPT_F32, 4, 1, HK, 1, GROUPS);
    paged.v_zero = contiguous(v_zero, RAPT_F32, 4, 1, HK, 1, GROUPS);
  }
  CHECK_OK(rapt_attention(&paged, NULL));
  int32_t narrow[B] = {SK, 3};
  f.args.kv_seqlens = contiguous(narrow, RAPT_I32, 1, B, 0, 0, 0);
  f.args.k = contiguous(plain_k, RAPT_F32, 4, B, HK, SK, D);
  f.args.v = contiguous(plain_v, RAPT_F32, 4, B, HK, SK, CACHE_DV);
  CHECK(reference_error(&f.args) < 4 * kTolerance);

  char text[256];
  CHECK_OK(rapt_problem_text(RAPT_OPERATION_ATTENTION, &paged, text, sizeof text, NULL));
  CHECK(strstr(text, " page=2") != NULL && strstr(text, " kv=") != NULL);
  CHECK((strstr(text, " groups=2") != NULL) == scales && (strstr(text, " zeros") != NULL) == zeros);

  const int32_t wild[B * TABLE] = {3, 0, 10, PAGES, 3, 7, -1, 1 << 30};
  paged.block_table.data = (void*)(uintptr_t)wild;
  CHECK_REFUSED(rapt_attention(&paged, NULL), "kv.block_table");
}

/* Keys whose last columns are not quantised, against f32 keys that mean the same. */
static void test_tail(void) {
  enum { TAIL = 3, OWN = D - TAIL };
  fixture f;
  static uint8_t k[B * HK * SK * OWN], v[B * HK * SK * DV];
  static float tail[B * HK * SK * TAIL], plain_k[B * HK * SK * D], plain_v[B * HK * SK * DV];
  fixture_init(&f);
  fill_codes(k, sizeof k, RAPT_F8E4M3, 21);
  fill_codes(v, sizeof v, RAPT_F8E4M3, 22);
  fill(tail, B * HK * SK * TAIL, 23);
  for (int row = 0; row < B * HK * SK; ++row) {
    for (int i = 0; i < D; ++i)
      plain_k[row * D + i] = i < OWN ? decode(k + row * OWN, i, RAPT_F8E4M3) : tail[row * TAIL + i - OWN];
    for (int i = 0; i < DV; ++i) plain_v[row * DV + i] = decode(v + row * DV, i, RAPT_F8E4M3);
  }
  rapt_attention_args coded = f.args;
  coded.k = contiguous(k, RAPT_F8E4M3, 4, B, HK, SK, OWN);
  coded.v = contiguous(v, RAPT_F8E4M3, 4, B, HK, SK, DV);
  coded.k_tail = contiguous(tail, RAPT_F32, 4, B, HK, SK, TAIL);
  CHECK_OK(rapt_attention(&coded, NULL));
  f.args.k = contiguous(plain_k, RAPT_F32, 4, B, HK, SK, D);
  f.args.v = contiguous(plain_v, RAPT_F32, 4, B, HK, SK, DV);
  CHECK(reference_error(&f.args) < 4 * kTolerance);
  coded.k_tail.shape[2] = SK - 1;
  CHECK_REFUSED(rapt_attention(&coded, NULL), "kv.k_tail");
}

/* Queries of f8e4m3, as they are and with scales of rows or of heads, against f32 queries that mean the same. */
static void test_queries(int scales_of_rows, int scales_of_heads) {
  fixture f;
  static uint8_t q[B * HQ * SQ * D];
  float scale[B * HQ * SQ];
  fixture_init(&f);
  fill_codes(q, sizeof q, RAPT_F8E4M3, 24);
  fill(scale, B * HQ * SQ, 25);
  rapt_attention_args coded = f.args;
  coded.q = contiguous(q, RAPT_F8E4M3, 4, B, HQ, SQ, D);
  if (scales_of_rows) coded.q_scale = contiguous(scale, RAPT_F32, 4, B, HQ, SQ, 1);
  if (scales_of_heads) coded.q_scale = contiguous(scale, RAPT_F32, 4, 1, HQ, 1, 1);
  for (int row = 0; row < B * HQ * SQ; ++row) {
    const float own = scales_of_rows ? scale[row] : scales_of_heads ? scale[row / SQ % HQ] : 1;
    for (int i = 0; i < D; ++i) f.q[row * D + i] = decode(q + row * D, i, RAPT_F8E4M3) * own;
  }
  CHECK_OK(rapt_attention(&coded, NULL));
  CHECK(reference_error(&f.args) < 4 * kTolerance);
  char text[256];
  CHECK_OK(rapt_problem_text(RAPT_OPERATION_ATTENTION, &coded, text, sizeof text, NULL));
  CHECK(strstr(text, " q=f8e4m3") != NULL);
  CHECK((strstr(text, " q_scale") != NULL) == (scales_of_rows || scales_of_heads));

  /* A caller of a version without scales of queries. */
  rapt_plan* plan = NULL;
  coded.struct_size = offsetof(rapt_attention_args, q_scale);
  CHECK_OK(rapt_problem_text(RAPT_OPERATION_ATTENTION, &coded, text, sizeof text, NULL));
  CHECK(strstr(text, " q_scale") == NULL);
  coded.struct_size = sizeof coded;
  CHECK_OK(rapt_plan_create_attention(&coded, NULL, &plan));
  CHECK_OK(rapt_plan_run_attention(plan, &coded, NULL, 0));
  CHECK(reference_error(&f.args) < 4 * kTolerance);
  rapt_plan_destroy(plan);
}

/* Every token has the list of all keys, backwards and with gaps; then the first is left with three, one of them twice.
 */
static void test_gathered(void) {
  enum { N = 2 * SK };
  fixture f;
  int32_t indices[B * SQ * N];
  int64_t counts[B * SQ];
  fixture_init(&f);
  for (int i = 0; i < B * SQ; ++i) {
    for (int j = 0; j < N; ++j) indices[i * N + j] = j % 2 ? -1 : SK - 1 - j / 2;
    counts[i] = N;
  }
  rapt_attention_args gathered = f.args;
  gathered.kv_kind = RAPT_KV_GATHERED;
  gathered.indices = contiguous(indices, RAPT_I32, 3, B, SQ, N, 0);
  CHECK_OK(rapt_attention(&gathered, NULL));
  CHECK(reference_error(&f.args) < kTolerance);
  char text[256];
  CHECK_OK(rapt_problem_text(RAPT_OPERATION_ATTENTION, &gathered, text, sizeof text, NULL));
  CHECK(strstr(text, " sk=14 ") != NULL && strstr(text, " gathered") != NULL);

  gathered.kv_counts = contiguous(counts, RAPT_I64, 2, B, SQ, 0, 0);
  const int32_t few[] = {2, 4, -1, 2, 1 << 30};
  memcpy(indices, few, sizeof few);
  counts[0] = 4;
  memset(f.out, 0xff, sizeof f.out);
  CHECK_OK(rapt_attention(&gathered, NULL));
  rapt_attention_args row = f.args; /* head 0, token 0, over keys 2, 4 and 2 */
  float k[3 * D], v[3 * DV];
  for (int j = 0; j < 3; ++j) {
    memcpy(k + j * D, f.k + (j == 1 ? 4 : 2) * D, D * sizeof *k);
    memcpy(v + j * DV, f.v + (j == 1 ? 4 : 2) * DV, DV * sizeof *v);
  }
  row.q = contiguous(f.q, RAPT_F32, 4, 1, 1, 1, D);
  row.k = contiguous(k, RAPT_F32, 4, 1, 1, 3, D);
  row.v = contiguous(v, RAPT_F32, 4, 1, 1, 3, DV);
  row.out = contiguous(f.out, RAPT_F32, 4, 1, 1, 1, DV);
  row.lse = contiguous(f.lse, RAPT_F32, 3, 1, 1, 1, 0);
  CHECK(reference_error(&row) < kTolerance);

  indices[0] = SK;
  CHECK_REFUSED(rapt_attention(&gathered, NULL), "kv.indices");
  indices[0] = 0, counts[0] = N + 1;
  CHECK_REFUSED(rapt_attention(&gathered, NULL), "kv.counts");
  counts[0] = N, indices[4] = 0, gathered.causal = 1;
  CHECK_REFUSED(rapt_attention(&gathered, NULL), "score.causal");
}

/* A ring of SK rows after SK + 2 keys: the first two rows hold the last two keys. */
static void test_ring(void) {
  fixture f, straight;
  const int64_t lengths[B] = {SK + 2, 4};
  fixture_init(&f);
  f.args.kv_kind = RAPT_KV_RING;
  f.args.kv_seqlens = contiguous((void*)(uintptr_t)lengths, RAPT_I64, 1, B, 0, 0, 0);
  f.args.causal = 1;
  f.args.align = RAPT_ALIGN_BOTTOM_RIGHT;
  CHECK_REFUSED(rapt_attention(&f.args, NULL), "k"); /* without a window its rows see keys that are overwritten */
  f.args.has_window = 1, f.args.window_left = SK - SQ, f.args.window_right = -1;
  CHECK_OK(rapt_attention(&f.args, NULL));

  /* Keys 2 to SK + 1 in order, and rows that sit where they did. */
  fixture_init(&straight);
  for (int h = 0; h < HK; ++h) {
    for (int j = 0; j < SK; ++j) {
      const int from = h * SK + (j + 2) % SK, to = h * SK + j;
      memcpy(straight.k + to * D, f.k + from * D, D * sizeof(float));
      memcpy(straight.v + to * DV, f.v + from * DV, DV * sizeof(float));
    }
  }
  int32_t left[B] = {SK, 4};
  straight.args.kv_seqlens = contiguous(left, RAPT_I32, 1, B, 0, 0, 0);
  straight.args.causal = 1;
  straight.args.align = RAPT_ALIGN_BOTTOM_RIGHT;
  straight.args.has_window = 1, straight.args.window_left = SK - SQ, straight.args.window_right = -1;
  memcpy(straight.out, f.out, sizeof f.out);
  memcpy(straight.lse, f.lse, sizeof f.lse);
  CHECK(reference_error(&straight.args) < kTolerance);
}

void test_caches(void) {
  test_pages(RAPT_I8, 1, 0);
  test_pages(RAPT_I8, 1, 1);
  test_pages(RAPT_I4X2, 1, 0);
  test_pages(RAPT_I4X2, 1, 1);
  test_pages(RAPT_F8E4M3, 0, 0);
  test_pages(RAPT_F8E4M3, 1, 1);
  test_pages(RAPT_F8E5M2, 0, 0);
  test_pages(RAPT_F8E5M2, 1, 0);
  test_ring();
  test_tail();
  test_queries(0, 0);
  test_queries(1, 0);
  test_queries(0, 1);
  test_gathered();
}
