// Hands out pieces of a work item's scratch; with a null base it only counts, so one function both sizes and carves.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rapt::cpu::RAPT_ISA {

class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

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

// The bytes that a kernel's Scratch takes for these arguments of its constructor.
template <class KernelScratch, class... Args>
std::size_t carved_bytes(Args... args) noexcept {
  Carver carver(nullptr);
  [[maybe_unused]] const KernelScratch scratch(carver, args...);
  return carver.used();
}

}  // namespace rapt::cpu::RAPT_ISA
