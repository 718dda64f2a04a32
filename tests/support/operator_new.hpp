// Replaces operator new and delete of the program that one of whose files includes this.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

// The file defines them. A throwing one refuses the allocation.
void before_new();
void before_delete(void* data) noexcept;

void* aligned(std::size_t bytes, std::size_t alignment) {
  before_new();
  void* data = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (!data) std::abort();
  return data;
}
void release(void* data) noexcept {
  before_delete(data);
  std::free(data);
}

}  // namespace

void* operator new(std::size_t bytes) {
  return aligned(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return aligned(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* data) noexcept {
  release(data);
}
void operator delete(void* data, std::size_t) noexcept {
  release(data);
}
void operator delete(void* data, std::align_val_t) noexcept {
  release(data);
}
void operator delete(void* data, std::size_t, std::align_val_t) noexcept {
  release(data);
}
