// Data types, devices, instruction sets and the one error type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "rapt/export.h"

namespace rapt {

/// Element types a tensor may have: IEEE binary32 and binary16, bfloat16 (the upper half of an f32), bool of one byte,
/// signed integers, and the two 8-bit floats of the OCP specification (`f8e4m3` has NaN but no infinity: the "fn" kind;
/// `f8e5m2` is the upper half of an f16), all in the machine's byte order. `i4x2` is a byte of two signed 4-bit
/// integers, the one of even index in the lower half; shapes and strides of such tensors count bytes. Which an
/// operation takes is part of that operation's contract.
enum class DType : std::uint8_t { f32, f16, bf16, boolean, i32, i64, i8, f8e4m3, f8e5m2, i4x2 };

/// Where a tensor's memory lies; the values are DLPack's codes. The device picks the backend.
enum class DeviceType : std::int32_t { cpu = 1, cuda = 2 };

struct Device {
  DeviceType type = DeviceType::cpu;
  std::int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Instruction sets the CPU kernels are compiled for, named by feature: `generic` is SSE2 on x86-64, `avx2` is AVX2+FMA
/// (x86-64-v3), `avx512` is AVX-512 F/BW/DQ/VL (x86-64-v4), `avx512bf16` adds BF16, VBMI and VBMI2, `amx` also
/// AMX-BF16, `neon` is aarch64. On one architecture a higher value is a superset of a lower one.
enum class Isa : std::uint8_t { generic, avx2, avx512, neon, avx512bf16, amx };

/// Bytes of one element; 1 for `boolean` and `i4x2`.
RAPT_API std::size_t size_of(DType dtype) noexcept;
RAPT_API std::string_view to_string(DType dtype) noexcept;
RAPT_API std::string_view to_string(DeviceType type) noexcept;
RAPT_API std::string_view to_string(Isa isa) noexcept;

/// What every refused call throws, before anything is written. `what()` reads "<argument>: <got>; wanted <wanted>".
class RAPT_API Error : public std::invalid_argument {
 public:
  Error(std::string argument, const std::string& got, const std::string& wanted);
  /// The offending argument by its name in the API, for example "k" or "score.scale".
  const std::string& argument() const noexcept { return argument_; }

 private:
  std::string argument_;
};

}  // namespace rapt
