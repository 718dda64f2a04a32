#include "rapt/types.hpp"

#include <array>
#include <cstdint>
#include <utility>

namespace rapt {
namespace {

unsigned bits_of(DType dtype) {
  static constexpr auto bits_of_value = [] {
    std::array<unsigned char, 256> all{};  // of any std::uint8_t
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) all[value] = bits;
#include "rapt/dtypes.def"
    return all;
  }();
  return bits_of_value[static_cast<std::uint8_t>(dtype)];
}

}  // namespace

std::size_t size_of(DType dtype) noexcept {
  return (bits_of(dtype) + 7) / 8;
}
double bytes_of(DType dtype) noexcept {
  return bits_of(dtype) / 8.0;
}
std::string_view to_string(DType dtype) noexcept {
  switch (dtype) {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) \
  case DType::name:                                     \
    return text;
#include "rapt/dtypes.def"
  }
  return "unknown dtype";
}

std::string_view to_string(DeviceType type) noexcept {
  switch (type) {
    case DeviceType::cpu:
      return "cpu";
    case DeviceType::cuda:
      return "cuda";
  }
  return "unknown device";
}

std::string_view to_string(Isa isa) noexcept {
  switch (isa) {
#define RAPT_INSTRUCTION_SET(name, NAME, value) \
  case Isa::name:                               \
    return #name;
#include "rapt/isas.def"
  }
  return "unknown isa";
}

std::string_view to_string(Operation operation) noexcept {
  switch (operation) {
#define RAPT_OPERATION(name, Name, NAME) \
  case Operation::name:                  \
    return #name;
#include "rapt/operations.def"
  }
  return "unknown operation";
}

std::string_view to_string(Phase phase) noexcept {
  switch (phase) {
    case Phase::all:
      return "all";
    case Phase::prefill:
      return "prefill";
    case Phase::decode:
      return "decode";
    case Phase::naive:
      return "naive";
  }
  return "unknown phase";
}

Error::Error(std::string argument, const std::string& got, const std::string& wanted)
    : std::invalid_argument(argument + ": " + got + "; wanted " + wanted), argument_(std::move(argument)) {}

}  // namespace rapt
