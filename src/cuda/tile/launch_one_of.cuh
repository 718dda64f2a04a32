// From a configuration that was chosen at run time to the kernel that is compiled for it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace rapt::cuda {

// Calls `launch` with the one of kConfigs that equals `config`, as a constant.
template <const auto& kConfigs, class Config, class Launch>
cudaError_t launch_one_of(const Config& config, Launch launch) {
  cudaError_t status = cudaErrorInvalidDeviceFunction;
  const auto try_each = [&]<std::size_t... i>(std::index_sequence<i...>) {
    (void)((config == kConfigs[i] && (status = launch(std::integral_constant<std::size_t, i>()), true)) || ...);
  };
  try_each(std::make_index_sequence<kConfigs.size()>());
  return status;
}

}  // namespace rapt::cuda
