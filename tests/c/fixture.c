#include "fixture.h"

#include <math.h>

void fill(float* data, size_t count, unsigned seed) {
  uint32_t state = 2463534242u + seed * 2654435761u;
  for (size_t i = 0; i < count; ++i) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    data[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
}

double larger(double worst, double difference) {
  return isnan(difference) ? INFINITY : fmax(worst, fabs(difference));
}

void fill_with_nan(float* data, size_t count) {
  for (size_t i = 0; i < count; ++i) data[i] = NAN;
}

double gradient_error(double (*loss)(const void* data), const void* data, float* inputs, const float* got, int count) {
  const float step = 0x1p-10f; /* inputs are multiples of 2^-23, so that adding it is exact */
  double error = 0;
  for (int i = 0; i < count; ++i) {
    const float here = inputs[i];
    inputs[i] = here + step;
    const double above = loss(data);
    inputs[i] = here - step;
    const double below = loss(data);
    inputs[i] = here;
    error = larger(error, got[i] - (above - below) / (2 * (double)step));
  }
  return error;
}

rapt_tensor contiguous(void* data, int32_t dtype, int32_t ndim, int64_t s0, int64_t s1, int64_t s2, int64_t s3) {
  const int64_t shape[4] = {s0, s1, s2, s3};
  rapt_tensor tensor;
  rapt_tensor_contiguous(&tensor, data, dtype, ndim, shape);
  return tensor;
}

void fixture_init(fixture* f) {
  fill(f->q, B * HQ * SQ * D, 1);
  fill(f->k, B * HK * SK * D, 2);
  fill(f->v, B * HK * SK * DV, 3);
  fill_with_nan(f->out, B * HQ * SQ * DV), fill_with_nan(f->lse, B * HQ * SQ);
  f->args = rapt_attention_args_init();
  f->args.q = contiguous(f->q, RAPT_F32, 4, B, HQ, SQ, D);
  f->args.k = contiguous(f->k, RAPT_F32, 4, B, HK, SK, D);
  f->args.v = contiguous(f->v, RAPT_F32, 4, B, HK, SK, DV);
  f->args.out = contiguous(f->out, RAPT_F32, 4, B, HQ, SQ, DV);
  f->args.lse = contiguous(f->lse, RAPT_F32, 3, B, HQ, SQ, 0);
}

/* Element offset of index [i0, i1, i2, i3] in a tensor whose leading dimensions may be missing or of size 1. */
static int64_t offset_of(const rapt_tensor* t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  const int64_t index[4] = {i0, i1, i2, i3};
  int64_t offset = 0;
  for (int n = 0; n < t->ndim; ++n) {
    if (t->shape[n] != 1) offset += index[4 - t->ndim + n] * t->strides[n];
  }
  return offset;
}

uint16_t to_half(float value, int32_t dtype) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const int drop = dtype == RAPT_BF16 ? 16 : 13;
  const uint32_t odd = bits >> drop & 1, half = (UINT32_C(1) << (drop - 1)) - 1 + odd;
  const uint32_t sign = bits >> 31 << 15, magnitude = ((bits & 0x7fffffff) + half) >> drop;
  if (dtype == RAPT_BF16) return (uint16_t)(sign | magnitude);
  return (uint16_t)(value == 0 ? sign : sign | (magnitude - (UINT32_C(112) << 10)));
}

double from_half(uint16_t bits, int32_t dtype) {
  const int digits = dtype == RAPT_BF16 ? 7 : 10, bias = dtype == RAPT_BF16 ? 127 : 15;
  const int exponent = (bits & 0x7fff) >> digits, fraction = bits & ((1 << digits) - 1);
  if (exponent == (0x7fff >> digits)) return fraction ? NAN : bits >> 15 ? -INFINITY : INFINITY;
  const double value =
      exponent ? ldexp(fraction + (1 << digits), exponent - bias - digits) : ldexp(fraction, 1 - bias - digits);
  return bits >> 15 ? -value : value;
}

static double at(const rapt_tensor* t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  const int64_t offset = offset_of(t, i0, i1, i2, i3);
  if (t->dtype == RAPT_F32) return ((const float*)t->data)[offset];
  return from_half(((const uint16_t*)t->data)[offset], t->dtype);
}

