// The tile instructions in plain C++, for machines without them. `dot` follows the order of operations that Intel's
// manual gives for TDPBF16PS, so that results agree with the instruction's bit for bit.
#pragma once

#include <cstdint>

namespace rapt::cpu::RAPT_ISA {

class Tiles {
 public:
  template <int kTile>
  void load(const void* p, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) __builtin_memcpy(row_[kTile][i], static_cast<const char*>(p) + i * stride, 64);
  }
  template <int kTile>
  void load_once(const void* p, std::int64_t stride) {
    load<kTile>(p, stride);
  }
  template <int kTile>
  void store(void* p, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) __builtin_memcpy(static_cast<char*>(p) + i * stride, row_[kTile][i], 64);
  }
  template <int kTile>
  void zero() {
    __builtin_memset(row_[kTile], 0, sizeof row_[kTile]);
  }
  template <int kC, int kA, int kB>
  void dot() {
    for (int m = 0; m < 16; ++m) dot_row(row_[kA][m], row_[kB], row_[kC][m]);
  }
  template <int kC, int kA, int kB>
  void int8_dot() {
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n)
        for (int byte = 0; byte < 64; ++byte) {
          const int shift = byte % 4 * 8;
          const auto a = static_cast<std::uint8_t>(row_[kA][m][byte / 4] >> shift);
          const auto b = static_cast<std::int8_t>(row_[kB][byte / 4][n] >> shift);
          row_[kC][m][n] += static_cast<std::uint32_t>(a * b);
        }
  }

 private:
  static float number(std::uint32_t bits) {
    const float x = __builtin_bit_cast(float, bits);
    return __builtin_fabsf(x) < __FLT_MIN__ ? __builtin_copysignf(0.f, x) : x;  // denormals are 0, before and after
  }
  static float flushed(float x) { return number(__builtin_bit_cast(std::uint32_t, x)); }
  static float low(std::uint32_t word) { return number(word << 16); }
  static float high(std::uint32_t word) { return number(word & 0xffff0000u); }

  // Even and odd elements are summed separately, from 0; only the sum of both is added to c. (Not instrumented by
  // sanitizers: it takes most of the model's time, and touches registers only.)
  [[gnu::noinline]] __attribute__((no_sanitize("address", "undefined"))) static void dot_row(
      const std::uint32_t* a, const std::uint32_t (*b)[16], std::uint32_t* c) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n) {
        even[n] = flushed(__builtin_fmaf(low(a[k]), low(b[k][n]), even[n]));
        odd[n] = flushed(__builtin_fmaf(high(a[k]), high(b[k][n]), odd[n]));
      }
    for (int n = 0; n < 16; ++n)
      c[n] = __builtin_bit_cast(std::uint32_t, flushed(number(c[n]) + flushed(even[n] + odd[n])));
  }

  std::uint32_t row_[8][16][16];
};

}  // namespace rapt::cpu::RAPT_ISA
