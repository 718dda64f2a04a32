// append_kv(): what rows are rounded to.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rapt/append_kv.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/small_tensors.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;
constexpr DType kByteFloats[] = {DType::f8e4m3, DType::f8e5m2};

/// An 8-bit float by its definition, for codes that are numbers; infinite and NaN codes by their place in the table.
double number_of(DType dtype, int code) {
  const int fraction = dtype == DType::f8e4m3 ? 3 : 2, bias = dtype == DType::f8e4m3 ? 7 : 15;
  const int exponent = (code & 0x7f) >> fraction, rest = code & ((1 << fraction) - 1);
  const double size = exponent == 0 ? std::ldexp(rest, 1 - bias - fraction)
                                    : std::ldexp(rest + (1 << fraction), exponent - bias - fraction);
  return code & 0x80 ? -size : size;
}
int largest_code(DType dtype) {
  return dtype == DType::f8e4m3 ? 0x7e : 0x7b;
}
bool is_nan_code(DType dtype, int code) {
  return (code & 0x7f) > (dtype == DType::f8e4m3 ? 0x7e : 0x7c);
}

/// The code nearest to x by search, ties to the even code, past the end the last one.
int nearest_code(DType dtype, double x) {
  if (std::isnan(x) || (std::isinf(x) && dtype == DType::f8e4m3)) return -1;  // any NaN
  const int sign = std::signbit(x) ? 0x80 : 0;
  if (std::isinf(x)) return sign | 0x7c;
  const double size = std::min(std::fabs(x), number_of(dtype, largest_code(dtype)));
  int best = 0;
  for (int code = 0; code <= largest_code(dtype); ++code) {
    const double distance = std::fabs(number_of(dtype, code) - size), least = std::fabs(number_of(dtype, best) - size);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return sign | best;
}

/// `values` as they lie in a cache of `dtype` without scales. At most 8192 of them.
std::vector<int> codes_of(DType dtype, const Tensor& values) {
  const int64_t count = values.size();
  Tensor k = make(dtype, {1, 1, 1, count}), v = make(dtype, {1, 1, 1, count}), zero = ints({0});
  append_kv({values.view(), values.view(), KvCache::strided(k.mutable_view(), v.mutable_view()), zero.view(), {}});
  REQUIRE(same_bits(k, v));
  std::vector<int> codes;
  for (int64_t i = 0; i < count; ++i)
    codes.push_back(size_of(dtype) == 1 ? k.flat<std::uint8_t>(i) : k.flat<std::uint16_t>(i));
  return codes;
}

bool is_code_of(DType dtype, int got, double x) {
  const int wanted = nearest_code(dtype, x);
  return wanted < 0 ? is_nan_code(dtype, got) && (got >> 7) == std::signbit(x) : got == wanted;
}

/// One side of a cache with one element per byte (two of i4x2), scales and, where asked for, zeros.
struct Quantized {
  DType dtype;
  int64_t d;
  Tensor codes, scale, zero;

  /// `per_row`: a scale for every row; otherwise one for every head.
  Quantized(DType type, Sizes bhsd, int64_t groups, bool per_row, bool with_zero) : dtype(type) {
    std::vector<int64_t> s = bhsd;
    d = s[3];
    codes = make(dtype, {s[0], s[1], s[2], dtype == DType::i4x2 ? d / 2 : d});
    const Sizes all = {s[0], s[1], s[2], groups}, one = {s[0], s[1], 1, groups};
    scale = make(DType::f32, per_row ? all : one);
    if (with_zero) zero = make(DType::f32, per_row ? all : one);
  }
  /// What the definition of KvSource makes of element c, with double for all but scale and zero.
  double at(int64_t b, int64_t h, int64_t row, int64_t c) const {
    const Sizes group = {b, h, scale.layout().shape[2] == 1 ? 0 : row, c / (d / scale.layout().shape[3])};
    const double z = zero ? zero.at(group) : 0;
    return (code(b, h, row, c) - z) * double(scale.at(group));
  }
  double scale_at(int64_t b, int64_t h, int64_t row, int64_t c) const {
    return scale.at({b, h, scale.layout().shape[2] == 1 ? 0 : row, c / (d / scale.layout().shape[3])});
  }

 private:
  double code(int64_t b, int64_t h, int64_t row, int64_t c) const {
    if (dtype == DType::i8) return codes.at<std::int8_t>({b, h, row, c});
    if (dtype == DType::i4x2) {
      const int byte = codes.at<std::uint8_t>({b, h, row, c / 2}), nibble = c % 2 ? byte >> 4 : byte & 0xf;
      return nibble < 8 ? nibble : nibble - 16;
    }
    const int bits = codes.at<std::uint8_t>({b, h, row, c});
    if (is_nan_code(dtype, bits)) return NAN;
    return dtype == DType::f8e5m2 && (bits & 0x7f) == 0x7c ? (bits & 0x80 ? -HUGE_VAL : HUGE_VAL)
                                                           : number_of(dtype, bits);
  }
};

/// Groups of all kinds, sixteen in turn: element `i` of groups of `count`.
float awkward(int64_t i, int64_t count) {
  std::mt19937 random(static_cast<unsigned>(i));
  const float x = std::normal_distribution<float>()(random);
  switch (i / count % 16) {
    case 0:
      return 0;
    case 1:
      return i % count == 0 ? 3.f : 0.f;
    case 2:
      return -2.71828f;
    case 3:
      return 1000 + x * 1e-4f;
    case 4:
      return x * 1e-41f;  // denormals
    case 5:
      return x * 1e-38f;
    case 6:
      return x * 0x1p100f;
    case 7:
      return x * 1e-4f - 7;
    case 8:
      return std::fabs(x);
    case 9:
      return -std::fabs(x) * 1e-20f;
    case 10:
      return i % count == 1 ? 1e4f : x;
    case 11:
      return std::numeric_limits<float>::denorm_min() * static_cast<float>(i % 2);
    default:
      return x * std::exp2(static_cast<float>(i / count % 16 - 12) * 4);
  }
}

}  // namespace

