// The matrix unit: its software model against the manual's description of the instructions, the instructions against
// the model, and numbers against the sums of bf16 components they are split into.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/machine.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"
#include "unit/tile_probe.hpp"

namespace {

using rapt::DType;
using rapt::cpu::TileProbe;

constexpr int kRows = 16, kRowBytes = 64, kTileBytes = kRows * kRowBytes;

/// The model; null, with a warning, where this machine lacks the vectors it is compiled with.
const TileProbe* model() {
  for (rapt::Isa isa : rapt::usable_isas())
    if (to_string(isa) == RAPT_TEST_REFERENCE_ISA) return &rapt::cpu::amx_reference::kTileProbe;
  WARN("skipped: this machine has no " RAPT_TEST_REFERENCE_ISA ", which the model is compiled for");
  return nullptr;
}

/// Why there are no real instructions here; empty if there are.
std::string without_instructions() {
#if defined(RAPT_TEST_REAL_TILES)
  for (const rapt::cpu::IsaSupport& support : rapt::cpu::machine().isas)
    if (support.isa == rapt::Isa::amx)
      return support.unusable.empty() && support.denied ? std::string(support.denied(true))
                                                        : support.unusable;  // asks for the registers
#endif
  return "this build has none";
}
const TileProbe* instructions() {
#if defined(RAPT_TEST_REAL_TILES)
  if (without_instructions().empty()) return &rapt::cpu::amx::kTileProbe;
#endif
  return nullptr;
}

std::vector<const TileProbe*> probes() {
  std::vector<const TileProbe*> all;
  for (const TileProbe* probe : {model(), instructions()})
    if (probe) all.push_back(probe);
  return all;
}

using TileWords = std::vector<std::uint32_t>;

float as_float(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
std::uint32_t as_bits(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
char* bytes(TileWords& words) {
  return reinterpret_cast<char*>(words.data());
}
const char* bytes(const TileWords& words) {
  return reinterpret_cast<const char*>(words.data());
}

/// The bf16 with this sign, fraction and (biased) exponent.
std::uint32_t half_of(std::uint32_t random, std::uint32_t exponent) {
  return (random & 1) << 15 | exponent << 7 | (random >> 1 & 0x7f);
}

/// What a test draws: exponents of a, b and c, biased, and how often a word is any pattern at all instead.
struct Draw {
  const char* name;
  int a_low, a_high, b_low, b_high, c_low, c_high;
  double any;
};
constexpr Draw kDraws[] = {
    {"ordinary numbers", 120, 128, 120, 128, 120, 130, 0},
    {"all exponents whose products are in range", 90, 164, 90, 164, 60, 200, 0},
    {"now and then any pattern: Inf, NaN, denormals", 110, 140, 110, 140, 110, 140, 0.002},
    {"denormals times ordinary numbers", 0, 1, 126, 250, 0, 10, 0},
    {"results around the smallest normal number", 63, 75, 60, 70, 0, 12, 0},
    {"products that only denormals could hold", 30, 68, 30, 68, 0, 3, 0},
    {"products and sums around the largest number", 186, 192, 184, 192, 250, 254, 0},
    {"any pattern", 0, 255, 0, 255, 0, 255, 1},
};

TileWords draw_halves(std::mt19937& random, int tiles, int low, int high, double any) {
  std::uniform_int_distribution<std::uint32_t> exponent(static_cast<std::uint32_t>(low),
                                                        static_cast<std::uint32_t>(high));
  std::bernoulli_distribution odd(any);
  const auto half = [&] {
    const auto bits = static_cast<std::uint32_t>(random());
    return odd(random) ? bits & 0xffff : half_of(bits, exponent(random));
  };
  TileWords words(static_cast<std::size_t>(tiles * kTileBytes / 4));
  for (std::uint32_t& word : words) word = half() | half() << 16;
  return words;
}
TileWords draw_floats(std::mt19937& random, int tiles, int low, int high, double any) {
  TileWords words = draw_halves(random, tiles, low, high, any);
  for (std::uint32_t& word : words) word = (word & 0xffff0000u) | (static_cast<std::uint32_t>(random()) & 0xffff);
  return words;
}

float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x;
}
/// One rounding, denormals are 0 before and after.
float multiply_add(float x, float y, float z) {
  return flushed(std::fma(flushed(x), flushed(y), flushed(z)));
}

/// Intel's manual on TDPBF16PS, element by element: for every n the products of even and of odd elements are summed
/// apart, from 0, by multiply-adds; then their sum is added to c. To nearest even throughout.
void reference_dot(const std::uint32_t* a, const std::uint32_t* b, std::uint32_t* c) {
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < 16; ++n) {
      float part[2] = {0, 0};
      for (int k = 0; k < 16; ++k) {
        for (int odd = 0; odd < 2; ++odd) {
          const auto element = [&](std::uint32_t word) { return as_float(odd ? word & 0xffff0000u : word << 16); };
          part[odd] = multiply_add(element(a[16 * m + k]), element(b[16 * k + n]), part[odd]);
        }
      }
      const float both = flushed(part[0] + part[1]);
      c[16 * m + n] = as_bits(flushed(flushed(as_float(c[16 * m + n])) + both));
    }
  }
}

