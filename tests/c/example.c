/* The C example of docs/api.md, run. */
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

void test_examples(void) {
  enum { b = 2, h = 3, s = 9, d = 4, COUNT = b * h * s * d };
  float* q = malloc(4 * COUNT * sizeof(float));
  float *k = q + COUNT, *v = k + COUNT, *out = v + COUNT;
  fill(q, 4 * COUNT, 11);

  const int64_t shape[] = {b, h, s, d};
  rapt_attention_args args = rapt_attention_args_init();
  rapt_tensor_contiguous(&args.q, q, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&args.k, k, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&args.v, v, RAPT_F32, 4, shape);
  rapt_tensor_contiguous(&args.out, out, RAPT_F32, 4, shape);
  args.causal = 1;
  if (rapt_attention(&args, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());

  CHECK(reference_error(&args) < 2e-6);
  free(q);
}
