// Hands out consecutive pieces of a work item's scratch. With a null base it only counts bytes, so that the same
// constructor both sizes a kernel's scratch and lays it out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rapt::cpu::RAPT_ISA {

class BumpAllocator {
 public:
  explicit BumpAllocator(std::byte* base) : base_(base) {}

  template <class T>
  T* take(std::int64_t n) {
    std::byte* p = base_ ? base_ + used_ : nullptr;
    used_ += (static_cast<std::size_t>(n) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(p);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

// The size in bytes of a kernel's scratch struct, whose constructor gets a BumpAllocator and these arguments.
template <class KernelScratch, class... Args>
std::size_t bytes_of(Args... args) noexcept {
  BumpAllocator allocator(nullptr);
  [[maybe_unused]] const KernelScratch scratch(allocator, args...);
  return allocator.used();
}

}  // namespace rapt::cpu::RAPT_ISA
