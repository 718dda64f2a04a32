// Contexts, one per thread count and ISA.
#pragma once

#include <string>

#include "rapt/context.hpp"

namespace rapt::python {

/// The context for at most `threads` threads (0: all), instructions up to `isa` ("": no cap) and a GPU's `stream`. Made
/// at first use and kept, with its workspace, unless there is a stream. Throws Error for an ISA this CPU or build
/// lacks, or a wrong number.
Context context_for(int threads, const std::string& isa, void* stream = nullptr);

}  // namespace rapt::python
