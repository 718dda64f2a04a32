// Helpers of launches on the host.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/hopper/schedule.cuh"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

// Calls `then` with the smallest compiled head dimension that fits the call, as a constant.
template <class Then>
auto with_head_dim(const AttentionParams& p, Then then) {
  const std::int64_t size = std::max(p.d, p.dv);
  if (size <= 64) return then(std::integral_constant<int, 64>());
  if (size <= 128) return then(std::integral_constant<int, 128>());
  if (size <= 192) return then(std::integral_constant<int, 192>());
  return then(std::integral_constant<int, 256>());
}

// A divisor: sizes may be 0, as calls without rows are planned, too.
inline std::int64_t at_least_1(std::int64_t size) {
  return std::max<std::int64_t>(size, 1);
}

}  // namespace rapt::cuda
