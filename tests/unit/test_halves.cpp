// How every instruction set widens and narrows bf16 and fp16, against the table of all their values.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "unit/usable_tables.hpp"

namespace {

using rapt::DType;
using rapt::cpu::IsaKernels;

struct Format {
  DType element;
  int fraction;  // bits
  int bias;
  int infinity() const { return 0x7fff >> fraction << fraction; }
  int quiet() const { return 1 << (fraction - 1); }
  // Of bits up to infinity's, which stands for the next power of two here: what rounds to it from below is as near.
  double value(int bits) const {
    const int exponent = bits >> fraction, rest = bits & ((1 << fraction) - 1);
    if (exponent == 0) return std::ldexp(rest, 1 - bias - fraction);
    return std::ldexp(rest + (1 << fraction), exponent - bias - fraction);
  }
};
constexpr Format kFormats[] = {{DType::bf16, 7, 127}, {DType::f16, 10, 15}};

std::uint32_t bits_of(float x) {
  return std::bit_cast<std::uint32_t>(x);
}

std::vector<float> widen(const IsaKernels& table, DType element, const std::vector<std::uint16_t>& x) {
  std::vector<float> y(x.size());
  table.convert(element, x.data(), DType::f32, y.data(), static_cast<std::int64_t>(x.size()));
  return y;
}
std::vector<std::uint16_t> narrow(const IsaKernels& table, DType element, const std::vector<float>& x) {
  std::vector<std::uint16_t> y(x.size());
  table.convert(DType::f32, x.data(), element, y.data(), static_cast<std::int64_t>(x.size()));
  return y;
}

std::vector<std::uint16_t> all_halves() {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

/// The nearest value, of two the one with an even last bit; a NaN's sign and upper bits, quiet.
class Rounding {
 public:
  explicit Rounding(const Format& format) : format_(format) {
    for (int bits = 0; bits <= format.infinity(); ++bits) values_.push_back(format.value(bits));
  }
  std::uint16_t operator()(float x) const {
    const std::uint32_t sign = bits_of(x) >> 31 << 15;
    if (std::isnan(x)) {
      const std::uint32_t rest = (bits_of(x) & 0x7fffff) >> (23 - format_.fraction);
      return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(format_.infinity() | format_.quiet()) | rest);
    }
    const double magnitude = std::fabs(double{x});
    auto above =
        static_cast<std::size_t>(std::lower_bound(values_.begin(), values_.end(), magnitude) - values_.begin());
    above = std::min(above, values_.size() - 1);
    std::size_t nearest = above;
    if (above > 0 && magnitude < values_[above]) {
      const double up = values_[above] - magnitude, down = magnitude - values_[above - 1];
      if (down < up || (down == up && above % 2 == 1)) nearest = above - 1;
    }
    return static_cast<std::uint16_t>(sign | nearest);
  }

 private:
  Format format_;
  std::vector<double> values_;
};

/// Every 16-bit value, the midpoints between them, the floats beside both; and floats all over the range.
std::vector<float> floats_to_round(const Format& format) {
  std::vector<float> x;
  for (int bits = 0; bits < format.infinity(); ++bits) {
    const double low = format.value(bits), high = format.value(bits + 1);
    for (double at : {low, (low + high) / 2}) {
      const auto exact = static_cast<float>(at);
      REQUIRE(double{exact} == at);
      for (float y : {std::nextafter(exact, 0.f), exact, std::nextafter(exact, HUGE_VALF)})
        x.push_back(y), x.push_back(-y);
    }
  }
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 4099)
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  for (std::uint32_t bits : {0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7fa12345u})
    for (std::uint32_t sign : {0u, 0x80000000u}) x.push_back(std::bit_cast<float>(bits | sign));
  return x;
}

}  // namespace

TEST_CASE("Widening gives the value of each of the 65536 bf16 and fp16 numbers", "[unit]") {
  const std::vector<std::uint16_t> all = all_halves();
  for (const Format& format : kFormats) {
    for (const IsaKernels* table : usable_tables()) {
      const std::vector<float> wide = widen(*table, format.element, all);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        const int magnitude = all[i] & 0x7fff;
        if (magnitude > format.infinity()) {
          const auto expected = static_cast<std::uint32_t>(all[i] >> 15 << 31 | 0x7f800000 |
                                                           (magnitude - format.infinity()) << (23 - format.fraction));
          const std::uint32_t quiet = format.element == DType::f16 ? 0x400000 : 0;  // bf16 keeps its bits
          wrong += bits_of(wide[i]) != (expected | quiet);
          continue;
        }
        const double value =
            magnitude == format.infinity() ? std::numeric_limits<double>::infinity() : format.value(magnitude);
        wrong += double{wide[i]} != (all[i] >> 15 ? -value : value) || std::signbit(wide[i]) != (all[i] >> 15 != 0);
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("Narrowing rounds to the nearest bf16 and fp16 number, ties to even, NaN to NaN", "[unit]") {
  for (const Format& format : kFormats) {
    const Rounding round(format);
    const std::vector<float> x = floats_to_round(format);
    std::vector<std::uint16_t> expected;
    for (float y : x) expected.push_back(round(y));
    for (const IsaKernels* table : usable_tables()) {
      const std::vector<std::uint16_t> got = narrow(*table, format.element, x);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        if (got[i] == expected[i]) continue;
        if (wrong++ == 0) UNSCOPED_INFO("first " << bits_of(x[i]) << ": " << got[i] << " for " << expected[i]);
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("What was widened narrows to itself", "[unit]") {
  const std::vector<std::uint16_t> all = all_halves();
  for (const Format& format : kFormats) {
    for (const IsaKernels* table : usable_tables()) {
      const std::vector<std::uint16_t> back = narrow(*table, format.element, widen(*table, format.element, all));
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < all.size(); ++i)
        wrong += back[i] != (all[i] | ((all[i] & 0x7fff) > format.infinity() ? format.quiet() : 0));
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("Conversions of any count touch their own elements only", "[unit]") {
  constexpr std::size_t kCount = 70;
  for (const Format& format : kFormats) {
    const auto one = static_cast<std::uint16_t>(format.bias << format.fraction);
    for (const IsaKernels* table : usable_tables()) {
      for (std::size_t n = 0; n < kCount; ++n) {
        const std::vector<std::uint16_t> halves(n, one);  // as many as there are: a sanitizer sees what reads more
        std::vector<float> wide(kCount, 9);
        table->convert(format.element, halves.data(), DType::f32, wide.data(), static_cast<std::int64_t>(n));
        std::vector<std::uint16_t> back(kCount, 9);
        table->convert(DType::f32, wide.data(), format.element, back.data(), static_cast<std::int64_t>(n));
        for (std::size_t i = 0; i < kCount; ++i) {
          REQUIRE(wide[i] == (i < n ? 1.f : 9.f));
          REQUIRE(back[i] == (i < n ? one : 9));
        }
      }
    }
  }
}
