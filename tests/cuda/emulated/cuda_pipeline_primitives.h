// In place of CUDA's: copies are done at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

inline void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % bytes != 0) throw std::logic_error("a copy that is not aligned");
  std::memcpy(to, from, bytes);
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(std::size_t) {}
