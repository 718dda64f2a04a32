// Scalar conversions between f32 and the smaller floats, the same bits whatever the caller's floating-point mode is.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace rapt {

// A float of a sign, exponent bits and `kFraction` bits. Codes are without sign: those up to kMaxFinite are numbers.
// A format without Inf has kInf == kNan.
template <int kFraction, int kBias, std::uint32_t kMaxFinite, std::uint32_t kInf, std::uint32_t kNan>
struct SmallFloat {
  static constexpr std::uint32_t kSign = std::bit_ceil(kNan);

  // The code nearest to x, ties to the even one; Inf past the largest finite number, or where `saturate` that one.
  static constexpr std::uint32_t narrow(float x, bool saturate = false) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = bits >> 31 ? kSign : 0, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | kNan;
    if (size == 0x7f800000) return sign | kInf;
    const std::uint32_t code = nearest(size);
    return sign | (code <= kMaxFinite ? code : saturate ? kMaxFinite : kInf);
  }

  static constexpr float widen(std::uint32_t code) {
    const std::uint32_t sign = code & kSign ? 0x80000000 : 0, size = code & (kSign - 1);
    std::uint32_t value = (size << kShift) + (static_cast<std::uint32_t>(127 - kBias) << 23);
    if (size > kMaxFinite) value = kInf != kNan && size == kInf ? 0x7f800000 : 0x7fc00000;
    else if (kBias != 127 && size >> kFraction == 0)
      value = std::bit_cast<std::uint32_t>(static_cast<float>(size) * kUnit);
    return std::bit_cast<float>(sign | value);
  }

  static constexpr float largest() { return widen(kMaxFinite); }

 private:
  static constexpr int kShift = 23 - kFraction;
  static constexpr int kLowest = 128 - kBias;  // f32's exponent field of the smallest normal number
  // The smallest number above 0. bf16's is a denormal f32 and not used.
  static constexpr float kUnit =
      std::bit_cast<float>(static_cast<std::uint32_t>(std::max(kLowest - kFraction, 1)) << 23);

  static constexpr std::uint32_t nearest(std::uint32_t size) {
    int shift = kShift;
    std::uint32_t value = size - (static_cast<std::uint32_t>(127 - kBias) << 23);
    if (const int exponent = static_cast<int>(size >> 23); kBias != 127 && exponent < kLowest) {
      value = (size & 0x7fffff) | 0x800000;
      shift = std::min(kShift + kLowest - exponent, 25);  // from 25 on nothing is left of 24 bits
    }
    return (value + (1u << (shift - 1)) - 1 + (value >> shift & 1)) >> shift;
  }
};

using Bf16 = SmallFloat<7, 127, 0x7f7f, 0x7f80, 0x7fc0>;
using F16 = SmallFloat<10, 15, 0x7bff, 0x7c00, 0x7e00>;
using F8e4m3 = SmallFloat<3, 7, 0x7e, 0x7f, 0x7f>;
using F8e5m2 = SmallFloat<2, 15, 0x7b, 0x7c, 0x7e>;

}  // namespace rapt
