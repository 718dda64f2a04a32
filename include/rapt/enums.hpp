// Enumerations that the API and the kernels share. This header has no code, so that kernels may include it.
#pragma once

#include <cstdint>

namespace rapt {

/// Element types of tensors; dtypes.def lists them. `i4x2` is a byte with two signed 4-bit integers; shapes and strides
/// of such tensors count bytes. Each operation states the types that it takes.
enum class DType : std::uint8_t {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) name = value,
#include "rapt/dtypes.def"
};

/// The device of a tensor's memory, with DLPack's codes. It determines the backend.
enum class DeviceType : std::int32_t { cpu = 1, cuda = 2 };

/// Instruction sets of CPU kernels, named by feature; isas.def lists them. On one architecture a higher value is a
/// superset of a lower one.
enum class Isa : std::uint8_t {
#define RAPT_INSTRUCTION_SET(name, NAME, value) name = value,
#include "rapt/isas.def"
};

/// The operations of rapt; operations.def lists them.
enum class Operation : std::uint8_t {
#define RAPT_OPERATION(name, Name, NAME) name,
#include "rapt/operations.def"
};

/// How delta_rule() writes a token to its state: `linear`; `gated`, after a decay; `delta`, minus the state's
/// prediction; or `gated_delta`, both. The names are those of ONNX's LinearAttention.
enum class UpdateRule : std::uint8_t { linear, gated, delta, gated_delta };

/// The shape of delta_rule()'s log decay: no decay, one per head, one per head and token, or one per head, token and
/// channel of d.
enum class Decay : std::uint8_t { none, constant, head, channel };

/// The calls of an operation that a kernel is for. Attention: `prefill` is for many query rows, `decode` for few rows
/// over many keys, and `naive` computes three steps with the matrix of scores in memory. delta_rule: `prefill` is for
/// prompts, which it computes in chunks of tokens, and `decode` for one token per sequence. For delta_rule and
/// attention_backward, `naive` computes the formulas as written. Other kernels, and operations with one kind of kernel,
/// have `all`.
enum class Phase : std::uint8_t { all, prefill, decode, naive };

}  // namespace rapt
