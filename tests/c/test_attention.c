/* Every field of rapt_attention_args reaches the kernel and means what it says. */
#include <math.h>

#include "check.h"
#include "fixture.h"

static const double kTolerance = 2e-6;

static void run_and_compare(rapt_attention_args* args) {
  CHECK_OK(rapt_attention(args, NULL));
  CHECK(reference_error(args) < kTolerance);
}

static void test_score_fields(void) {
  fixture f;
  float bias[HQ * SK], slopes[B * HQ], sinks[HQ];
  fill(bias, HQ * SK, 4);
  bias[3] = -INFINITY;
  fill(slopes, B * HQ, 5);
  fill(sinks, HQ, 6);
  uint8_t mask[B * SK];
  for (int i = 0; i < B * SK; ++i) mask[i] = i % 3 != 0;

  fixture_init(&f);
  run_and_compare(&f.args);

  f.args.has_scale = 1;
  f.args.scale = -0.75f;
  run_and_compare(&f.args);
  f.args.scale = 0;
  run_and_compare(&f.args);

  fixture_init(&f);
  f.args.softcap = 0.25f;
  run_and_compare(&f.args);

  fixture_init(&f);
  f.args.causal = 1;
  const int32_t aligns[] = {RAPT_ALIGN_TOP_LEFT, RAPT_ALIGN_BOTTOM_RIGHT, RAPT_ALIGN_OFFSET};
  for (int i = 0; i < 3; ++i) {
    f.args.align = aligns[i];
    f.args.align_offset = -2; /* rows 0 and 1 have no key */
    run_and_compare(&f.args);
  }
  CHECK(f.out[0] == 0 && f.lse[0] == -INFINITY);

  fixture_init(&f);
  f.args.align = RAPT_ALIGN_BOTTOM_RIGHT;
  f.args.has_window = 1;
  f.args.window_left = 1;
  f.args.window_right = -1;
  run_and_compare(&f.args);
  f.args.window_left = -1;
  f.args.window_right = 0;
  run_and_compare(&f.args);

  fixture_init(&f);
  f.args.bias = contiguous(bias, RAPT_F32, 3, HQ, 1, SK, 0);
  run_and_compare(&f.args);

  fixture_init(&f);
  f.args.mask = contiguous(mask, RAPT_BOOL, 4, B, 1, 1, SK);
  run_and_compare(&f.args);

  fixture_init(&f);
  f.args.alibi = contiguous(slopes, RAPT_F32, 2, B, HQ, 0, 0);
  f.args.align = RAPT_ALIGN_BOTTOM_RIGHT;
  run_and_compare(&f.args);

  fixture_init(&f);
  f.args.sinks = contiguous(sinks, RAPT_F32, 1, HQ, 0, 0, 0);
  run_and_compare(&f.args);

  float of_seed[2][B * HQ * SQ * DV];
  for (int i = 0; i < 2; ++i) {
    fixture_init(&f);
    f.args.dropout = 0.5f;
    f.args.dropout_seed = (uint64_t)i << 40;
    f.args.dropout_offset = 0xfedcba9876543210u;
    run_and_compare(&f.args);
    memcpy(of_seed[i], f.out, sizeof f.out);
  }
  CHECK(memcmp(of_seed[0], of_seed[1], sizeof f.out) != 0);
  f.args.dropout_offset = 3;
  run_and_compare(&f.args);
  CHECK(memcmp(of_seed[1], f.out, sizeof f.out) != 0);

  int32_t lengths[B] = {SK, 2};
  fixture_init(&f);
  f.args.kv_seqlens = contiguous(lengths, RAPT_I32, 1, B, 0, 0, 0);
  run_and_compare(&f.args);
}

/* [b, s, h, d] memory, as projections give it; no lse. */
static void test_strides(void) {
  fixture f;
  fixture_init(&f);
  rapt_tensor* tensors[] = {&f.args.q, &f.args.k, &f.args.v, &f.args.out};
  for (int i = 0; i < 4; ++i) {
    rapt_tensor* t = tensors[i];
    t->strides[1] = t->shape[3];
    t->strides[2] = t->shape[1] * t->shape[3];
  }
  memset(&f.args.lse, 0, sizeof f.args.lse);
  run_and_compare(&f.args);
  CHECK(isnan(f.lse[0]));
}

