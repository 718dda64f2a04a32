// The work in a call, by formula.
#pragma once

#include "rapt/problem.hpp"

namespace rapt {

/// The work that every implementation of a call has to do.
struct Cost {
  double flops = 0;  ///< multiplications and additions, as the header of the operation counts them
  double bytes = 0;  ///< read and written, each element once: keys and values that some row sees, or that are new and
                     ///< stay in the cache, with scales and zeros; states that slots name. Biases, masks, slopes,
                     ///< sinks, lists and tables do not count
};

/// The work of a call, by formula. Causal, window, align, lengths, key ranges and rings reduce the count exactly. Masks
/// and biases do not, as a kernel must read them first. Pages that sequences share count once for each sequence.
/// Lengths and lists must be in host memory. Throws Error for arguments that the call would refuse.
#define RAPT_OPERATION(name, Name, NAME) RAPT_API Cost cost_of(const Name##Args& args);
#include "rapt/operations.def"

}  // namespace rapt
