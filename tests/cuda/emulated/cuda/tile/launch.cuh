// In place of src/cuda/tile/launch.cuh: launches run on the CPU, for tests of kernels that need no tensor cores.
//
// Thread blocks run one after another. Each thread has a stack. A warp runs for a random time, its lanes in random
// order between the places where they wait for each other; then another one runs. So a result that depends on the order
// shows.
#pragma once

#include <cuda_runtime_api.h>
#include <ucontext.h>
#include <vector_types.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#undef __align__
#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#undef __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __device__
#define __forceinline__
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)
#define __shared__  // a kernel's memory of dynamic size; there is none of static size

namespace rapt::testing {

class EmulatedGpu {
 public:
  int multiprocessors = 132, max_shared_bytes = 227 << 10;
  unsigned block = 0, blocks = 1, thread = 0;

  void run(unsigned threads, std::function<void()> kernel) {
    kernel_ = std::move(kernel);
    while (threads_.size() < threads) threads_.push_back(std::make_unique<Thread>());
    count_ = threads;
    for (unsigned i = 0; i < threads; ++i) {
      Thread& t = *threads_[i];
      t.state = State::runs;
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
      t.context.uc_link = &scheduler_;
      makecontext(&t.context, &EmulatedGpu::enter, 0);
    }
    unsigned warp = 0;
    for (int left = 0;; --left) {
      if (left <= 0) warp = random_() % (threads / 32), left = static_cast<int>(random_() % 4000);
      if (!pick(warp)) {
        if (all_are(State::done)) return;
        if (!all_are(State::at_block)) throw std::logic_error("threads wait for others that have ended");
        for (unsigned i = 0; i < threads; ++i) threads_[i]->state = State::runs;
        continue;
      }
      swapcontext(&scheduler_, &threads_[thread]->context);
    }
  }
  void wait_for_block() { wait(State::at_block); }
  void wait_for_warp() { wait(State::at_warp); }
  // What all lanes of the warp gave.
  template <class T>
  std::array<T, 32> of_warp(T x) {
    static_assert(sizeof(T) <= sizeof given_[0]);
    std::memcpy(&given_[thread], &x, sizeof x);
    wait_for_warp();
    std::array<T, 32> all;
    for (unsigned lane = 0; lane < 32; ++lane) std::memcpy(&all[lane], &given_[thread / 32 * 32 + lane], sizeof x);
    wait_for_warp();
    return all;
  }
  bool any_of_block(bool x) {
    given_[thread] = x;
    wait_for_block();
    const bool any = std::any_of(given_.begin(), given_.begin() + count_, [](std::uint64_t g) { return g != 0; });
    wait_for_block();
    return any;
  }

 private:
  enum class State { runs, at_warp, at_block, done };
  struct Thread {
    ucontext_t context;
    State state;
    std::array<char, 1 << 16> stack;
  };

  static void enter();
  void wait(State state) {
    Thread& t = *threads_[thread];
    t.state = state;
    swapcontext(&t.context, &scheduler_);
  }
  bool all_are(State state) const {
    return std::all_of(threads_.begin(), threads_.begin() + count_, [&](const auto& t) { return t->state == state; });
  }
  // A thread that can run, of the warp or the next ones. A warp all of whose lanes wait for each other can go on.
  bool pick(unsigned warp) {
    for (unsigned tries = 0; tries < count_ / 32; ++tries) {
      const auto first = threads_.begin() + (warp + tries) % (count_ / 32) * 32;
      if (std::all_of(first, first + 32, [](const auto& t) { return t->state == State::at_warp; }))
        for (unsigned i = 0; i < 32; ++i) first[i]->state = State::runs;
      std::array<unsigned, 32> ready;
      unsigned found = 0;
      for (unsigned i = 0; i < 32; ++i)
        if (first[i]->state == State::runs) ready[found++] = static_cast<unsigned>(first - threads_.begin()) + i;
      if (found == 0) continue;
      thread = ready[random_() % found];
      return true;
    }
    return false;
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  unsigned count_ = 0;
  std::array<std::uint64_t, 1024> given_{};
  ucontext_t scheduler_;
  std::mt19937 random_{7};
  std::function<void()> kernel_;
};
inline EmulatedGpu gpu;
inline void EmulatedGpu::enter() {
  gpu.kernel_();
  gpu.threads_[gpu.thread]->state = State::done;
}

template <unsigned EmulatedGpu::*kField>
struct Index {
  struct {
    operator unsigned() const { return gpu.*kField; }
  } x;
};

}  // namespace rapt::testing

namespace {

inline rapt::testing::Index<&rapt::testing::EmulatedGpu::thread> threadIdx;
inline rapt::testing::Index<&rapt::testing::EmulatedGpu::block> blockIdx;
inline rapt::testing::Index<&rapt::testing::EmulatedGpu::blocks> gridDim;

}  // namespace

inline void __syncthreads() {
  rapt::testing::gpu.wait_for_block();
}
inline void __syncwarp() {
  rapt::testing::gpu.wait_for_warp();
}
inline bool __syncthreads_or(bool x) {
  return rapt::testing::gpu.any_of_block(x);
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return rapt::testing::gpu.of_warp(x)[static_cast<unsigned>(lane)];
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return rapt::testing::gpu.of_warp(x)[(rapt::testing::gpu.thread % 32) ^ static_cast<unsigned>(mask)];
}
template <class T>
T __shfl_up_sync(unsigned, T x, int distance) {
  const unsigned lane = rapt::testing::gpu.thread % 32, by = static_cast<unsigned>(distance);
  return rapt::testing::gpu.of_warp(x)[lane < by ? lane : lane - by];
}
inline bool __any_sync(unsigned, bool x) {
  const auto all = rapt::testing::gpu.of_warp(x);
  return std::any_of(all.begin(), all.end(), [](bool any) { return any; });
}
inline bool __all_sync(unsigned mask, bool x) {
  return !__any_sync(mask, !x);
}
inline unsigned __match_any_sync(unsigned, unsigned x) {
  const auto all = rapt::testing::gpu.of_warp(x);
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane) same |= static_cast<unsigned>(all[lane] == x) << lane;
  return same;
}
template <class T, class U>
T atomicAdd(T* at, U x) {
  const T before = *at;
  *at += x;
  return before;
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
template <class T>
T __ldg(const T* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(T) != 0) throw std::logic_error("a load that is not aligned");
  return *from;
}
using std::max;
using std::min;

namespace rapt::cuda {

inline void launch_dependent_grids() {}
inline void wait_on_dependent_grids() {}
inline int multiprocessors() {
  return testing::gpu.multiprocessors;
}
inline int max_shared_bytes() {
  return testing::gpu.max_shared_bytes;
}
inline std::int64_t at_least_1(std::int64_t size) {
  return std::max<std::int64_t>(size, 1);
}
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(bool, void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                          std::size_t shared_bytes, cudaStream_t, const Arguments&... arguments) {
  if (shared_bytes > static_cast<std::size_t>(max_shared_bytes())) return cudaErrorInvalidValue;
  testing::gpu.blocks = blocks;
  for (unsigned block = 0; block < blocks; ++block) {
    testing::gpu.block = block;
    testing::gpu.run(threads, [&] { kernel(Parameters(arguments)...); });
  }
  return cudaSuccess;
}

}  // namespace rapt::cuda
