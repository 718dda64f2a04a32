// Executors, allocators and environment variables for tests.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "rapt/context.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

/// True where ThreadSanitizer's run-time library is in the process.
inline bool thread_sanitized() {
  return dlsym(RTLD_DEFAULT, "__tsan_init") != nullptr;
}

/// A user's executor: one thread per worker, started in reverse order.
class ThreadExecutor : public Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {}
  std::string_view name() const noexcept override { return "threads"; }
  int concurrency() const noexcept override { return threads_; }
  void run(int workers, void (*work)(void*, int), void* argument) override {
    ++runs;
    if (workers > max_workers) max_workers = workers;
    std::vector<std::thread> threads;
    for (int i = workers - 1; i >= 0; --i) {
      threads.emplace_back([this, work, argument, i] {
        if (before) before();
        work(argument, i);
        if (after) after();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::atomic<int> runs{0};
  std::atomic<int> max_workers{0};
  std::function<void()> before, after;  ///< called around every worker, on its thread

 private:
  int threads_;
};

/// Those that run on OpenMP, of this build and process.
inline std::vector<std::shared_ptr<Executor>> openmp_executors() {
  std::vector<std::shared_ptr<Executor>> executors;
  if (thread_sanitized()) return executors;
  try {
    executors.push_back(openmp_executor());
  } catch (const Error&) {
    // Built without OpenMP.
  }
  if (const auto loaded = loaded_openmp_executor()) executors.push_back(loaded);
  return executors;
}

/// All executors of this build, and a user's own. Under ThreadSanitizer only those whose waiting it can see: libtbb and
/// libgomp come from packages without its instrumentation.
inline std::vector<std::shared_ptr<Executor>> all_executors() {
  std::vector<std::shared_ptr<Executor>> executors{serial_executor(), std::make_shared<ThreadExecutor>(4)};
  if (thread_sanitized()) return executors;
  executors.push_back(tbb_executor());
  for (const auto& executor : openmp_executors()) executors.push_back(executor);
  return executors;
}

/// usable_entries(problem), or the best of them under ThreadSanitizer: it slows kernels down a hundredfold, and what
/// threads share does not depend on the kernel.
inline std::vector<std::string> threaded_entries(const Problem& problem) {
  std::vector<std::string> names = usable_entries(problem);
  if (thread_sanitized()) names.resize(1);
  return names;
}

/// Counts what passes through it. Must outlive the contexts that use it.
struct CountingAllocator {
  Allocator get() {
    return {[](void* user, std::size_t bytes, std::size_t alignment) -> void* {
              auto& self = *static_cast<CountingAllocator*>(user);
              if (self.failing) return nullptr;
              ++self.allocations;
              self.live_bytes += bytes;
              self.peak_bytes = std::max<std::size_t>(self.peak_bytes, self.live_bytes);
              return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
            },
            [](void* user, void* data, std::size_t bytes, std::size_t) noexcept {
              static_cast<CountingAllocator*>(user)->live_bytes -= bytes;
              std::free(data);
            },
            this};
  }

  std::atomic<bool> failing{false};
  std::atomic<int> allocations{0};
  std::atomic<std::size_t> live_bytes{0};
  std::atomic<std::size_t> peak_bytes{0};
};

/// Sets an environment variable for as long as it lives; null unsets it.
class ScopedEnvironment {
 public:
  ScopedEnvironment(std::string name, const char* value) : name_(std::move(name)) {
    if (const char* old = std::getenv(name_.c_str())) old_ = std::make_unique<std::string>(old);
    set(value);
  }
  ~ScopedEnvironment() { set(old_ ? old_->c_str() : nullptr); }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  void set(const char* value) {
    if (value) setenv(name_.c_str(), value, 1);
    else unsetenv(name_.c_str());
  }

  std::string name_;
  std::unique_ptr<std::string> old_;
};

}  // namespace rapt::testing
