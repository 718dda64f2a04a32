// How many thread blocks run at once, as far as the host can tell.
#pragma once

#include <cuda_runtime_api.h>

namespace rapt::cuda {

// Multiprocessors of the current device; 1 where CUDA fails, as the launch then will.
inline int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace rapt::cuda