/// How many words differ; a NaN is as good as another, and all are counted in `nans`.
int differences(const TileWords& got, const TileWords& want, int& nans) {
  int count = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const bool nan = std::isnan(as_float(want[i]));
    nans += nan;
    count += nan ? !std::isnan(as_float(got[i])) : got[i] != want[i];
  }
  return count;
}

double f16_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 0x400, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

/// The number that so many bf16 components, `stride` elements apart, add up to.
double sum_of(const std::uint16_t* first, int components, std::size_t stride) {
  double sum = 0;
  for (int p = 0; p < components; ++p)
    sum += double{as_float(std::uint32_t{first[static_cast<std::size_t>(p) * stride]} << 16)};
  return sum;
}

/// Splits a row that holds this number and ones, and says whether all of it is representable.
bool is_representable(const TileProbe& probe, int components, DType type, const void* x, std::size_t size,
                      bool contiguous) {
  constexpr std::size_t kCount = 64;
  const std::size_t step = contiguous ? size : 2 * size;
  std::vector<char> row(kCount * step, 0);
  // Around it only ones: 0x3f80 and 0x3c00 for 16 bits.
  const float one = 1;
  const std::uint16_t half_one = type == DType::bf16 ? 0x3f80 : 0x3c00;
  for (std::size_t i = 0; i < kCount; ++i)
    std::memcpy(row.data() + i * step, type == DType::f32 ? static_cast<const void*>(&one) : &half_one, size);
  std::memcpy(row.data() + 37 * step, x, size);
  std::vector<std::uint16_t> to(3 * kCount);
  return probe.split(components, type, row.data(), contiguous ? 1 : 2, kCount, kCount, to.data(), kCount);
}

}  // namespace

TEST_CASE("tiles are loaded and stored row by row, at any stride", "[unit]") {
  std::mt19937 random(1);
  for (const TileProbe* probe : probes()) {
    for (const bool once : {false, true}) {
      for (const auto& [from_stride, to_stride] :
           {std::pair(64, 64), std::pair(80, 64), std::pair(64, 132), std::pair(100, 68)}) {
        std::vector<char> from(static_cast<std::size_t>(8 * kRows * from_stride)),
            to(static_cast<std::size_t>(8 * kRows * to_stride), 'x'), want = to;
        for (char& byte : from) byte = static_cast<char>(random());
        for (int r = 0; r < 8 * kRows; ++r)
          std::memcpy(want.data() + r * to_stride, from.data() + r * from_stride, kRowBytes);
        probe->round_trip(from.data(), from_stride, once, to.data(), to_stride);
        CHECK(to == want);  // and nothing between the rows was written
      }
    }
    std::vector<char> from(8 * kTileBytes, 'x'), to(8 * kTileBytes, 'y');
    probe->zero(from.data(), to.data());
    CHECK(to == std::vector<char>(8 * kTileBytes, 0));
  }
}

TEST_CASE("the model of the tile instructions does what the manual says", "[unit]") {
  const TileProbe* probe = model();
  if (!probe) return;
  for (const Draw& draw : kDraws) {
    std::mt19937 random(2);
    int wrong = 0, nans = 0, zeros = 0;
    for (int round = 0; round < 40; ++round) {
      const TileWords a = draw_halves(random, 2, draw.a_low, draw.a_high, draw.any);
      const TileWords b = draw_halves(random, 2, draw.b_low, draw.b_high, draw.any);
      TileWords got = draw_floats(random, 4, draw.c_low, draw.c_high, draw.any), want = got;
      constexpr std::size_t kWords = kTileBytes / 4;
      for (std::size_t i = 0; i < 2; ++i)
        for (std::size_t j = 0; j < 2; ++j)
          reference_dot(a.data() + i * kWords, b.data() + j * kWords, want.data() + (2 * i + j) * kWords);
      probe->dot(bytes(a), bytes(b), bytes(got));
      wrong += differences(got, want, nans);
      zeros += static_cast<int>(std::count(want.begin(), want.end(), 0u));
    }
    INFO(draw.name << ": " << nans << " NaN, " << zeros << " zero of " << 40 * 4 * 256);
    CHECK(wrong == 0);
    CHECK(nans < 40 * 4 * 256);
  }
}

