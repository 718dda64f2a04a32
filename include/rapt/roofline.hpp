// Measurements for a roofline of this machine: peaks and read bandwidth, with code compiled for a given ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rapt/types.hpp"

namespace rapt {

/// Runs `iterations` rounds of independent chains of fused multiply-adds on registers (multiply and add on an ISA
/// without FMA), and returns the number of floating-point operations. Time it to measure the FMA peak of one core.
/// Throws Error if `isa` is not usable on this machine.
RAPT_API double run_fma_chains(Isa isa, std::int64_t iterations);

/// Whether this CPU has integer products of bytes for this ISA: AVX512-VNNI, AVX-VNNI or AMX-INT8. Throws Error if
/// `isa` is not usable on this machine.
RAPT_API bool has_int8_chains(Isa isa);

/// Runs `iterations` rounds of independent sums of products of bytes, unsigned times signed, in 32 bits, and returns
/// the number of integer operations, two per product. Throws Error if `isa` is not usable on this machine or has no
/// such products.
RAPT_API double run_int8_chains(Isa isa, std::int64_t iterations);

/// Reads `bytes` (a multiple of 4) from `data` in order, with full vector loads, `rounds` times, and returns a value
/// that depends on all of them. Time it to measure the read bandwidth of one core, from memory or from the cache that
/// holds the bytes. Throws Error if `isa` is not usable on this machine.
RAPT_API float run_read_stream(Isa isa, const float* data, std::size_t bytes, std::int64_t rounds = 1);

}  // namespace rapt
