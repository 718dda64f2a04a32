// Division by a number that the host knows: a multiplication and a shift.
#pragma once

#include "core/pod.hpp"

namespace rapt::cuda {

// Divides numbers below 2^31 by a number in [1, 2^31).
struct Divisor {
  std::uint32_t by = 1, multiplier = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(std::int64_t divisor) {
    if (divisor < 1) return;  // sizes may be 0, as launches without work are planned, too
    by = static_cast<std::uint32_t>(divisor);
    // ceil(2^shift / by), with 2^(shift - 31) >= by: rounding up adds less than 1 / by to a quotient.
    for (shift = 31; std::int64_t{1} << (shift - 31) < divisor;) ++shift;
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + by - 1) / by);
  }
  RAPT_HOST_DEVICE std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>(std::uint64_t{n} * multiplier >> shift);
  }
  RAPT_HOST_DEVICE std::uint32_t remainder(std::uint32_t n) const { return n - quotient(n) * by; }
};

}  // namespace rapt::cuda
