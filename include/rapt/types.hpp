// Data types, devices, instruction sets and the error type.
#pragma once

#if __cplusplus < 202002L
#error "rapt's C++ headers need C++20: compile with -std=c++20, or link rapt::rapt in CMake. rapt/rapt.h is for C11."
#endif

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "rapt/enums.hpp"
#include "rapt/export.h"

namespace rapt {

/// A device: its type, and its index among devices of this type (0 for the CPU).
struct Device {
  DeviceType type = DeviceType::cpu;
  std::int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Bytes of one element; 1 for `boolean` and `i4x2`.
RAPT_API std::size_t size_of(DType dtype) noexcept;
/// Bytes of one element; 0.5 for `i4x2`.
RAPT_API double bytes_of(DType dtype) noexcept;
RAPT_API std::string_view to_string(DType dtype) noexcept;
RAPT_API std::string_view to_string(DeviceType type) noexcept;
RAPT_API std::string_view to_string(Isa isa) noexcept;
RAPT_API std::string_view to_string(Operation operation) noexcept;
RAPT_API std::string_view to_string(Phase phase) noexcept;

/// The exception for bad arguments, thrown before anything is written. `what()` reads "<argument>: <got>; wanted
/// <wanted>".
class RAPT_API Error : public std::invalid_argument {
 public:
  Error(std::string argument, const std::string& got, const std::string& wanted);
  /// The argument by its name in the API, for example "k" or "score.scale".
  const std::string& argument() const noexcept { return argument_; }

 private:
  std::string argument_;
};

}  // namespace rapt
