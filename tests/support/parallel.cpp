#include "support/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace rapt::testing {
namespace {

thread_local bool inside = false;

}  // namespace

std::int64_t cores() {
  return std::max<std::int64_t>(std::thread::hardware_concurrency(), 1);
}

void parallel_for(std::int64_t n, std::int64_t threads, const std::function<void(std::int64_t)>& body) {
  threads = std::min(n, threads);
  if (inside || threads <= 1) {
    for (std::int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  std::atomic<std::int64_t> next = 0;
  std::exception_ptr error;
  std::mutex mutex;
  const auto work = [&] {
    inside = true;
    try {
      for (std::int64_t i; (i = next++) < n;) body(i);
    } catch (...) {
      next = n;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
    inside = false;
  };
  {
    std::vector<std::jthread> others;
    for (std::int64_t i = 1; i < threads; ++i) others.emplace_back(work);
    work();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace rapt::testing