TEST_CASE("append: every code of the 8-bit floats comes back", "[unit]") {
  for (const DType dtype : kByteFloats) {
    const Tensor values = filled(DType::f32, {1, 1, 1, 256}, [&](int64_t i) {
      const int code = static_cast<int>(i);
      const float sign = code & 0x80 ? -1.f : 1.f;
      if (is_nan_code(dtype, code)) return std::copysign(kNan, sign);
      return (code & 0x7f) > largest_code(dtype) ? sign * kInf : static_cast<float>(number_of(dtype, code));
    });
    const std::vector<int> codes = codes_of(dtype, values);
    for (int code = 0; code < 256; ++code) {
      CAPTURE(to_string(dtype), code);
      const int got = codes[static_cast<std::size_t>(code)];
      if (is_nan_code(dtype, code)) CHECK((is_nan_code(dtype, got) && (got & 0x80) == (code & 0x80)));
      else CHECK(got == code);
    }
  }
}

TEST_CASE("append: the nearest 8-bit float of every fp16 number", "[unit]") {
  for (const DType dtype : kByteFloats) {
    for (int64_t first = 0; first < 1 << 16; first += 8192) {
      Tensor values = make(DType::f16, {1, 1, 1, 8192});
      for (int64_t i = 0; i < 8192; ++i) values.flat<std::uint16_t>(i) = static_cast<std::uint16_t>(first + i);
      const std::vector<int> codes = codes_of(dtype, values);
      for (int64_t i = 0; i < 8192; ++i) {
        const float x = values.flat(i);
        if (is_code_of(dtype, codes[static_cast<std::size_t>(i)], x)) continue;
        CAPTURE(to_string(dtype), first + i, x, codes[static_cast<std::size_t>(i)]);
        FAIL("not the nearest");
      }
    }
  }
}

