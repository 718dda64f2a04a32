// The work in a call, by formula.
#pragma once

#include "rapt/problem.hpp"

namespace rapt {

/// Work that no implementation of a call can avoid.
struct Cost {
  double flops = 0;  ///< multiplications and additions: of attention those of q.k and p.v over the attended (row, key)
                     ///< pairs, without the softmax; of attention_backward
                     ///< those of q.k, dout.v, and of the sums that are dq, dk and dv; of merge_states those of the
                     ///< weighted sums; of append_kv none; of delta_rule those of S^T k, k u^T and S^T q;
                     ///< of delta_rule_backward those of S^T k and k u^T, for the states again, and of q dout^T,
                     ///< S dout, G^T k, G u, S du and k du^T, with G the gradient of S;
                     ///< of index_scores those of q.k over the visible (query, key) pairs, in all heads; of
                     ///< select_topk none
  double bytes = 0;  ///< of queries, keys, values, results and their gradients what is read and what is written, each
                     ///< moved once: of keys and values those that some row sees, or that are new and stay in the
                     ///< cache, with scales and zeros; of states those that slots name. Biases, masks, slopes, sinks,
                     ///< lists and tables do not count
};

/// Counts exactly what causal, window, align, lengths, key ranges and rings leave; masks and biases do not reduce the
/// count, as a kernel has to read them to know. Pages that sequences share count for each of them. Lengths and lists
/// are read, so they must be in host memory. Throws Error for arguments that the call would refuse.
#define RAPT_OPERATION(name, Name, NAME) RAPT_API Cost cost_of(const Name##Args& args);
#include "rapt/operations.def"

}  // namespace rapt
