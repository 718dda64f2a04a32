// CUDA's runtime and driver as the backend uses them: errors, the current device, workspace in stream order.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>

namespace rapt::cuda {

// Throws what a call of the runtime returned (std::bad_alloc, or std::runtime_error) unless it succeeded, and takes it
// back from cudaGetLastError(), which others' calls may have to themselves.
void check_cuda(cudaError_t status, const char* doing);

// A device's primary context, which is the runtime's: made where there is none.
class PrimaryContext {
 public:
  explicit PrimaryContext(int device);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  CUcontext handle() const { return handle_; }
  unsigned long long id() const;  // never given twice, as handles are

 private:
  CUdevice device_ = 0;
  CUcontext handle_ = nullptr;
};

// The calling thread's current device is `device` meanwhile.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  std::optional<PrimaryContext> pushed_;
};

// Memory in stream order: taken and given back without waiting for anything.
class StreamMemory {
 public:
  StreamMemory(std::size_t bytes, int device, cudaStream_t stream);
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_;
};

}  // namespace rapt::cuda
