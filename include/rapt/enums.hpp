// Enumerations that the API and the kernels share. There is no code here, so that kernels may include it.
#pragma once

#include <cstdint>

namespace rapt {

/// Element types a tensor may have; dtypes.def lists them. `i4x2` is a byte of two signed 4-bit integers; shapes and
/// strides of such tensors count bytes. Which an operation takes is part of that operation's contract.
enum class DType : std::uint8_t {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) name = value,
#include "rapt/dtypes.def"
};

/// Where a tensor's memory lies; the values are DLPack's codes. The device picks the backend.
enum class DeviceType : std::int32_t { cpu = 1, cuda = 2 };

/// Instruction sets the CPU kernels are compiled for, named by feature; isas.def lists them. On one architecture a
/// higher value is a superset of a lower one.
enum class Isa : std::uint8_t {
#define RAPT_INSTRUCTION_SET(name, NAME, value) name = value,
#include "rapt/isas.def"
};

/// What rapt computes.
enum class Operation : std::uint8_t {
#define RAPT_OPERATION(name, Name, NAME) name,
#include "rapt/operations.def"
};

/// How delta_rule() writes: with a prediction taken off first (`delta`), after a decay (`gated`), or both. The names
/// are those of ONNX's LinearAttention.
enum class UpdateRule : std::uint8_t { linear, gated, delta, gated_delta };

/// What delta_rule()'s log decay is given for: nothing, each head, each head and token, or each channel of d as well.
enum class Decay : std::uint8_t { none, constant, head, channel };

/// Which calls of an operation a kernel is for. Attention: `prefill` is for many query rows, `decode` for a few rows
/// over many keys, and `naive` is the three-step computation with its matrix of scores in memory. delta_rule: `decode`
/// is for one token a sequence. Of delta_rule and attention_backward, `naive` is the formulas as they are written.
/// Other kernels, and operations that have one kind, say `all`.
enum class Phase : std::uint8_t { all, prefill, decode, naive };

}  // namespace rapt
