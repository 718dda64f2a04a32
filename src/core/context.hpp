// What a Context owns: executor, ISA cap, forced entry, allocator and one spare workspace.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "rapt/context.hpp"

namespace rapt {

// A 64-byte aligned block from an allocator.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Allocator& allocator, std::size_t bytes);  // throws std::bad_alloc
  Workspace(Workspace&& other) noexcept { swap(other); }
  Workspace& operator=(Workspace&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Workspace();
  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  void swap(Workspace& other) noexcept;
  Allocator allocator_{};
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

class ContextGuards;  // guards/guards.hpp

struct Context::Impl {
  ContextOptions options;
  Allocator allocator;
  bool isa_forced = false;                      // by the environment: a lower ISA will not do either
  Operation kernel_operation{};                 // of the entry that `options` force, if they do
  int forks_before;                             // a later fork of the process has none of its threads
  std::shared_ptr<const ContextGuards> guards;  // null: none

  // Whether this entry of an operation may run: an entry is forced for its own operation only.
  bool forces(Operation operation, const std::string& entry) const {
    return !forces_one(operation) || options.kernel == entry;
  }
  bool forces_one(Operation operation) const { return !options.kernel.empty() && operation == kernel_operation; }

  // At least `bytes`; reuses the block the last call gave back. Page faults on fresh memory cost small calls 15 %.
  Workspace borrow(std::size_t bytes) const;
  void give_back(Workspace workspace) const noexcept;

  // The executor to use now: serial in a forked child, whose thread pools did not survive the fork.
  Executor& executor() const;
  int concurrency() const;

  explicit Impl(ContextOptions);  // api/context.cpp

 private:
  mutable std::mutex spare_mutex_;  // never waited for
  mutable Workspace spare_;
};

}  // namespace rapt
