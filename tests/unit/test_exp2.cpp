// exp2 of every instruction set, over every float32 in range.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "unit/usable_tables.hpp"

namespace {

float float_of(std::uint64_t bits) {
  const auto low = static_cast<std::uint32_t>(bits);
  float x;
  std::memcpy(&x, &low, sizeof(x));
  return x;
}

float exp2_of(const rapt::cpu::IsaKernels& table, float x) {
  float y = -1;
  table.exp2(&x, &y, 1);
  return y;
}

/// 2^23 / 2^floor(log2 exact): turns a difference into units in the last place of a float.
double units_per(double exact) {
  std::uint64_t bits;
  std::memcpy(&bits, &exact, sizeof(bits));
  bits = ((2046 + 23) - (bits >> 52)) << 52;
  std::memcpy(&exact, &bits, sizeof(bits));
  return exact;
}

}  // namespace

TEST_CASE("exp2 is within 1 ulp for every float from -126 to -2^-30, 1 above and 0 below", "[unit][slow]") {
  const auto tables = usable_tables();
  REQUIRE_FALSE(tables.empty());
  constexpr std::uint32_t kChunk = 1 << 16, kFirst = 0x80000000, kLast = 0xff800000;  // -0 to -inf, as bits
  std::vector<float> x(kChunk), y(kChunk);
  std::vector<double> worst(tables.size()), exact(kChunk), units(kChunk);
  for (std::uint64_t first = kFirst; first <= kLast; first += kChunk) {
    const auto n = static_cast<std::uint32_t>(std::min<std::uint64_t>(kChunk, kLast + std::uint64_t{1} - first));
    const bool below = float_of(first)<-126.0f, tiny = float_of(first + n - 1)> - 0x1p-30f;
    // Where results are all 0 or all 1, which is six sevenths of the floats, a sample.
    if ((below || tiny) && first / kChunk % 61 != 0) continue;
    for (std::uint32_t i = 0; i < n; ++i) x[i] = float_of(first + i);
    for (std::uint32_t i = 0; i < n && !below; ++i) {
      const double argument = x[i];
      exact[i] = tiny ? 1 + argument * 0.6931471805599453 : std::exp2(argument);  // the square is below 2^-60
      units[i] = units_per(exact[i]);
    }
    for (std::size_t t = 0; t < tables.size(); ++t) {
      tables[t]->exp2(x.data(), y.data(), n);
      bool zero = true;
      double chunk_worst = 0;
      if (below) {
        for (std::uint32_t i = 0; i < n; ++i) zero &= y[i] == 0;
      } else {
        for (std::uint32_t i = 0; i < n; ++i) {
          const double error = std::abs(y[i] - exact[i]) * units[i];
          if (x[i] < -126.0f) zero &= y[i] == 0;
          else if (!(error <= chunk_worst)) chunk_worst = std::isnan(error) ? 1e9 : error;
        }
      }
      REQUIRE(zero);
      worst[t] = std::max(worst[t], chunk_worst);
    }
  }
  for (std::size_t t = 0; t < tables.size(); ++t) {
    INFO(to_string(rapt::usable_isas()[t]) << ": " << worst[t] << " ulp");
    CHECK(worst[t] <= 1);
    CHECK(worst[t] > 0.1);  // else nothing was measured
  }
}

TEST_CASE("exp2 is within 1 ulp for positive arguments up to 127", "[unit]") {
  for (const auto* table : usable_tables()) {
    double worst = 0;
    for (float x = 0x1p-24f; x <= 127; x *= 1.0001f) {
      const double exact = std::exp2(double{x});
      worst = std::max(worst, std::abs(exp2_of(*table, x) - exact) * units_per(exact));
    }
    for (int n = -126; n < 128; ++n) CHECK(exp2_of(*table, static_cast<float>(n)) == std::ldexp(1.0f, n));
    CHECK(worst <= 1);
  }
}

TEST_CASE("exp2 of special values", "[unit]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const auto* table : usable_tables()) {
    CHECK(exp2_of(*table, -kInfinity) == 0);
    CHECK(exp2_of(*table, 0) == 1);
    CHECK(exp2_of(*table, -0.f) == 1);
    CHECK(exp2_of(*table, std::numeric_limits<float>::denorm_min()) == 1);
    CHECK(exp2_of(*table, -std::numeric_limits<float>::denorm_min()) == 1);
    CHECK(exp2_of(*table, std::numeric_limits<float>::lowest()) == 0);
    for (std::uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u, 0xff800001u}) {
      float nan;
      std::memcpy(&nan, &bits, sizeof(nan));
      CHECK(std::isnan(exp2_of(*table, nan)));
    }
  }
}

TEST_CASE("exp2 of any count touches its own elements only", "[unit]") {
  for (const auto* table : usable_tables()) {
    for (std::int64_t n = 0; n < 70; ++n) {
      std::vector<float> x(70, -1), y(70, 9);
      table->exp2(x.data(), y.data(), n);
      for (std::int64_t i = 0; i < 70; ++i) REQUIRE(y[static_cast<std::size_t>(i)] == (i < n ? 0.5f : 9));
    }
  }
}
