// The ceilings a kernel is held against, measured on this machine by code compiled for the ISA in question.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rapt/types.hpp"

namespace rapt {

/// Runs independent fused multiply-add chains (multiply and add where the ISA has no FMA) on registers for
/// `iterations` rounds and returns the floating-point operations done. Time it to get the FMA peak of one core.
/// Throws Error if `isa` is not usable here.
RAPT_API double run_fma_chains(Isa isa, std::int64_t iterations);

/// Whether this CPU has products of bytes beside the ISA: AVX512-VNNI, AVX-VNNI, AMX-INT8. Throws Error as above.
RAPT_API bool has_int8_chains(Isa isa);

/// Likewise of independent sums of such products, unsigned times signed, in 32 bits; returns the integer operations
/// done, two for each product. Throws Error if `isa` is not usable here or has none.
RAPT_API double run_int8_chains(Isa isa, std::int64_t iterations);

/// Reads `bytes` (a multiple of 4) from `data` in order, with full vector loads, `rounds` times; returns a value that
/// depends on all of them. Time it to get the read bandwidth of one core: of memory, or of the cache that they fit.
/// Throws Error if `isa` is not usable here.
RAPT_API float run_read_stream(Isa isa, const float* data, std::size_t bytes, std::int64_t rounds = 1);

}  // namespace rapt
