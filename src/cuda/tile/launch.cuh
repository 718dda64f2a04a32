// Launches: kernels one after another in a stream, the next starting while the one before
// ends (programmatic dependent launch, from compute capability 9.0).
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels/multiprocessors.hpp"

namespace rapt::cuda {

// In the kernel before: the next may start on multiprocessors that have nothing left to do.
__device__ inline void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// In the next: what the one before wrote is there.
__device__ inline void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...), and what became of that launch: the last error,
// which is all that the <<<>>> leave, may be of a call before. `early`: while the kernel before ends. `cluster`: blocks
// that run side by side.
template <class... Parameters, class... Arguments>
cudaError_t launch_clusters(dim3 cluster, bool overlap_previous, void (*kernel)(Parameters...), dim3 blocks,
                            unsigned threads, std::size_t shared_bytes, cudaStream_t stream,
                            const Arguments&... arguments) {
  constexpr std::size_t kUnasked = 48 << 10;  // of shared memory
  if (shared_bytes > kUnasked) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (overlap_previous) {
    cudaLaunchAttribute& overlap = attributes[count++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster.x * cluster.y * cluster.z > 1) {
    cudaLaunchAttribute& size = attributes[count++];
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = cluster.x, size.val.clusterDim.y = cluster.y, size.val.clusterDim.z = cluster.z;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = attributes, config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(bool overlap_previous, void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                          std::size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  return launch_clusters(1, overlap_previous, kernel, blocks, threads, shared_bytes, stream, arguments...);
}

}  // namespace rapt::cuda
