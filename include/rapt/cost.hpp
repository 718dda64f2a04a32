// The work in a call, by formula.
#pragma once

#include "rapt/problem.hpp"

namespace rapt {

/// Work that no implementation of a call can avoid.
struct Cost {
  double flops = 0;  ///< multiplications and additions, as the header of the operation counts them
  double bytes = 0;  ///< read and written, each element once: of keys and values those that some row sees, or that
                     ///< are new and stay in the cache, with scales and zeros; of states those that slots name.
                     ///< Biases, masks, slopes, sinks, lists and tables do not count
};

/// Counts exactly what causal, window, align, lengths, key ranges and rings leave; masks and biases do not reduce the
/// count, as a kernel has to read them to know. Pages that sequences share count for each of them. Lengths and lists
/// are read, so they must be in host memory. Throws Error for arguments that the call would refuse.
#define RAPT_OPERATION(name, Name, NAME) RAPT_API Cost cost_of(const Name##Args& args);
#include "rapt/operations.def"

}  // namespace rapt
