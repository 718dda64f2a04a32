// The lists of gathered keys of an attention call, in host memory.
#pragma once

#include <memory>

#include "operations/attention/params.hpp"

namespace rapt {

// Reads the lists that `params`, which has its sizes already, leads to: kv.indices and kv.counts. Throws Error for an
// entry that is no row of k, and for a count that is none.
//
// Kernels see lists without gaps: the length of each becomes the number of its valid entries, and if some valid entry
// stands behind one that is not, all lists are copied. Returns the memory that `params` then points to; null where
// every list is full.
std::shared_ptr<const void> read_lists(AttentionParams& params);

}  // namespace rapt
