// attention_prefill's kernels for scores with modifiers, which attention_prefill.cu launches.
#include <cuda_runtime.h>

#include <array>

#include "cuda/kernels/prefill_kernel.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

constexpr auto kernels_of(DType element) {
  std::array<PrefillConfig, 8> kernels{};
  std::size_t count = 0;
  const auto add = [&](PrefillConfig config) {
    config.element = element, config.modified = true, kernels[count++] = config;
  };
  for (const int size : {64, 128, 192, 256}) {
    add({.head_dim = size, .columns = size, .block_k = 64, .tma = true});
    add({.head_dim = size, .columns = size, .block_k = 64, .quantized = true});
  }
  return kernels;
}
constexpr auto kBf16Kernels = kernels_of(DType::bf16), kF16Kernels = kernels_of(DType::f16);

}  // namespace

cudaError_t launch_prefill_modified(PrefillParams& params, const PrefillConfig& config, cudaStream_t stream) {
  if (config.element == DType::f16)
    return launch_one_of<kF16Kernels>(config, [&](auto i) { return launch_prefill<kF16Kernels[i]>(params, stream); });
  return launch_one_of<kBf16Kernels>(config, [&](auto i) { return launch_prefill<kBf16Kernels[i]>(params, stream); });
}

}  // namespace rapt::cuda