TEST_CASE("the tile instructions agree with their model bit for bit", "[unit]") {
  const TileProbe *real = instructions(), *software = model();
  if (!real) WARN("skipped: no tile instructions: " << without_instructions());
  if (!real || !software) return;
  for (const Draw& draw : kDraws) {
    std::mt19937 random(3);
    int wrong = 0, nans = 0;
    for (int round = 0; round < 200; ++round) {
      const TileWords a = draw_halves(random, 2, draw.a_low, draw.a_high, draw.any);
      const TileWords b = draw_halves(random, 2, draw.b_low, draw.b_high, draw.any);
      TileWords got = draw_floats(random, 4, draw.c_low, draw.c_high, draw.any), want = got;
      software->dot(bytes(a), bytes(b), bytes(want));
      real->dot(bytes(a), bytes(b), bytes(got));
      wrong += differences(got, want, nans);
    }
    INFO(draw.name << ": " << nans << " NaN of " << 200 * 4 * 256);
    CHECK(wrong == 0);
  }
}

TEST_CASE("products of bytes: unsigned times signed, four to a sum", "[unit]") {
  for (const TileProbe* probe : probes()) {
    std::mt19937 random(4);
    for (int round = 0; round < 20; ++round) {
      TileWords a(kTileBytes / 4), b = a, got = a;
      for (TileWords* words : {&a, &b, &got})
        for (std::uint32_t& word : *words) word = static_cast<std::uint32_t>(random());
      TileWords want = got;
      for (std::size_t m = 0; m < kRows; ++m)
        for (std::size_t n = 0; n < 16; ++n)
          for (std::size_t k = 0; k < 64; ++k) {
            const int left = static_cast<unsigned char>(bytes(a)[64 * m + k]);
            const int right = static_cast<signed char>(bytes(b)[64 * (k / 4) + 4 * n + k % 4]);
            want[16 * m + n] += static_cast<std::uint32_t>(left * right);
          }
      probe->int8_dot(bytes(a), bytes(b), bytes(got));
      CHECK(got == want);
    }
  }
}

TEST_CASE("chains of byte products, which measure a peak, sum what their bytes make", "[unit]") {
  bool any = false;
  for (const rapt::cpu::IsaSupport& support : rapt::cpu::machine().isas) {
    if (!support.multiplies_int8 || (support.denied && !support.denied(true).empty())) continue;
    any = true;
    INFO(support.name);
    std::uint32_t sum = 0;
    const double operations = support.kernels->int8_chains(3, sum);
    CHECK(operations > 0);
    // Eight operations for every four products.
    const auto sums = static_cast<std::uint32_t>(operations / 8);
    CHECK(sum == sums * static_cast<std::uint32_t>(rapt::cpu::kInt8Products));
  }
  if (!any) WARN("skipped: no ISA of this build and CPU has products of bytes");
}