/* The final score of query row i and key row j, or -inf where j is not attended. */
static double score_of(const rapt_attention_args* a, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t sq = a->q.shape[2], d = a->q.shape[3], kv_head = h / (a->q.shape[1] / a->k.shape[1]);
  int64_t len_k = a->k.shape[2];
  if (a->kv_seqlens.ndim) len_k = ((const int32_t*)a->kv_seqlens.data)[b * a->kv_seqlens.strides[0]];
  if (j >= len_k) return -INFINITY;

  int64_t offset = 0;
  if (a->align == RAPT_ALIGN_BOTTOM_RIGHT) offset = len_k - sq;
  if (a->align == RAPT_ALIGN_OFFSET) offset = a->align_offset;
  const int64_t position = i + offset;
  if (a->causal && j > position) return -INFINITY;
  if (a->has_window && a->window_left >= 0 && j < position - a->window_left) return -INFINITY;
  if (a->has_window && a->window_right >= 0 && j > position + a->window_right) return -INFINITY;
  if (a->mask.ndim && !((const uint8_t*)a->mask.data)[offset_of(&a->mask, b, h, i, j)]) return -INFINITY;

  double x = 0;
  for (int64_t c = 0; c < d; ++c) x += at(&a->q, b, h, i, c) * at(&a->k, b, kv_head, j, c);
  x *= a->has_scale ? (double)a->scale : 1 / sqrt((double)d);
  if (a->softcap != 0) x = a->softcap * tanh(x / a->softcap);
  if (a->bias.ndim) x += at(&a->bias, b, h, i, j);
  if (a->alibi.ndim) x -= at(&a->alibi, 0, 0, b, h) * fabs((double)(position - j));
  return x;
}

/* As rapt_dropout_mask() has it, which tests in C++ hold to its definition. */
static int dropped(const rapt_attention_args* a, int64_t b, int64_t h, int64_t i, int64_t j) {
  uint8_t kept[B * HQ * SQ * SK] = {0};
  if (a->dropout == 0) return 0;
  const rapt_tensor mask = contiguous(kept, RAPT_BOOL, 4, B, HQ, SQ, SK);
  const rapt_status status = rapt_dropout_mask(a->dropout, a->dropout_seed, a->dropout_offset, &mask);
  return status != RAPT_OK || !kept[((b * HQ + h) * SQ + i) * SK + j];
}

static double difference(double got, double expected) {
  if (got == expected) return 0;
  return isnan(got) || isnan(expected) ? INFINITY : fabs(got - expected);
}

double reference_error(const rapt_attention_args* a) {
  const int64_t sk = a->k.shape[2], dv = a->v.shape[3];
  double error = 0;
  for (int64_t b = 0; b < a->q.shape[0]; ++b) {
    for (int64_t h = 0; h < a->q.shape[1]; ++h) {
      for (int64_t i = 0; i < a->q.shape[2]; ++i) {
        double sum = a->sinks.ndim ? exp(at(&a->sinks, 0, 0, 0, h)) : 0;
        for (int64_t j = 0; j < sk; ++j) sum += exp(score_of(a, b, h, i, j));
        if (a->lse.ndim) error = fmax(error, difference(at(&a->lse, 0, b, h, i), log(sum)));
        for (int64_t c = 0; c < dv; ++c) {
          double expected = 0;
          for (int64_t j = 0; j < sk && sum > 0; ++j) {
            if (dropped(a, b, h, i, j)) continue;
            const double weight = exp(score_of(a, b, h, i, j)) / sum / (1 - (double)a->dropout);
            expected += weight * at(&a->v, b, h / (a->q.shape[1] / a->v.shape[1]), j, c);
          }
          error = fmax(error, difference(at(&a->out, b, h, i, c), expected));
        }
      }
    }
  }
  return error;
}

double reference_loss(const rapt_attention_args* a, const float* dout, const float* dlse) {
  const int64_t heads = a->q.shape[1], rows = a->q.shape[2], dv = a->v.shape[3];
  double loss = 0;
  for (int64_t row = 0; row < a->q.shape[0] * heads * rows; ++row) {
    const int64_t b = row / (heads * rows), h = row / rows % heads, i = row % rows;
    double sum = a->sinks.ndim ? exp(at(&a->sinks, 0, 0, 0, h)) : 0, weighted = 0;
    for (int64_t j = 0; j < a->k.shape[2]; ++j) {
      const double weight = exp(score_of(a, b, h, i, j));
      sum += weight;
      if (dropped(a, b, h, i, j)) continue;
      for (int64_t c = 0; c < dv; ++c)
        weighted += weight * dout[row * dv + c] * at(&a->v, b, h / (heads / a->v.shape[1]), j, c);
    }
    if (sum > 0) loss += weighted / sum / (1 - (double)a->dropout) + (dlse ? dlse[row] * log(sum) : 0);
  }
  return loss;
}
