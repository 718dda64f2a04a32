// Kernel launches, with clusters and programmatic dependent launch (from compute capability 9.0): a kernel may start
// while the one before it in the stream ends.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/tile/device_limits.hpp"

namespace rapt::cuda {

// Called in a kernel: the next one may start on multiprocessors that have nothing left to do.
__device__ inline void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Called in the next kernel: waits until the one before has ended, and its writes are visible.
__device__ inline void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets `kernel` have `bytes` of dynamic shared memory. If it may not yet, it gets the most that the device has, because
// another thread may be about to launch the same kernel with more than `bytes`.
inline cudaError_t allow_shared_memory(const void* kernel, std::size_t bytes) {
  constexpr std::size_t kWithoutAsking = 48 << 10;
  if (bytes <= kWithoutAsking) return cudaSuccess;
  cudaFuncAttributes attributes{};
  if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel); status != cudaSuccess) return status;
  if (static_cast<std::size_t>(attributes.maxDynamicSharedSizeBytes) >= bytes) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              max_shared_bytes() - static_cast<int>(attributes.sharedSizeBytes));
}

// kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...), and the status of this launch; after <<<>>>
// cudaGetLastError() might return that of an earlier call. `overlap_previous`: starts while the kernel before ends.
// `cluster`: thread blocks of a cluster.
template <class... Parameters, class... Arguments>
cudaError_t launch_clusters(dim3 cluster, bool overlap_previous, void (*kernel)(Parameters...), dim3 blocks,
                            unsigned threads, std::size_t shared_bytes, cudaStream_t stream,
                            const Arguments&... arguments) {
  const cudaError_t status = allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  if (status != cudaSuccess) return status;
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

// A divisor: sizes may be 0, as calls without rows are planned, too.
inline std::int64_t at_least_1(std::int64_t size) {
  return std::max<std::int64_t>(size, 1);
}

}  // namespace rapt::cuda