TEST_CASE("append: the nearest 8-bit float around every midpoint of fp32", "[unit]") {
  for (const DType dtype : kByteFloats) {
    std::vector<float> values = {1e-45f, 1e-38f, 3e38f, 65504.f, 464.f, 465.f, 61440.f};
    for (int code = 0; code < largest_code(dtype); ++code) {
      const auto middle = static_cast<float>((number_of(dtype, code) + number_of(dtype, code + 1)) / 2);
      for (const float x : {std::nextafter(middle, 0.f), middle, std::nextafter(middle, kInf)}) {
        values.push_back(x);
        values.push_back(-x);
      }
    }
    const auto count = static_cast<int64_t>(values.size());
    const Tensor tensor =
        filled(DType::f32, {1, 1, 1, count}, [&](int64_t i) { return values[static_cast<std::size_t>(i)]; });
    const std::vector<int> codes = codes_of(dtype, tensor);
    for (std::size_t i = 0; i < values.size(); ++i) {
      CAPTURE(to_string(dtype), values[i], codes[i]);
      CHECK(is_code_of(dtype, codes[i], values[i]));
    }
  }
}

TEST_CASE("append: rounding to bf16 and fp16", "[unit]") {
  std::mt19937 random(1);
  for (const DType from : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType to : {DType::bf16, DType::f16, DType::f32}) {
      for (int64_t first = 0; first < 1 << 16; first += 8192) {
        Tensor values = make(from, {1, 1, 1, 8192});
        for (int64_t i = 0; i < 8192; ++i) {
          const auto half = static_cast<std::uint16_t>(first + i);
          // All exponents and leading digits, with random digits and ties behind them.
          if (from == DType::f32)
            values.flat<std::uint32_t>(i) = std::uint32_t{half} << 16 | (i % 2 ? random() & 0xffff : 0x8000);
          else values.flat<std::uint16_t>(i) = half;
        }
        Tensor k = make(to, {1, 1, 1, 8192}), v = make(to, {1, 1, 1, 8192}), zero = ints({0});
        const KvCache cache = KvCache::strided(k.mutable_view(), v.mutable_view());
        append_kv({values.view(), values.view(), cache, zero.view(), {}});
        if (from == to) {
          REQUIRE(same_bits(k, values));  // NaN payloads too
          continue;
        }
        for (int64_t i = 0; i < 8192; ++i) {
          const float x = values.flat(i), wanted = rounded(x, to), got = k.flat(i);
          if (std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(wanted)) continue;
          if (std::isnan(got) && std::isnan(wanted) && std::signbit(got) == std::signbit(x)) continue;
          CAPTURE(to_string(from), to_string(to), x, got, wanted);
          FAIL("rounded wrongly");
        }
      }
    }
  }
}

TEST_CASE("append: integers read back within half a scale", "[unit]") {
  constexpr int64_t b = 2, hk = 2, n = 8, s = 11, d = 24, groups = 3;
  const Tensor fresh = filled(DType::f32, {b, hk, n, d}, [](int64_t i) { return awkward(i, d / groups); });
  const Tensor before = ints({3, 0});
  for (const DType dtype : {DType::i8, DType::i4x2}) {
    for (const bool with_zero : {false, true}) {
      Quantized k(dtype, {b, hk, s, d}, groups, true, with_zero), v(dtype, {b, hk, s, d}, 1, true, with_zero);
      const KvCache cache =
          KvCache::strided(k.codes.mutable_view(), v.codes.mutable_view())
              .quantized(k.scale.mutable_view(), v.scale.mutable_view(), k.zero.mutable_view(), v.zero.mutable_view());
      append_kv({fresh.view(), fresh.view(), cache, before.view(), {}});
      for (const Quantized* side : {&k, &v}) {
        const int64_t count = side == &k ? d / groups : d;
        for (int64_t i = 0; i < fresh.size(); ++i) {
          const int64_t c = i % d, t = i / d % n, h = i / (d * n) % hk, at = i / (d * n * hk);
          const int64_t begin = i - c % count;
          double most = 0, low = fresh.flat(begin), high = low;
          for (int64_t j = begin; j < begin + count; ++j) {
            most = std::max<double>(most, std::fabs(fresh.flat(j)));
            low = std::min<double>(low, fresh.flat(j)), high = std::max<double>(high, fresh.flat(j));
          }
          const int64_t row = t + (at == 0 ? 3 : 0);
          const double x = fresh.flat(i), y = side->at(at, h, row, c), scale = side->scale_at(at, h, row, c);
          const double steps = dtype == DType::i8 ? 127 : 7;
          const double wanted =
              std::max(with_zero ? std::max((high - low) / (2 * steps + 1), most * 0x1p-20) : most / steps, 0x1p-126);
          CAPTURE(to_string(dtype), with_zero, i, x, y, scale, most);
          REQUIRE(std::fabs(y - x) <= scale / 2 + most * 0x1p-21);
          if (most == 0) REQUIRE((y == 0 && scale == 1));
          else REQUIRE(std::fabs(scale - wanted) <= wanted * 0x1p-23);
        }
      }
    }
  }
}

