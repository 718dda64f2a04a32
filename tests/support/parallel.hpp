// Loops on all cores, for oracles.
#pragma once

#include <cstdint>
#include <functional>

namespace rapt::testing {

std::int64_t cores();

/// Calls body(0) to body(n - 1), each once and in any order, on up to `threads` threads. A loop within the body of
/// another is serial. Throws what a body throws first.
void parallel_for(std::int64_t n, std::int64_t threads, const std::function<void(std::int64_t)>& body);

}  // namespace rapt::testing
