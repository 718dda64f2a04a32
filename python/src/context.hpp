// Contexts, one per thread count, ISA, pool of threads and words of guards.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "rapt/context.hpp"

namespace rapt::python {

/// Whose threads a call on the CPU runs on.
enum class Pool { tbb, torch };

/// Of Pool::torch oneTBB, too, if PyTorch's is none that rapt can run on. Serial in a forked child.
std::shared_ptr<Executor> executor_of(Pool pool);

/// The context for at most `threads` threads (0: all) of `pool`, instructions up to `isa` ("": no cap) and a GPU's
/// `stream`. Made at first use and kept, with its workspace; of many, those used last. Throws Error for an ISA this CPU
/// or build lacks.
Context context_for(int threads, const std::string& isa, Pool pool, void* stream = nullptr,
                    const std::string& kernel = {});

/// The guards of calls from now on, in the words of Guards::parse(); nothing: the environment's. What they say goes to
/// rapt._guards.deliver(). Throws Error, and leaves those that there were.
void set_guards(const std::optional<std::string>& words);
/// The words of the guards that watch now; "" for none. Throws Error for those of the environment.
std::string guards();

}  // namespace rapt::python
