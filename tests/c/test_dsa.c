/* Every member of the arguments of rapt_index_scores() and rapt_select_topk() against the definition in double; what is
 * refused; plans in the caller's memory. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

enum { HEADS = 3, PAGE = 2, PAGES = 10, TOPK = 4, KEYS = SK + 1 }; /* a table's keys are a multiple of a page */

typedef struct dsa_fixture {
  float q[B * SQ * HEADS * D], k[PAGES * PAGE * D], weights[B * SQ * HEADS], k_scale[PAGES * PAGE];
  int8_t codes[PAGES * PAGE * D];
  float scores[B * SQ * KEYS];
  int32_t indices[B * SQ * TOPK];
  int64_t seqlens[B], block_table[B * KEYS / PAGE], key_begin[B * SQ], key_end[B * SQ];
  rapt_index_scores_args args;
} dsa_fixture;

/* Fixed numbers, no optional input, both outputs: causal, the last query sees all keys. */
static void dsa_init(dsa_fixture* f) {
  memset(f, 0, sizeof *f);
  fill(f->q, B * SQ * HEADS * D, 41), fill(f->k, PAGES * PAGE * D, 42), fill(f->weights, B * SQ * HEADS, 43);
  fill(f->k_scale, PAGES * PAGE, 44);
  for (int i = 0; i < PAGES * PAGE * D; ++i) f->codes[i] = (int8_t)(100 * f->k[i]);
  for (int i = 0; i < PAGES * PAGE; ++i) f->k_scale[i] = fabsf(f->k_scale[i]) + 0.01f;
  fill_with_nan(f->scores, B * SQ * KEYS);
  for (int i = 0; i < B * SQ * TOPK; ++i) f->indices[i] = 99;
  f->args = rapt_index_scores_args_init();
  f->args.q = contiguous(f->q, RAPT_F32, 4, B, SQ, HEADS, D);
  f->args.k = contiguous(f->k, RAPT_F32, 3, B, SK, D, 0);
  f->args.weights = contiguous(f->weights, RAPT_F32, 3, B, SQ, HEADS, 0);
  f->args.scores = contiguous(f->scores, RAPT_F32, 3, B, SQ, SK, 0);
  f->args.indices = contiguous(f->indices, RAPT_I32, 3, B, SQ, TOPK, 0);
  f->args.align = RAPT_ALIGN_BOTTOM_RIGHT;
}
static void with_lengths(dsa_fixture* f) {
  f->seqlens[0] = 6, f->seqlens[1] = 3;
  f->args.seqlens = contiguous(f->seqlens, RAPT_I64, 1, B, 0, 0, 0);
}
static void with_pages(dsa_fixture* f) {
  static const int64_t table[B * KEYS / PAGE] = {9, 0, 4, 77, 2, 9, -5, 77};
  memcpy(f->block_table, table, sizeof table);
  f->args.block_table = contiguous(f->block_table, RAPT_I64, 2, B, KEYS / PAGE, 0, 0);
  f->args.k = contiguous(f->k, RAPT_F32, 3, PAGES, PAGE, D, 0);
  f->args.scores = contiguous(f->scores, RAPT_F32, 3, B, SQ, KEYS, 0);
  with_lengths(f);
}
static void with_codes(dsa_fixture* f) {
  const rapt_tensor* const k = &f->args.k;
  f->args.k = contiguous(f->codes, RAPT_I8, 3, k->shape[0], k->shape[1], D, 0);
  f->args.k_scale = contiguous(f->k_scale, RAPT_F32, 2, f->args.k.shape[0], f->args.k.shape[1], 0, 0);
}
static void with_ranges(dsa_fixture* f) {
  for (int i = 0; i < B * SQ; ++i) f->key_begin[i] = i % 4, f->key_end[i] = SK - i % 3;
  f->args.key_begin = contiguous(f->key_begin, RAPT_I64, 2, B, SQ, 0, 0);
  f->args.key_end = contiguous(f->key_end, RAPT_I64, 2, B, SQ, 0, 0);
}

