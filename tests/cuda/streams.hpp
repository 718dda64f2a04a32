// CUDA's runtime as tests use it: errors, streams, and contexts on them.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "rapt/context.hpp"
#include "support/catch.hpp"

namespace rapt::testing {

inline void check(cudaError_t status) {
  INFO(cudaGetErrorString(status));
  REQUIRE(status == cudaSuccess);
}

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(handle); }
};

inline Context on(const Stream& stream, const std::string& entry) {
  ContextOptions options;
  options.stream = stream.handle;
  options.kernel = entry;
  return Context(std::move(options));
}

}  // namespace rapt::testing
