// The work in a problem.
#pragma once

#include "rapt/rapt.hpp"

namespace rapt::bench {

/// Bytes of one element: half a byte for i4x2.
double bytes_of(DType dtype);

/// Work that no implementation of the problem can avoid.
struct Cost {
  double flops = 0;  ///< multiply and add of q.k and p.v over the attended (row, key) pairs; the softmax is not counted
  double bytes = 0;  ///< q, the keys and values that some row sees, with scales and zeros, and out, each moved once
};

/// Counts exactly what causal, window, align, lengths and rings leave; masks and biases do not reduce the count, as a
/// kernel has to read them to know. Pages that sequences share count for each of them. `args` must be valid.
Cost cost_of(const AttentionArgs& args, const AttentionProblem& problem);

}  // namespace rapt::bench