static int is_seen(const dsa_fixture* f, int b, int i, int j) {
  const rapt_index_scores_args* const a = &f->args;
  const int64_t keys = a->seqlens.ndim ? f->seqlens[b] : SK;
  const int64_t offset = a->align == RAPT_ALIGN_BOTTOM_RIGHT ? keys - SQ
                         : a->align == RAPT_ALIGN_OFFSET     ? a->align_offset
                                                             : 0;
  if (j >= keys || (a->causal && j > i + offset)) return 0;
  return (!a->key_begin.ndim || j >= f->key_begin[b * SQ + i]) && (!a->key_end.ndim || j < f->key_end[b * SQ + i]);
}
static double score_of(const dsa_fixture* f, int b, int i, int j) {
  const rapt_index_scores_args* const a = &f->args;
  const int row = a->block_table.ndim ? (int)f->block_table[b * KEYS / PAGE + j / PAGE] * PAGE + j % PAGE : b * SK + j;
  double score = 0;
  for (int h = 0; h < HEADS; ++h) {
    double product = 0;
    for (int c = 0; c < D; ++c)
      product += (double)f->q[((b * SQ + i) * HEADS + h) * D + c] *
                 (a->k.dtype == RAPT_I8 ? f->codes[row * D + c] : (double)f->k[row * D + c]);
    score += f->weights[(b * SQ + i) * HEADS + h] * (a->relu ? fmax(product, 0) : product);
  }
  return score * (a->has_scale ? a->scale : 1 / sqrt(D)) * (a->k_scale.ndim ? f->k_scale[row] : 1);
}

/* Whether `indices` are the TOPK largest of `scores`, best first; ties the lower one first. */
static int is_selection(const int32_t* indices, const float* scores, int keys) {
  char taken[KEYS] = {0};
  for (int n = 0; n < TOPK; ++n) {
    int best = -1;
    for (int j = 0; j < keys; ++j)
      if (!taken[j] && scores[j] > -INFINITY && (best < 0 || scores[j] > scores[best])) best = j;
    if (indices[n] != best) return 0;
    if (best >= 0) taken[best] = 1;
  }
  return 1;
}

/* Largest error of the scores; infinite where a hidden one is not -inf, or the indices are not theirs. */
static double error_of(const dsa_fixture* f) {
  const int keys = f->args.block_table.ndim ? KEYS : SK;
  double worst = 0;
  for (int b = 0; b < B; ++b)
    for (int i = 0; i < SQ; ++i) {
      const float* const row = f->scores + (b * SQ + i) * keys;
      for (int j = 0; j < keys; ++j) {
        if (is_seen(f, b, i, j)) worst = larger(worst, row[j] - score_of(f, b, i, j));
        else if (row[j] != -INFINITY) return INFINITY;
      }
      if (!is_selection(f->indices + (b * SQ + i) * TOPK, row, keys)) return INFINITY;
    }
  return worst;
}

static const double kTolerance = 2e-6, kToleranceOfCodes = 1e-4;

/* And that the same indices come without scores, and from these by rapt_select_topk(). */
static double check_call(dsa_fixture* f) {
  CHECK_OK(rapt_index_scores(&f->args, NULL));
  int32_t apart[B * SQ * TOPK];
  rapt_select_topk_args select = rapt_select_topk_args_init();
  select.scores = f->args.scores;
  select.indices = contiguous(apart, RAPT_I32, 3, B, SQ, TOPK, 0);
  CHECK_OK(rapt_select_topk(&select, NULL));
  CHECK(memcmp(apart, f->indices, sizeof apart) == 0);
  rapt_index_scores_args fused = f->args;
  memset(&fused.scores, 0, sizeof fused.scores);
  fused.indices.data = apart;
  memset(apart, 0, sizeof apart);
  CHECK_OK(rapt_index_scores(&fused, NULL));
  CHECK(memcmp(apart, f->indices, sizeof apart) == 0);
  return error_of(f);
}
#define CHECK_DSA(change)                                                           \
  do {                                                                              \
    static dsa_fixture f;                                                           \
    dsa_init(&f);                                                                   \
    change;                                                                         \
    CHECK(check_call(&f) < (f.args.k_scale.ndim ? kToleranceOfCodes : kTolerance)); \
  } while (0)