TEST_CASE("two bf16 components hold every fp16, one every bf16", "[unit]") {
  for (const TileProbe* probe : probes()) {
    for (const auto& [type, components] : {std::pair(DType::f16, 2), std::pair(DType::bf16, 1)}) {
      // All that are finite; of bf16 from 2^-126, as the unit takes denormals for 0, to 2^57.
      const int first = type == DType::f16 ? 0 : 0x80, last = type == DType::f16 ? 0x7c00 : 0x5c00;
      std::vector<std::uint16_t> x = {0, 0x8000};
      for (int bits = first; bits < last; ++bits)
        for (int sign : {0, 0x8000}) x.push_back(static_cast<std::uint16_t>(bits | sign));
      const std::size_t n = x.size(), padded = (n + 31) / 32 * 32 + 32;
      std::vector<std::uint16_t> to(padded * static_cast<std::size_t>(components), 0xaaaa);
      CHECK(probe->split(components, type, x.data(), 1, static_cast<std::int64_t>(n), static_cast<std::int64_t>(padded),
                         to.data(), static_cast<std::int64_t>(padded)));
      int wrong = 0;
      for (std::size_t i = 0; i < padded; ++i) {
        const double want = i >= n ? 0 : type == DType::f16 ? f16_value(x[i]) : sum_of(x.data() + i, 1, 0);
        wrong += sum_of(to.data() + i, components, padded) != want;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("one bf16 component holds every element of 8 and 4 bits", "[unit]") {
  const auto value_of = [](int code, int mantissa_bits, int bias) {
    const int exponent = (code & 127) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    const double size = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                      : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    return code < 128 ? size : -size;
  };
  for (const TileProbe* probe : probes())
    for (const DType type : {DType::i8, DType::i4x2, DType::f8e4m3, DType::f8e5m2}) {
      std::vector<std::uint8_t> codes;
      std::vector<double> values;
      for (int code = 0; code < 256; ++code) {
        if (type == DType::f8e4m3 && (code & 127) == 127) continue;  // NaN
        if (type == DType::f8e5m2 && (code & 127) >= 124) continue;  // NaN and infinity
        codes.push_back(static_cast<std::uint8_t>(code));
        if (type == DType::i8) values.push_back(code < 128 ? code : code - 256);
        if (type == DType::f8e4m3) values.push_back(value_of(code, 3, 7));
        if (type == DType::f8e5m2) values.push_back(value_of(code, 2, 15));
        if (type != DType::i4x2) continue;
        for (const int half : {code & 15, code >> 4}) values.push_back(half < 8 ? half : half - 16);
      }
      const std::size_t n = values.size(), padded = (n + 31) / 32 * 32;
      std::vector<std::uint16_t> to(padded, 0xaaaa);
      CHECK(probe->split(1, type, codes.data(), 1, static_cast<std::int64_t>(n), static_cast<std::int64_t>(padded),
                         to.data(), static_cast<std::int64_t>(padded)));
      int wrong = 0;
      for (std::size_t i = 0; i < padded; ++i) wrong += sum_of(to.data() + i, 1, padded) != (i < n ? values[i] : 0);
      INFO(to_string(type));
      CHECK(wrong == 0);
    }
}

TEST_CASE("numbers that components cannot hold are found, wherever they are in a row", "[unit]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  struct Verdict {
    float x;
    bool one, two;  // as bf16 in one component, as fp32 in two
  };
  const Verdict verdicts[] = {
      {0, true, true},          {1, true, true},           {0x1p-100f, true, true},      {0x1.fep-101f, true, false},
      {0x1p-126f, true, false}, {0x1p-127f, false, false}, {0x1p-133f, false, false},    {0x1.fep56f, true, true},
      {0x1p57f, false, false},  {kInfinity, false, false}, {std::nanf(""), false, false}};
  for (const TileProbe* probe : probes()) {
    for (const Verdict& verdict : verdicts) {
      for (const float x : {verdict.x, -verdict.x}) {
        const auto half = static_cast<std::uint16_t>(as_bits(x) >> 16);
        for (const bool contiguous : {true, false}) {
          INFO(x << (contiguous ? ", contiguous" : ", strided"));
          CHECK(is_representable(*probe, 1, DType::bf16, &half, 2, contiguous) == verdict.one);
          CHECK(is_representable(*probe, 2, DType::f32, &x, 4, contiguous) == verdict.two);
        }
      }
    }
    // The smallest denormal of fp16 is a number like any other; its Inf and NaN are not.
    for (const auto& [bits, good] : {std::pair(0x0001, true), std::pair(0x83ff, true), std::pair(0x7bff, true),
                                     std::pair(0x7c00, false), std::pair(0xfc00, false), std::pair(0x7c01, false)}) {
      const auto x = static_cast<std::uint16_t>(bits);
      CHECK(is_representable(*probe, 2, DType::f16, &x, 2, true) == good);
      CHECK(is_representable(*probe, 2, DType::f16, &x, 2, false) == good);
    }
  }
}

TEST_CASE("tiles: an unusable instruction set names the features that the CPU lacks", "[unit]") {
  CHECK(rapt::cpu::lacking("AVX-512", {{"VBMI", true}, {"BF16", true}}).empty());
  CHECK(rapt::cpu::lacking("AVX-512", {{"VBMI", true}, {"BF16", false}}) == "this CPU lacks AVX-512 BF16");
  CHECK(rapt::cpu::lacking("AVX-512", {{"VBMI", false}, {"VBMI2", false}, {"BF16", false}}) ==
        "this CPU lacks AVX-512 VBMI, VBMI2 and BF16");
}
