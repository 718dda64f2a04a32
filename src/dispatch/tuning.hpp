// Tuning as a context gets it: from its options or from a file.
#pragma once

#include <string>

#include "rapt/tuning.hpp"

namespace rapt {

// Throws Error for entries that this build has not, or that are there twice, and for values that they cannot have.
void check(const Tuning& tuning);
// read_tuning(), whose errors begin with `prefix`: where the path came from.
Tuning read_tuning(const std::string& path, const std::string& prefix);

}  // namespace rapt
