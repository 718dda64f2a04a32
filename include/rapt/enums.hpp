// Enumerations that the API and the kernels share. There is no code here, so that kernels may include it.
#pragma once

#include <cstdint>

namespace rapt {

/// Element types a tensor may have: IEEE binary32 and binary16, bfloat16 (the upper half of an f32), bool of one byte,
/// signed integers, and the two 8-bit floats of the OCP specification (`f8e4m3` has NaN but no infinity: the "fn" kind;
/// `f8e5m2` is the upper half of an f16), all in the machine's byte order. `i4x2` is a byte of two signed 4-bit
/// integers, the one of even index in the lower half; shapes and strides of such tensors count bytes. Which an
/// operation takes is part of that operation's contract.
enum class DType : std::uint8_t { f32, f16, bf16, boolean, i32, i64, i8, f8e4m3, f8e5m2, i4x2 };

/// Where a tensor's memory lies; the values are DLPack's codes. The device picks the backend.
enum class DeviceType : std::int32_t { cpu = 1, cuda = 2 };

/// Instruction sets the CPU kernels are compiled for, named by feature: `generic` is SSE2 on x86-64, `avx2` is AVX2+FMA
/// (x86-64-v3), `avx512` is AVX-512 F/BW/DQ/VL (x86-64-v4), `avx512bf16` adds BF16, VBMI and VBMI2, `amx` also
/// AMX-BF16, `neon` is aarch64, and `neonbf16` adds BF16 (FEAT_BF16). On one architecture a higher value is a superset
/// of a lower one.
enum class Isa : std::uint8_t { generic, avx2, avx512, neon, avx512bf16, amx, neonbf16 };

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
