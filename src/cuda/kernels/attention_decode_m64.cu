// attention_decode of 16-bit types: attention_prefill's kernel over splits of the keys, or for up to 16 rows, most of
// whose tiles would be empty, split_kv. A ragged call has both, each for its sequences.
#include <cuda_runtime.h>

#include "cuda/kernels/prefill_kernel.cuh"

namespace rapt::cuda {
namespace {

template <class T, int kSize>
cudaError_t launch_size(PrefillParams& params, cudaStream_t stream) {
  if (is_modified(params.p)) return launch<Config<T, kSize, false, true, true, 1>>(params, stream);
  return launch_queued<Config<T, kSize, true, false, true, 1>, Config<T, kSize, false, false, true, 1>>(params, stream);
}

}  // namespace

cudaError_t launch_attention_decode_m64(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  if (has_few_rows(p)) return launch_attention_decode(p, workspace, stream);
  PrefillParams params = params_of(p);
  return for_each_part(p, partials_of(p, workspace), [&](const PartialResults& partials) {
    params.partials = partials;
    params.overlap_previous = p.total_q >= 0 && partials.first == 0;  // the other parts use the same workspace
    const cudaError_t status = with_head_size(p, [&](auto size) {
      return p.q_type == DType::f16 ? launch_size<__half, size>(params, stream)
                                    : launch_size<__nv_bfloat16, size>(params, stream);
    });
    if (status != cudaSuccess) return status;
    // Ragged sequences may have few rows, or more; both leave their results for one kernel that combines them.
    if (p.total_q >= 0) return launch_decode_part(p, partials, params.writes_output, true, stream);
    return params.writes_output || params.combines_in_cluster ? status : launch_attention_combine(p, partials, stream);
  });
}

}  // namespace rapt::cuda