#define NONE(tensor) memset(&f.args.tensor, 0, sizeof f.args.tensor)

static void test_results(void) {
  CHECK_DSA((void)0);
  CHECK_DSA((f.args.has_scale = 1, f.args.scale = -0.5f));
  CHECK_DSA(f.args.relu = 0);
  CHECK_DSA((f.args.causal = 0, f.args.align = RAPT_ALIGN_NONE));
  CHECK_DSA(f.args.align = RAPT_ALIGN_TOP_LEFT);
  CHECK_DSA((f.args.align = RAPT_ALIGN_OFFSET, f.args.align_offset = -2)); /* queries without keys */
  CHECK_DSA(with_lengths(&f));
  CHECK_DSA(with_ranges(&f));
  CHECK_DSA(with_codes(&f));
  CHECK_DSA(with_pages(&f));
  CHECK_DSA((with_pages(&f), with_codes(&f), with_ranges(&f)));
}

static void test_select_topk(void) {
  const float scores[] = {1, -INFINITY, 3, -0.0f, 0, 3, NAN, -2, NAN};
  enum { N = sizeof scores / sizeof *scores };
  const int32_t wanted[N + 1] = {6, 8, 2, 5, 0, 3, 4, 7, -1, -1};
  for (int n = 1; n <= N + 1; ++n) {
    int32_t indices[N + 1];
    rapt_select_topk_args args = rapt_select_topk_args_init();
    args.scores = contiguous((void*)scores, RAPT_F32, 1, N, 0, 0, 0);
    args.indices = contiguous(indices, RAPT_I32, 1, n, 0, 0, 0);
    CHECK_OK(rapt_select_topk(&args, NULL));
    CHECK(memcmp(indices, wanted, (size_t)n * sizeof *indices) == 0);
  }
}

#define CHECK_BAD(break_it, argument) CHECK_BAD_OF(index_scores, dsa_fixture, dsa_init, break_it, argument)

static void test_refusals(void) {
  static dsa_fixture good;
  dsa_init(&good);
  CHECK_NULLS(index_scores, &good.args);

  CHECK_BAD(f.args.struct_size = 0, "struct_size");
  CHECK(strstr(rapt_last_error(), "rapt_index_scores_args_init") != NULL);
  CHECK_BAD(NONE(q), "q");
  CHECK_BAD(f.args.k.shape[2] = D - 1, "k");
  CHECK_BAD(f.args.k.dtype = RAPT_I32, "k");
  CHECK_BAD(f.args.k.dtype = 100, "k.dtype");
  CHECK_BAD(f.args.weights.dtype = RAPT_BF16, "weights");
  CHECK_BAD(f.args.weights.shape[2] = 1, "weights");
  CHECK_BAD((NONE(scores), NONE(indices)), "scores");
  CHECK_BAD(f.args.scores.shape[2] = SK - 1, "scores");
  CHECK_BAD(f.args.indices.shape[2] = 0, "indices");
  CHECK_BAD(f.args.indices.dtype = RAPT_I64, "indices");
  CHECK_BAD(f.args.indices.data = f.scores, "indices");
  CHECK_BAD(f.args.align = RAPT_ALIGN_NONE, "align");
  CHECK_BAD(f.args.align = 4, "align");
  CHECK_BAD((f.args.has_scale = 1, f.args.scale = INFINITY), "scale");
  CHECK_BAD((with_codes(&f), NONE(k_scale)), "k_scale");
  CHECK_BAD((with_lengths(&f), f.seqlens[1] = SK + 1), "seqlens");
  CHECK_BAD((with_pages(&f), NONE(seqlens)), "seqlens");
  CHECK_BAD((with_pages(&f), f.block_table[2] = PAGES), "block_table");
  CHECK_BAD((with_ranges(&f), f.args.key_begin.shape[1] = 1), "key_begin");
  CHECK_BAD((with_ranges(&f), f.args.key_end.dtype = RAPT_F32), "key_end");

  rapt_select_topk_args select = rapt_select_topk_args_init();
  CHECK_REFUSED(rapt_select_topk(NULL, NULL), "args");
  CHECK_REFUSED(rapt_select_topk(&select, NULL), "scores");
  select.scores = good.args.scores;
  CHECK_REFUSED(rapt_select_topk(&select, NULL), "indices");
  select.indices = good.args.indices;
  select.struct_size = 4;
  CHECK_REFUSED(rapt_select_topk(&select, NULL), "struct_size");
  select.struct_size = sizeof select;
  select.indices.shape[1] = 1;
  CHECK_REFUSED(rapt_select_topk(&select, NULL), "indices");
}

