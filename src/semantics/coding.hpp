// Codes of quantised caches: how append_kv computes them, bit for bit the same on every backend. x * (1 / scale) + zero
// is computed in float64: its error is far below a code's step, but what lies halfway between two codes may take
// either.
#pragma once

#include "core/pod.hpp"

namespace rapt {

// x is stored as the code nearest to x / scale + zero, up to rounding in float64 (for 8-bit floats then in fp32).
struct Coding {
  float scale = 1, zero = 0;
};

// The range of the finite numbers of a group.
struct Extent {
  float low, high;
  bool finite;  // all numbers of the group are finite
};

// Codes are the integers from -half_range to half_range - 1.
RAPT_HOST_DEVICE double half_range(DType integers) {
  return integers == DType::i8 ? 128 : 8;
}

// An 8-bit float with kFraction bits after the leading one; codes without the sign.
template <int kFraction_, int kBias_, std::uint32_t kMaxFinite_, std::uint32_t kInf_, std::uint32_t kNan_>
struct Float8 {
  static constexpr int kFraction = kFraction_, kBias = kBias_;
  static constexpr std::uint32_t kMaxFinite = kMaxFinite_, kInf = kInf_, kNan = kNan_;
  static constexpr float kLargest = kFraction == 3 ? 448.f : 57344.f;

  // The code nearest to x, ties to even, at most kMaxFinite. Without branches, so that compilers can vectorise it.
  RAPT_HOST_DEVICE static std::uint8_t nearest(float x) {
    constexpr std::uint32_t kShift = 23 - kFraction,
                            kMinExponent = 128 - kBias;  // in fp32's exponent field, of normal numbers
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t size = bits & 0x7fffffff, exponent = size >> 23;
    const bool denormal = exponent < kMinExponent;
    const std::uint32_t below = kShift + kMinExponent - exponent;
    const std::uint32_t shift = !denormal    ? kShift
                                : below < 25 ? below
                                             : 25;  // a shift by 25 leaves none of the 24 bits
    const std::uint32_t value = denormal ? (size & 0x7fffff) | 0x800000 : size - ((127u - kBias) << 23);
    const std::uint32_t code = (value + (1u << (shift - 1)) - 1 + (value >> shift & 1)) >> shift;
    const std::uint32_t finite = code < kMaxFinite ? code : kMaxFinite;
    const std::uint32_t any = size > 0x7f800000 ? kNan : size == 0x7f800000 ? kInf : finite;
    return static_cast<std::uint8_t>((bits >> 24 & 0x80) | any);
  }
};
template <DType kType>
struct Fp8;
template <>
struct Fp8<DType::f8e4m3> : Float8<3, 7, 0x7e, 0x7f, 0x7f> {};
template <>
struct Fp8<DType::f8e5m2> : Float8<2, 15, 0x7b, 0x7c, 0x7e> {};

// The scale that maps `range` onto `steps` codes.
RAPT_HOST_DEVICE float scale_for(double range, double steps) {
  constexpr float kSmallest = 0x1p-126f;
  const auto scale = static_cast<float>(range / steps);
  return range == 0 ? 1 : scale > kSmallest ? scale : kSmallest;
}

RAPT_HOST_DEVICE Coding coding_of(DType dtype, const Extent& extent, bool with_zero) {
  const auto low = static_cast<double>(extent.low), high = static_cast<double>(extent.high);
  const double largest = -low > high ? -low : high;  // -inf: no number is finite
  float largest_value = 0;
  if (with_dtype<kFp8Types>(dtype, [&](auto type) { largest_value = Fp8<type.value>::kLargest; }))
    return {scale_for(largest > 0 ? largest : 0, static_cast<double>(largest_value)), 0};
  if (!extent.finite) return {__builtin_bit_cast(float, 0x7fc00000u), 0};
  const double half = half_range(dtype);
  if (!with_zero || largest == 0) return {scale_for(largest, half - 1), 0};
  // In a group whose numbers differ little, zero would grow until (code - zero) loses its digits.
  const double step = (high - low) / (2 * half - 1), min_step = largest * 0x1p-20;
  const float scale = scale_for(step > min_step ? step : min_step, 1);
  return {scale, static_cast<float>(-half - low / static_cast<double>(scale))};
}

// `factor` is 1 / scale.
template <class F8>
RAPT_HOST_DEVICE std::uint8_t float_code(float x, double factor) {
  const auto y = static_cast<float>(static_cast<double>(x) * factor);
  const float above = y > -F8::kLargest ? y : -F8::kLargest, inside = above < F8::kLargest ? above : F8::kLargest;
  return F8::nearest(abs_of(x) < kInfinity ? inside : x);
}
// If the scale is NaN, any code will do.
RAPT_HOST_DEVICE std::uint8_t integer_code(float x, double factor, double zero, double half) {
  constexpr double kRounder = 0x1.8p52;  // numbers of this size have no fraction
#ifdef __CUDA_ARCH__
  const double y = __dadd_rn(__dmul_rn(static_cast<double>(x), factor), zero);
#else
  const double y = static_cast<double>(x) * factor + zero;
#endif
  const double above = y > -half ? y : -half, inside = above < half - 1 ? above : half - 1;
  return static_cast<std::uint8_t>(static_cast<int>(inside + kRounder - kRounder));
}

}  // namespace rapt