TEST_CASE("append: 8-bit floats with scales read back within their bound", "[unit]") {
  constexpr int64_t b = 2, hk = 2, n = 8, s = 8, d = 24, groups = 3;
  const Tensor fresh = filled(DType::f32, {b, hk, n, d}, [](int64_t i) { return awkward(i, d / groups); });
  const Tensor before = ints({0, 0});
  for (const DType dtype : kByteFloats) {
    Quantized k(dtype, {b, hk, s, d}, groups, true, false), v(dtype, {b, hk, s, d}, groups, false, false);
    for (int64_t i = 0; i < v.scale.size(); ++i) v.scale.flat(i) = std::exp2(static_cast<float>(i));
    const std::vector<std::byte> given = bytes_of(v.scale);
    append_kv({fresh.view(),
               fresh.view(),
               KvCache::strided(k.codes.mutable_view(), v.codes.mutable_view())
                   .quantized(k.scale.mutable_view(), v.scale.mutable_view()),
               before.view(),
               {}});
    CHECK(bytes_of(v.scale) == given);
    const double relative = dtype == DType::f8e4m3 ? 0x1p-4 : 0x1p-3, unit = dtype == DType::f8e4m3 ? 0x1p-10 : 0x1p-17;
    for (const Quantized* side : {&k, &v}) {
      for (int64_t i = 0; i < fresh.size(); ++i) {
        const int64_t c = i % d, t = i / d % n, h = i / (d * n) % hk, at = i / (d * n * hk);
        const double x = fresh.flat(i), y = side->at(at, h, t, c), scale = side->scale_at(at, h, t, c);
        CAPTURE(to_string(dtype), i, x, y, scale);
        const double end = number_of(dtype, largest_code(dtype)) * scale;
        if (std::fabs(x) > end && side == &v) REQUIRE(y == std::copysign(end, x));
        else REQUIRE(std::fabs(y - x) <= std::max(relative * std::fabs(x), unit * scale) * (1 + 1e-6));
      }
    }
  }
}

TEST_CASE("append: given scales saturate integers", "[unit]") {
  const Tensor fresh = filled(DType::f32, {1, 1, 1, 8}, [](int64_t i) {
    return std::vector<float>{0, 1.25f, -1.25f, 0.75f, 1e30f, -1e30f, 3, -3}[static_cast<std::size_t>(i)];
  });
  const Tensor before = ints({1});
  for (const DType dtype : {DType::i8, DType::i4x2}) {
    Quantized k(dtype, {1, 1, 3, 8}, 1, false, true), v(dtype, {1, 1, 3, 8}, 1, false, false);
    k.scale.flat(0) = v.scale.flat(0) = 0.5f;
    k.zero.flat(0) = 1.5f;
    append_kv({fresh.view(),
               fresh.view(),
               KvCache::strided(k.codes.mutable_view(), v.codes.mutable_view())
                   .quantized(k.scale.mutable_view(), v.scale.mutable_view(), k.zero.mutable_view()),
               before.view(),
               {}});
    const double low = dtype == DType::i8 ? -128 : -8, high = -low - 1;
    // x / scale + zero: 1.5 and 2.5 tie, and go to the even 2.
    const std::vector<double> with_zero = {2, 4, -1, 3, high, low, std::min(high, 8.), -4};
    const std::vector<double> plain = {0, 2, -2, 2, high, low, 6, -6};
    for (int64_t c = 0; c < 8; ++c) {
      CAPTURE(to_string(dtype), c);
      const auto at = static_cast<std::size_t>(c);
      CHECK(k.at(0, 0, 1, c) == (with_zero[at] - 1.5) * 0.5);
      CHECK(v.at(0, 0, 1, c) == plain[at] * 0.5);
    }
  }
}

