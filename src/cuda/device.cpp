#include "cuda/device.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

namespace rapt::cuda {
namespace {

[[noreturn]] void fail(cudaError_t status, const std::string& doing, const char* remark = "") {
  if (status == cudaErrorMemoryAllocation) throw std::bad_alloc();
  throw std::runtime_error("CUDA, " + doing + ": " + cudaGetErrorString(status) + remark);
}

// The driver's codes are the runtime's.
void check_driver(CUresult result, const char* doing) {
  if (result != CUDA_SUCCESS) fail(static_cast<cudaError_t>(result), doing);
}

// The driver's function of that name. It is found when it is used: without a driver the rest of rapt works.
template <class Function>
Function find(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  check_cuda(status, name);
  if (result != cudaDriverEntryPointSuccess || found == nullptr) fail(cudaErrorSymbolNotFound, name);
  return reinterpret_cast<Function>(found);
}

struct Driver {
  decltype(&cuDeviceGet) device_get = find<decltype(&cuDeviceGet)>("cuDeviceGet");
  decltype(&cuDevicePrimaryCtxRetain) retain = find<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
  decltype(&cuDevicePrimaryCtxRelease) release =
      find<decltype(&cuDevicePrimaryCtxRelease)>("cuDevicePrimaryCtxRelease");
  decltype(&cuCtxGetId) id = find<decltype(&cuCtxGetId)>("cuCtxGetId");
  decltype(&cuCtxPushCurrent) push = find<decltype(&cuCtxPushCurrent)>("cuCtxPushCurrent");
  decltype(&cuCtxPopCurrent) pop = find<decltype(&cuCtxPopCurrent)>("cuCtxPopCurrent");
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// Lets the thread do what captures of streams forbid beside them, since it might have been meant to be captured.
class NotCaptured {
 public:
  NotCaptured() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "leaving a capture's mode"); }
  ~NotCaptured() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  NotCaptured(const NotCaptured&) = delete;
  NotCaptured& operator=(const NotCaptured&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

cudaMemPool_t make_pool(int device) {
  constexpr std::uint64_t kKept = std::uint64_t{1} << 30;
  const NotCaptured not_captured;
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location = {cudaMemLocationTypeDevice, device};
  cudaMemPool_t pool = nullptr;
  check_cuda(cudaMemPoolCreate(&pool, &props), "making a pool of workspaces");
  auto kept = kKept;
  if (cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept) != cudaSuccess) cudaGetLastError();
  return pool;
}

// The device's pool of workspaces. Up to kKept bytes stay with it between calls: CUDA's default pool gives all back at
// every synchronisation, and taking it again is slower than many a kernel. cudaDeviceReset() ends a pool together with
// the context that it was made in, so the next context has another.
cudaMemPool_t pool_of(int device) {
  static std::mutex mutex;
  static std::map<unsigned long long, cudaMemPool_t> pools;  // by their contexts
  const PrimaryContext context(device);
  const std::lock_guard lock(mutex);
  const auto found = pools.find(context.id());
  return found != pools.end() ? found->second : pools.emplace(context.id(), make_pool(device)).first->second;
}

}  // namespace

void check_cuda(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  // What stays is the context's: work that failed on the GPU meanwhile, queued by this program or a library.
  const bool stays = cudaPeekAtLastError() == status;
  fail(status, doing, stays ? " (the error of work queued before, found by this call)" : "");
}

PrimaryContext::PrimaryContext(int device) {
  check_driver(driver().device_get(&device_, device), "choosing the tensors' device");
  check_driver(driver().retain(&handle_, device_), "choosing the tensors' device");
}
PrimaryContext::~PrimaryContext() {
  driver().release(device_);
}
unsigned long long PrimaryContext::id() const {
  unsigned long long id = 0;
  check_driver(driver().id(handle_, &id), "asking for a context's number");
  return id;
}

// Not by cudaSetDevice(): a thread that has not used the GPU yet counts as on device 0, and to set that again would
// make a context there, with hundreds of MiB of its memory.
DeviceGuard::DeviceGuard(int device) {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "asking for the current device");
  if (device == current) return;
  pushed_.emplace(device);
  check_driver(driver().push(pushed_->handle()), "choosing the tensors' device");
}
DeviceGuard::~DeviceGuard() {
  CUcontext popped = nullptr;
  if (pushed_) driver().pop(&popped);
}

StreamMemory::StreamMemory(std::size_t bytes, int device, cudaStream_t stream) : stream_(stream) {
  check_cuda(cudaMallocFromPoolAsync(&data_, bytes, pool_of(device), stream), "taking workspace");
}
StreamMemory::~StreamMemory() {
  if (cudaFreeAsync(data_, stream_) != cudaSuccess) cudaGetLastError();  // the launches have told
}

}  // namespace rapt::cuda
