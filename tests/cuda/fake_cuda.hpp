// A CUDA runtime and kernels that only keep books, in place of the real ones: two GPUs, for tests that need none.
#pragma once

#include <cuda_runtime_api.h>

namespace rapt::testing {

struct FakeCuda {
  static constexpr int kDevices = 2;

  static inline unsigned long long numbers = 0;  ///< given out to contexts; none twice in a process

  unsigned long long contexts[kDevices] = {};  ///< each device's; 0: none
  int current = -1;  ///< the device whose context is the thread's; -1: none, which counts as device 0

  cudaError_t last = cudaSuccess;    ///< what cudaGetLastError() gives back
  cudaError_t broken = cudaSuccess;  ///< what every call gives back from now on
  cudaError_t launch = cudaSuccess;  ///< what launches give back
  int launches = 0, launched_on = -1;
  void* workspace = nullptr;  ///< that a kernel was given; the runtime gives out the address of the fake itself

  unsigned long long context(int device);  ///< made if there is none
};

/// The one there is; tests assign a new one.
extern FakeCuda fake;

/// What the launch of a kernel gives. The kernels of attention are beside the runtime; those of another operation are
/// in tests/operations/<name>/fake_cuda.cpp.
cudaError_t launched();

}  // namespace rapt::testing
