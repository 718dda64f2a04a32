// The caller's floating-point mode kept away from what rapt computes. Kernels include it, so all of it is always
// inlined.
#pragma once

#include <cstdint>

namespace rapt {

// Sets round-to-nearest, no traps and denormals kept, or `mode`, for its lifetime. Restores the thread's mode and
// exception flags.
class FloatEnvironment {
 public:
#if defined(__SSE2__)
  using Mode = std::uint32_t;
  static constexpr Mode kDefault = 0x1f80;  // MXCSR: all exceptions masked
#else                                       // aarch64
  struct Mode {
    std::uint64_t control, status;
  };
  static constexpr Mode kDefault{};
#endif

  [[gnu::always_inline]] explicit FloatEnvironment(Mode mode = kDefault) : saved_(get()) {
    set(mode);
    compiler_barrier();
  }
  [[gnu::always_inline]] ~FloatEnvironment() {
    compiler_barrier();
    set(saved_);
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  // Compilers take arithmetic for independent of the mode; what goes through memory stays on its side of this.
  [[gnu::always_inline]] static void compiler_barrier() {
    asm volatile("" ::: "memory");
  }

#if defined(__SSE2__)
  [[gnu::always_inline]] static Mode get() {
    return __builtin_ia32_stmxcsr();
  }
  [[gnu::always_inline]] static void set(Mode mode) {
    __builtin_ia32_ldmxcsr(mode);
  }
#else
  [[gnu::always_inline]] static Mode get() {
    Mode mode;
    asm volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(mode.control), "=r"(mode.status));
    return mode;
  }
  [[gnu::always_inline]] static void set(Mode mode) {
    asm volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(mode.control), "r"(mode.status));
  }
#endif
  const Mode saved_;
};

}  // namespace rapt
