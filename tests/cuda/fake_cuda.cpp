#include "fake_cuda.hpp"

#include <cuda.h>

#include <cstdint>
#include <string>

#include "cuda/entry.hpp"
#include "cuda/kernels/gathered_lists.hpp"
#include "cuda/kernels/kernels.hpp"
#include "dispatch/cuda_library.hpp"

namespace rapt::testing {

FakeCuda fake;

unsigned long long FakeCuda::context(int device) {
  if (contexts[device] == 0) contexts[device] = ++numbers;
  return contexts[device];
}

namespace {

int current_device() {
  return fake.current < 0 ? 0 : fake.current;
}

// As the runtime: what goes wrong is also the last error.
cudaError_t result(cudaError_t status = cudaSuccess) {
  if (fake.broken != cudaSuccess) status = fake.broken;
  if (status != cudaSuccess) fake.last = status;
  return status;
}

// Handles are device + 1, so that a context made again has its old one.
CUcontext handle_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
}
int device_of(CUcontext context) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
}

int before_push = -1;

CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < FakeCuda::kDevices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult retain(CUcontext* context, CUdevice device) {
  fake.context(device);
  *context = handle_of(device);
  return CUDA_SUCCESS;
}
CUresult release(CUdevice) {
  return CUDA_SUCCESS;
}
CUresult id(CUcontext context, unsigned long long* id) {
  *id = fake.contexts[device_of(context)];
  return *id == 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
  before_push = fake.current;
  fake.current = device_of(context);
  return CUDA_SUCCESS;
}
CUresult pop(CUcontext* context) {
  *context = handle_of(fake.current);
  fake.current = before_push;
  return CUDA_SUCCESS;
}

void* driver_function(const char* name) {
  const std::string wanted = name;
  if (wanted == "cuDeviceGet") return reinterpret_cast<void*>(device_get);
  if (wanted == "cuDevicePrimaryCtxRetain") return reinterpret_cast<void*>(retain);
  if (wanted == "cuDevicePrimaryCtxRelease") return reinterpret_cast<void*>(release);
  if (wanted == "cuCtxGetId") return reinterpret_cast<void*>(id);
  if (wanted == "cuCtxPushCurrent") return reinterpret_cast<void*>(push);
  if (wanted == "cuCtxPopCurrent") return reinterpret_cast<void*>(pop);
  return nullptr;
}

}  // namespace

cudaError_t launched() {
  ++fake.launches;
  fake.launched_on = current_device();
  fake.current = fake.launched_on;
  fake.context(fake.current);
  return result(fake.launch);
}

}  // namespace rapt::testing

using namespace rapt::testing;

cudaError_t cudaGetLastError() {
  const cudaError_t last = fake.last;
  fake.last = fake.broken;
  return last;
}
cudaError_t cudaPeekAtLastError() {
  return fake.last;
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error";
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = FakeCuda::kDevices;
  return result();
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrComputeCapabilityMajor ? 9 : which == cudaDevAttrMultiProcessorCount ? 132 : 0;
  return result();
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device >= FakeCuda::kDevices) return result(cudaErrorInvalidDevice);
  fake.current = device;
  fake.context(device);
  return result();
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* how) {
#else
cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long,
                                    cudaDriverEntryPointQueryResult* how) {
#endif
  *found = driver_function(name);
  *how = *found != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return result();
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return result();
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = nullptr;
  return result();
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return result();
}
cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t, cudaMemPool_t, cudaStream_t) {
  *memory = &fake;
  return result();
}
cudaError_t cudaFreeAsync(void*, cudaStream_t) {
  return result();
}

// In place of the one that looks for a library: the backend is part of the program.
const rapt::CudaBackend& rapt::cuda_backend_of_process() {
  static const CudaBackend linked{&cuda_backend(), "", "", ""};
  return linked;
}

namespace rapt::cuda {

std::int64_t simt_tiles(const AttentionParams&) {
  return 1;
}
cudaError_t launch_attention_simt(const AttentionParams&, cudaStream_t, const std::uint64_t*) {
  return launched();
}
std::int64_t decode_items(const AttentionParams&) {
  return 1;
}
std::size_t decode_workspace(const AttentionParams&) {
  return 64;
}
bool decode_writes_output_directly(const AttentionParams&) {
  return false;
}
cudaError_t launch_attention_decode_m64(const AttentionParams&, const PrefillConfig&, const DecodeConfig&, std::byte*,
                                        cudaStream_t) {
  return launched();
}
cudaError_t launch_attention_decode_f32(const AttentionParams&, std::byte*, cudaStream_t) {
  return launched();
}
bool quantized_groups_fit(const AttentionParams&) {
  return true;
}
cudaError_t launch_attention_decode(const AttentionParams&, const DecodeConfig&, std::byte*, cudaStream_t) {
  return launched();
}
std::int64_t latent_items(const AttentionParams&) {
  return 1;
}
std::size_t latent_workspace(const AttentionParams&) {
  return 64;
}
cudaError_t launch_attention_latent(const AttentionParams&, std::byte*, cudaStream_t) {
  return launched();
}
bool prefill_can_count(const AttentionParams&) {
  return true;
}
cudaError_t launch_attention_prefill(const AttentionParams&, const PrefillConfig&, cudaStream_t) {
  return launched();
}
std::size_t prefill_f8_workspace(const AttentionParams&) {
  return 64;
}
std::optional<cudaError_t> launch_attention_prefill_f8(const AttentionParams&, std::byte*, cudaStream_t) {
  return launched();
}
bool prefill_f32_can_count(const AttentionParams&) {
  return true;
}
std::size_t prefill_f32_workspace(const AttentionParams&) {
  return 64;
}
cudaError_t launch_attention_prefill_f32(const AttentionParams&, std::byte*, cudaStream_t) {
  return launched();
}
std::int64_t naive_rows(const AttentionParams&) {
  return 1;
}
std::size_t naive_workspace(const AttentionParams&) {
  return 8;
}
cudaError_t launch_gathered_lists(const AttentionParams& p, const GatheredLists& to, cudaStream_t) {
  for (std::int64_t token = 0; token < p.b; ++token) {
    const std::int64_t entry = token / p.tokens, in_entry = token % p.tokens;
    const std::int64_t from = entry * p.pages_stride_b + in_entry * p.pages_stride_token;
    const std::int64_t count =
        p.counts ? p.counts.element(entry * p.counts_stride_b + in_entry * p.counts.stride) : p.sk;
    std::int32_t& kept = to.lengths[token];
    kept = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t row = p.pages.element(from + j * p.pages.stride) + entry * to.rows_apart;
      if (row < entry * to.rows_apart) continue;
      if (p.pages.is_int64) static_cast<std::int64_t*>(to.rows)[token * p.sk + kept++] = row;
      else static_cast<std::int32_t*>(to.rows)[token * p.sk + kept++] = static_cast<std::int32_t>(row);
    }
  }
  return launched();
}
cudaError_t launch_scatter_lse(const AttentionParams& p, const float* lse, cudaStream_t) {
  const std::int64_t heads = p.hk * p.group;
  for (std::int64_t i = 0; i < p.b * heads; ++i) {
    const std::int64_t token = i / heads, entry = token / p.tokens, in_entry = token % p.tokens;
    p.lse[entry * p.lse_stride.b + i % heads * p.lse_stride.h + in_entry * p.lse_stride.s] = lse[i];
  }
  return launched();
}
cudaError_t launch_attention_naive(const AttentionParams&, float* workspace, cudaStream_t) {
  fake.workspace = workspace;
  return launched();
}

}  // namespace rapt::cuda
