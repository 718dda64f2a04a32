#include "rapt/types.hpp"

#include <utility>

namespace rapt {

std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::boolean:
    case DType::i8:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::i4x2:
      return 1;
    case DType::i64:
      return 8;
  }
  return 0;
}

double bytes_of(DType dtype) noexcept {
  return dtype == DType::i4x2 ? 0.5 : static_cast<double>(size_of(dtype));
}
std::string_view to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::boolean:
      return "bool";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::i8:
      return "i8";
    case DType::f8e4m3:
      return "f8e4m3";
    case DType::f8e5m2:
      return "f8e5m2";
    case DType::i4x2:
      return "i4x2";
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
    case Isa::generic:
      return "generic";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::neon:
      return "neon";
    case Isa::avx512bf16:
      return "avx512bf16";
    case Isa::amx:
      return "amx";
    case Isa::neonbf16:
      return "neonbf16";
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
