/* A small attention problem with data, and the answer computed the slow way. */
#ifndef RAPT_TESTS_C_FIXTURE_H
#define RAPT_TESTS_C_FIXTURE_H

#include "rapt/rapt.h"

enum { B = 2, HQ = 4, HK = 2, SQ = 5, SK = 7, D = 8, DV = 3 };

typedef struct fixture {
  float q[B * HQ * SQ * D];
  float k[B * HK * SK * D];
  float v[B * HK * SK * DV];
  float out[B * HQ * SQ * DV];
  float lse[B * HQ * SQ];
  rapt_attention_args args; /* q, k, v, out and lse of the arrays above, contiguous */
} fixture;

/* Fills the inputs with fixed numbers in [-1, 1) and the outputs with NaN. */
void fixture_init(fixture* f);

/* `count` fixed numbers in [-1, 1) that depend on `seed`. */
void fill(float* data, size_t count, unsigned seed);

/* The larger of `worst` and |difference|; infinite where that is NaN. */
double larger(double worst, double difference);

void fill_with_nan(float* data, size_t count);

/* Largest difference between `got` and the central differences of loss(data) by the `count` numbers `inputs`, which it
 * reads; infinite where one is NaN. */
double gradient_error(double (*loss)(const void* data), const void* data, float* inputs, const float* got, int count);

rapt_tensor contiguous(void* data, int32_t dtype, int32_t ndim, int64_t s0, int64_t s1, int64_t s2, int64_t s3);

/* `value` as a 16-bit number, rounded to nearest even, and back. `dtype` is RAPT_BF16 or RAPT_F16; for the latter
 * |value| lies between 2^-14 and 65504, or is 0. */
uint16_t to_half(float value, int32_t dtype);
double from_half(uint16_t bits, int32_t dtype);

/* Largest difference between the outputs (out and lse) and the definition in docs/contract.md evaluated in double on
 * args' strided tensors of any type; infinite where one is NaN. Reads every field of `args` but those of ragged
 * batches and caches. */
double reference_error(const rapt_attention_args* args);

/* sum(dout * out) + sum(dlse * lse) by the same definition, which reads neither out nor lse. `dout` is [b, hq, sq, dv]
 * and `dlse` [b, hq, sq], or NULL for zeros. Rows without a key count for nothing. */
double reference_loss(const rapt_attention_args* args, const float* dout, const float* dlse);

#endif
