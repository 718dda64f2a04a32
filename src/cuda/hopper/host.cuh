// What both kernels do on the host's side.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/hopper/schedule.cuh"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

// Calls `then` with the head size that kernels are compiled for and a call needs, as a type.
template <class Then>
auto with_head_size(const AttentionParams& p, Then then) {
  const std::int64_t size = std::max(p.d, p.dv);
  if (size <= 64) return then(std::integral_constant<int, 64>());
  if (size <= 128) return then(std::integral_constant<int, 128>());
  if (size <= 192) return then(std::integral_constant<int, 192>());
  return then(std::integral_constant<int, 256>());
}

// To divide by sizes, which may be 0: a call without rows is planned, too.
inline std::int64_t at_least_1(std::int64_t size) {
  return std::max<std::int64_t>(size, 1);
}

}  // namespace rapt::cuda
