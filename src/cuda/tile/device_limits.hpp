// What the host asks of the current device; least values where CUDA fails, as the launch then will.
#pragma once

#include <cuda_runtime_api.h>

namespace rapt::cuda {

inline int device_attribute(cudaDeviceAttr attribute, int if_it_fails) {
  int device = 0, value = if_it_fails;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

inline int multiprocessors() {
  return device_attribute(cudaDevAttrMultiProcessorCount, 1);
}

// Shared memory that a thread block may have, static and dynamic.
inline int max_shared_bytes() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 48 << 10);
}

}  // namespace rapt::cuda
