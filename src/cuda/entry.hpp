// What the CUDA backend's entries have in common: the GPUs of this machine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dispatch/entry.hpp"

namespace rapt::cuda {

struct Machine {
  std::string unusable;   // why no GPU can be used; empty if one can
  std::string not_sm90a;  // why kernels of Hopper's own instructions cannot run; empty if every GPU has them
};

// Adds the entries of an operation, in the order of preference, to the backend's.
using Entries = std::vector<std::unique_ptr<const Entry>>;
void add_attention(const Machine& machine, Entries& entries);

}  // namespace rapt::cuda
