// CUDA's runtime as tests use it: errors, streams, contexts on them, and graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
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

/// What `call` queues on the stream, captured.
class Graph {
 public:
  template <class Call>
  Graph(const Stream& stream, const Call& call, cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal)
      : stream_(stream) {
    check(cudaStreamBeginCapture(stream.handle, mode));
    call();
    check(cudaStreamEndCapture(stream.handle, &graph_));
    check(cudaGraphInstantiate(&program_, graph_, 0));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(program_), cudaGraphDestroy(graph_); }

  void replay() const { check(cudaGraphLaunch(program_, stream_.handle)); }
  std::size_t nodes() const {
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &count));
    return count;
  }

 private:
  const Stream& stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t program_ = nullptr;
};

}  // namespace rapt::testing