TEST_CASE("append: NaN and Inf are not hidden", "[unit]") {
  for (const float bad : {kNan, kInf, -kInf}) {
    const Tensor fresh =
        filled(DType::f32, {1, 1, 1, 8}, [&](int64_t i) { return i == 5 ? bad : static_cast<float>(i); });
    const Tensor zero = ints({0});
    for (const DType dtype : {DType::i8, DType::i4x2, DType::f8e4m3, DType::f8e5m2}) {
      const bool integer = dtype == DType::i8 || dtype == DType::i4x2;
      for (const bool per_row : {true, false}) {
        CAPTURE(bad, to_string(dtype), per_row);
        Quantized k(dtype, {1, 1, 2, 8}, 2, per_row, integer), v(dtype, {1, 1, 2, 8}, 2, per_row, false);
        for (Tensor* t : {&k.scale, &v.scale, &k.zero})
          for (int64_t i = 0; i < t->size(); ++i) t->flat(i) = 1;
        const AppendKvArgs args = {
            fresh.view(),
            fresh.view(),
            KvCache::strided(k.codes.mutable_view(), v.codes.mutable_view())
                .quantized(k.scale.mutable_view(), v.scale.mutable_view(), k.zero.mutable_view()),
            zero.view(),
            {}};
        if (integer && !per_row) {
          CHECK(refused_argument([&] { append_kv(args); }) == "k_new");
          continue;
        }
        append_kv(args);
        for (const Quantized* side : {&k, &v}) {
          CHECK(side->at(0, 0, 0, 3) == Approx(3).epsilon(0.1));
          const double y = side->at(0, 0, 0, 5);
          CHECK((dtype == DType::f8e5m2 && std::isinf(bad) ? y == bad : std::isnan(y)));
          if (!integer) CHECK(side->at(0, 0, 0, 4) == Approx(4).epsilon(0.1));
        }
      }
    }
  }
}

TEST_CASE("append: scales and zeros of a page go where its rows go", "[unit]") {
  constexpr int64_t size = 2, pages = 5, hk = 2, d = 6;
  const Tensor fresh = filled(DType::bf16, {1, hk, 3, d}, [](int64_t i) { return static_cast<float>(i % 17 - 8); });
  Tensor table = make(DType::i32, {1, 3});
  for (const int64_t i : {0, 1, 2})
    table.flat<std::int32_t>(i) = std::vector<std::int32_t>{99, 4, 1}[static_cast<std::size_t>(i)];
  const Tensor before = ints({3});  // page 4 row 1, page 1 rows 0 and 1
  Quantized k(DType::i8, {pages, hk, size, d}, 2, true, true), v(DType::i8, {pages, hk, size, d}, 1, true, false);
  append_kv({fresh.view(),
             fresh.view(),
             KvCache::paged(k.codes.mutable_view(), v.codes.mutable_view(), table.view())
                 .quantized(k.scale.mutable_view(), v.scale.mutable_view(), k.zero.mutable_view()),
             before.view(),
             {}});
  for (int64_t page = 0; page < pages; ++page)
    for (int64_t row = 0; row < size; ++row) {
      const int64_t t = page == 4 && row == 1 ? 0 : page == 1 ? row + 1 : -1;
      for (int64_t h = 0; h < hk; ++h)
        for (int64_t c = 0; c < d; ++c) {
          CAPTURE(page, row, h, c);
          if (t < 0) {
            CHECK(std::isnan(k.scale.at({page, h, row, c / 3})));  // the poison
            CHECK(k.codes.at<std::uint8_t>({page, h, row, c}) == 0xb5);
          } else {
            CHECK(std::fabs(k.at(page, h, row, c) - fresh.at({0, h, t, c})) <= 16. / 255 / 2 + 1e-5);
            CHECK(std::fabs(v.at(page, h, row, c) - fresh.at({0, h, t, c})) <= 8. / 127 / 2 + 1e-5);
          }
        }
    }
}
