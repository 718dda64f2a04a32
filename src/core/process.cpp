#include "core/process.hpp"

#include <pthread.h>

#include <atomic>

namespace rapt {
namespace {

std::atomic<int> count{0};
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int forks() noexcept {
  return count.load(std::memory_order_relaxed);
}

}  // namespace rapt
