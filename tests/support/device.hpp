// Calls on a GPU's memory for tests whose tensors are the host's.
#pragma once

#include "rapt/attention.hpp"
#include "support/entries.hpp"

namespace rapt::testing {

/// attention(args, context) on `entry`. For an entry that runs on a GPU the tensors are copied there, every one between
/// guard bands, and the outputs back; throws std::logic_error when a guard band was written, std::runtime_error when
/// CUDA has failed.
void run(const AttentionArgs& args, const std::string& entry);
/// The same in a context made for that entry.
void run(const AttentionArgs& args, const Forced& context);
/// Any other context is the host's.
inline void run(const AttentionArgs& args, const Context& context) {
  attention(args, context);
}

}  // namespace rapt::testing
