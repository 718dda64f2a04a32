#include <stdexcept>
#include <string>

#include "cuda/tile/score.cuh"
#include "exp2_sweep.hpp"

namespace rapt::testing {
namespace {

constexpr unsigned kFirst = 0x80000000u, kLast = 0xc2fc0000u;  // -0 and -126

__global__ void sweep(unsigned long long* largest) {
  double worst = 0;
  for (unsigned long long bits = kFirst + blockIdx.x * blockDim.x + threadIdx.x; bits <= kLast;
       bits += gridDim.x * blockDim.x) {
    const float x = __uint_as_float(static_cast<unsigned>(bits));
    const double exact = exp2(static_cast<double>(x));
    worst = fmax(worst, fabs(static_cast<double>(cuda::exp2_approx(x)) - exact) / exact);
  }
  atomicMax(largest, static_cast<unsigned long long>(__double_as_longlong(worst)));  // ordered like the numbers
}

}  // namespace

double largest_error_of_exp2() {
  double* largest = nullptr;
  double result = 0;
  cudaMalloc(&largest, sizeof result);
  cudaMemset(largest, 0, sizeof result);
  sweep<<<2048, 256>>>(reinterpret_cast<unsigned long long*>(largest));
  cudaMemcpy(&result, largest, sizeof result, cudaMemcpyDeviceToHost);
  cudaFree(largest);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
  return result;
}

}  // namespace rapt::testing
