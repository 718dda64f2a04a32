// The CUDA backend: kernels on the memory of one GPU, queued on the context's stream.
#include <cuda_runtime_api.h>

#include "cuda/entry.hpp"
#include "operations/all.hpp"

namespace rapt {
namespace cuda {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) cudaGetLastError();
  return value;
}

GpuSupport probe() {
  GpuSupport support;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) cudaGetLastError();  // or the program finds this error the next time it asks
  if (status == cudaErrorInsufficientDriver)
    support.unusable = "no CUDA device: no NVIDIA driver, or one older than CUDA " +
                       std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) +
                       " needs";
  else if (status != cudaSuccess) support.unusable = std::string("no CUDA device: ") + cudaGetErrorString(status);
  else if (count == 0) support.unusable = "no CUDA device";
  if (!support.unusable.empty()) return support;
  bool any = false, all_sm90 = true;
  for (int device = 0; device < count; ++device) {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
    any |= 10 * major + minor >= RAPT_CUDA_MIN_ARCHITECTURE;
    all_sm90 &= major == 9 && minor == 0;
  }
  if (!any) support.unusable = "only GPUs older than RAPT_CUDA_ARCHITECTURES";
  if (!all_sm90) support.not_sm90a = "needs GPUs of compute capability 9.0";
  return support;
}

}  // namespace
}  // namespace cuda

// Made at first use, so that a program that stays on the CPU starts no driver.
const Backend& cuda_backend() {
  static const Backend backend = [] {
    Backend made{"cuda", {}};
    const cuda::GpuSupport support = cuda::probe();
#define RAPT_OPERATION(name, Name, NAME) \
  if constexpr (runs_on_gpus<Name##Args>) cuda::add_##name(support, made.entries);
#include "rapt/operations.def"
    return made;
  }();
  return backend;
}

}  // namespace rapt
