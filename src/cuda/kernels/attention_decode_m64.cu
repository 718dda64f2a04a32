// attention_decode_m64: decoding of up to 64 rows for each kv head in 16-bit types, on Hopper's tensor cores, where
// more rows than attention_decode takes share the keys.
//
// The kernel is attention_prefill's, with one warpgroup of 64 rows, over splits of the keys. It reads K and V once.
// Called by the entries attention_decode.bf16 and .f16 and, for the short sequences of ragged calls, by those of
// attention_prefill. The host does not know the lengths of ragged sequences: so attention_decode is launched beside it
// for sequences with up to kFewRows rows, and each kernel leaves out the other's sequences.
#include <cuda_runtime.h>

#include <array>

#include "cuda/kernels/prefill_kernel.cuh"
#include "cuda/kernels/split_launches.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

constexpr auto kKernels = [] {
  std::array<PrefillConfig, 16> kernels{};
  std::size_t count = 0;
  for (const DType element : {DType::bf16, DType::f16})
    for (const int size : {64, 128, 192, 256})
      for (const bool modified : {false, true})
        kernels[count++] = {.element = element,
                            .head_dim = size,
                            .columns = size,
                            .block_k = 64,
                            .math_warpgroups = 1,
                            .tma = !modified,
                            .modified = modified,
                            .split_kv = true};
  return kernels;
}();

}  // namespace

cudaError_t launch_attention_decode_m64(const AttentionParams& p, const PrefillConfig& config,
                                        const DecodeConfig& few_rows, std::byte* workspace, cudaStream_t stream) {
  PrefillParams params = params_of(p);
  return for_each_part(p, partials_of(p, workspace), [&](const PartialResults& partials) {
    params.partials = partials;
    params.overlap_previous = p.total_q >= 0 && partials.first == 0;  // the other parts use the same workspace
    const cudaError_t status =
        launch_one_of<kKernels>(config, [&](auto i) { return launch_prefill<kKernels[i]>(params, stream); });
    if (status != cudaSuccess) return status;
    if (p.total_q >= 0) return launch_decode_part(p, few_rows, partials, params.writes_output, true, stream);
    return params.writes_output || params.combines_in_cluster ? status : launch_attention_combine(p, partials, stream);
  });
}

}  // namespace rapt::cuda