/* Every type of q, of k and v, and of out with every other. */
static void test_types(void) {
  static const int32_t types[] = {RAPT_F32, RAPT_BF16, RAPT_F16};
  uint16_t q[B * HQ * SQ * D], k[B * HK * SK * D], v[B * HK * SK * DV], out[B * HQ * SQ * DV];
  CHECK(to_half(1.00390625f, RAPT_BF16) == 0x3f80 && to_half(-1.01171875f, RAPT_BF16) == 0xbf82);
  CHECK(to_half(65504, RAPT_F16) == 0x7bff && from_half(0x7bff, RAPT_F16) == 65504 &&
        from_half(1, RAPT_F16) == 0x1p-24);
  for (int n = 0; n < 27; ++n) {
    const int32_t q_type = types[n % 3], kv_type = types[n / 3 % 3], out_type = types[n / 9];
    fixture f;
    fixture_init(&f);
    const struct {
      rapt_tensor* tensor;
      const float* from;
      uint16_t* to;
      int count;
      int32_t type;
    } halves[] = {{&f.args.q, f.q, q, B * HQ * SQ * D, q_type},
                  {&f.args.k, f.k, k, B * HK * SK * D, kv_type},
                  {&f.args.v, f.v, v, B * HK * SK * DV, kv_type},
                  {&f.args.out, NULL, out, B * HQ * SQ * DV, out_type}};
    for (int t = 0; t < 4; ++t) {
      if (halves[t].type == RAPT_F32) continue;
      halves[t].tensor->data = halves[t].to;
      halves[t].tensor->dtype = halves[t].type;
      for (int i = 0; i < halves[t].count; ++i) {
        const float value = halves[t].from ? halves[t].from[i] : 0;
        halves[t].to[i] = halves[t].from ? to_half(fabsf(value) < 0x1p-14f ? 0 : value, halves[t].type) : 0xffff;
      }
    }
    CHECK_OK(rapt_attention(&f.args, NULL));
    /* A rounding of out and one of the probabilities; values lie in [-1, 1). */
    const int coarsest = q_type == RAPT_BF16 || kv_type == RAPT_BF16 || out_type == RAPT_BF16;
    const int all_f32 = q_type == RAPT_F32 && kv_type == RAPT_F32 && out_type == RAPT_F32;
    CHECK(reference_error(&f.args) < (all_f32 ? kTolerance : coarsest ? 2 * 0x1p-8 : 2 * 0x1p-11));
  }
}

/* Two sequences laid end to end give what each gives alone. */
static void test_ragged(void) {
  enum { LEN_Q0 = 2, LEN_Q1 = 3, LEN_K0 = 4, LEN_K1 = 3, TOTAL_Q = LEN_Q0 + LEN_Q1, TOTAL_K = LEN_K0 + LEN_K1 };
  float q[TOTAL_Q * HQ * D], k[TOTAL_K * HK * D], v[TOTAL_K * HK * DV];
  float out[TOTAL_Q * HQ * DV], lse[TOTAL_Q * HQ];
  fill(q, TOTAL_Q * HQ * D, 7);
  fill(k, TOTAL_K * HK * D, 8);
  fill(v, TOTAL_K * HK * DV, 9);
  int64_t cu_q[] = {0, LEN_Q0, TOTAL_Q};
  int32_t cu_k[] = {0, LEN_K0, TOTAL_K};

  rapt_attention_args args = rapt_attention_args_init();
  args.kv_kind = RAPT_KV_RAGGED;
  args.q = contiguous(q, RAPT_F32, 3, TOTAL_Q, HQ, D, 0);
  args.k = contiguous(k, RAPT_F32, 3, TOTAL_K, HK, D, 0);
  args.v = contiguous(v, RAPT_F32, 3, TOTAL_K, HK, DV, 0);
  args.out = contiguous(out, RAPT_F32, 3, TOTAL_Q, HQ, DV, 0);
  args.lse = contiguous(lse, RAPT_F32, 2, TOTAL_Q, HQ, 0, 0);
  args.cu_seqlens_q = contiguous(cu_q, RAPT_I64, 1, 3, 0, 0, 0);
  args.cu_seqlens_k = contiguous(cu_k, RAPT_I32, 1, 3, 0, 0, 0);
  args.causal = 1;
  args.align = RAPT_ALIGN_BOTTOM_RIGHT;
  CHECK_OK(rapt_attention(&args, NULL));

  for (int n = 0; n < 2; ++n) {
    const int64_t row_q = cu_q[n], len_q = cu_q[n + 1] - row_q, row_k = cu_k[n], len_k = cu_k[n + 1] - row_k;
    rapt_attention_args one = rapt_attention_args_init();
    const struct {
      rapt_tensor* to;
      float* data;
      int64_t heads, rows, size;
    } views[] = {{&one.q, q + row_q * HQ * D, HQ, len_q, D},
                 {&one.k, k + row_k * HK * D, HK, len_k, D},
                 {&one.v, v + row_k * HK * DV, HK, len_k, DV},
                 {&one.out, out + row_q * HQ * DV, HQ, len_q, DV}};
    for (int i = 0; i < 4; ++i) {
      *views[i].to = contiguous(views[i].data, RAPT_F32, 4, 1, views[i].heads, views[i].rows, views[i].size);
      views[i].to->strides[1] = views[i].size;
      views[i].to->strides[2] = views[i].heads * views[i].size;
    }
    one.lse = contiguous(lse + row_q * HQ, RAPT_F32, 3, 1, HQ, len_q, 0);
    one.lse.strides[1] = 1;
    one.lse.strides[2] = HQ;
    one.causal = 1;
    one.align = RAPT_ALIGN_BOTTOM_RIGHT;
    CHECK(reference_error(&one) < kTolerance);
  }
}

void test_attention(void) {
  test_score_fields();
  test_strides();
  test_types();
  test_ragged();
}