static int has_entry(int32_t operation) {
  const rapt_entry_info* entries;
  size_t count;
  CHECK_OK(rapt_entries(&entries, &count));
  for (size_t i = 0; i < count; ++i)
    if (entries[i].operation == operation) return 1;
  return 0;
}

static void test_plans_and_sizes(void) {
  static dsa_fixture f;
  dsa_init(&f);
  rapt_plan *plan, *same;
  CHECK_OK(rapt_plan_create_index_scores(&f.args, NULL, &plan));
  const size_t bytes = rapt_plan_workspace_bytes(plan);
  CHECK(bytes > 0);
  char* workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
  CHECK_OK(rapt_plan_run_index_scores(plan, &f.args, workspace, bytes));
  CHECK(error_of(&f) < kTolerance);
  dsa_init(&f);
  CHECK_OK(rapt_index_scores_with_workspace(&f.args, NULL, workspace, bytes));
  CHECK(error_of(&f) < kTolerance);
  CHECK_REFUSED(rapt_index_scores_with_workspace(&f.args, NULL, workspace, bytes - 1), "workspace");
  free(workspace);

  char text[200];
  CHECK_OK(rapt_plan_problem_text(plan, text, sizeof text, NULL));
  CHECK(strcmp(text, "index_scores b=2 sq=5 sk=7 h=3 d=8 align=bottom_right topk=4 scores") == 0);
  CHECK_OK(rapt_plan_create_from_text(text, NULL, &same));
  CHECK(strcmp(rapt_plan_entry(same), rapt_plan_entry(plan)) == 0);
  rapt_plan_destroy(same);
  rapt_plan_destroy(plan);

  int32_t indices[B * SQ * TOPK];
  rapt_select_topk_args select = rapt_select_topk_args_init();
  select.scores = f.args.scores;
  select.indices = contiguous(indices, RAPT_I32, 3, B, SQ, TOPK, 0);
  CHECK_OK(rapt_plan_create_select_topk(&select, NULL, &plan));
  CHECK_OK(rapt_plan_run_select_topk(plan, &select, NULL, 0));
  CHECK(memcmp(indices, f.indices, sizeof indices) == 0);
  CHECK_REFUSED(rapt_plan_run_index_scores(plan, &f.args, NULL, 0), "args");
  CHECK_OK(rapt_plan_problem_text(plan, text, sizeof text, NULL));
  CHECK(strcmp(text, "select_topk rows=10 sk=7 n=4") == 0);
  rapt_plan_destroy(plan);
  CHECK_REFUSED(rapt_select_topk_with_workspace(&select, NULL, NULL, 64), "workspace");

  /* A newer caller's structure, with something that is not known here. */
  struct {
    rapt_index_scores_args args;
    int64_t more;
  } newer = {f.args, 1};
  newer.args.struct_size = sizeof newer;
  CHECK_REFUSED(rapt_index_scores(&newer.args, NULL), "struct_size");

  CHECK(has_entry(RAPT_OPERATION_INDEX_SCORES) && has_entry(RAPT_OPERATION_SELECT_TOPK));
}

void test_dsa(void) {
  test_results();
  test_select_topk();
  test_refusals();
  test_plans_and_sizes();
}
