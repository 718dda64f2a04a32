/* consumer.cpp in C: two keys with scores 0 and ln 3 weigh 1/4 and 3/4, so values 0 and 4 give 3. */
#include <rapt/rapt.h>
#include <stdio.h>

int main(void) {
  float q[] = {1.f}, k[] = {0.f, 1.0986123f}, v[] = {0.f, 4.f}, out[] = {-1.f};
  const int64_t one[] = {1, 1, 1, 1}, two[] = {1, 1, 2, 1};
  rapt_attention_args args = rapt_attention_args_init();
  rapt_tensor_contiguous(&args.q, q, RAPT_F32, 4, one);
  rapt_tensor_contiguous(&args.k, k, RAPT_F32, 4, two);
  rapt_tensor_contiguous(&args.v, v, RAPT_F32, 4, two);
  rapt_tensor_contiguous(&args.out, out, RAPT_F32, 4, one);
  if (rapt_attention(&args, NULL) != RAPT_OK) fprintf(stderr, "%s\n", rapt_last_error());
  printf("rapt %s: %.7g, wanted 3\n", rapt_version(), out[0]);
  return out[0] > 2.9999f && out[0] < 3.0001f ? 0 : 1;
}
