#include "core/context.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "core/process.hpp"

namespace rapt {

static constexpr std::size_t kAlignment = 64;

Workspace::Workspace(const Allocator& allocator, std::size_t bytes) : allocator_(allocator), size_(bytes) {
  if (bytes == 0) return;
  data_ = static_cast<std::byte*>(allocator.allocate(allocator.user, bytes, kAlignment));
  if (data_ == nullptr) throw std::bad_alloc();
}
Workspace::~Workspace() {
  if (data_ != nullptr) allocator_.deallocate(allocator_.user, data_, size_, kAlignment);
}
void Workspace::swap(Workspace& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

// A caller that finds the mutex taken goes without the spare block rather than wait.
Workspace Context::Impl::borrow(std::size_t bytes) const {
  Workspace workspace;
  if (const std::unique_lock lock(spare_mutex_, std::try_to_lock); lock) workspace = std::move(spare_);
  if (workspace.size() < bytes) {
    workspace = Workspace();  // given up first: never two at a time
    workspace = Workspace(allocator, bytes);
  }
  return workspace;
}
void Context::Impl::give_back(Workspace workspace) const noexcept {
  if (const std::unique_lock lock(spare_mutex_, std::try_to_lock); lock) std::swap(spare_, workspace);
}

Executor& Context::Impl::executor() const {
  static const std::shared_ptr<Executor> serial = serial_executor();
  return forks() == forks_before ? *options.executor : *serial;
}
int Context::Impl::concurrency() const {
  const int offered = std::max(executor().concurrency(), 1);
  return options.threads > 0 ? std::min(options.threads, offered) : offered;
}

}  // namespace rapt
