// append_kv(): where rows land, what they are rounded to, and what is refused.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rapt/kv_cache.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"
#include "support/tensor.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;
using Sizes = std::initializer_list<int64_t>;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kByteFloats[] = {DType::f8e4m3, DType::f8e5m2};

Tensor make(DType dtype, Sizes shape, Sizes strides = {}) {
  return Tensor(dtype, Layout({shape.begin(), shape.size()}, {strides.begin(), strides.size()}));
}
Tensor filled(DType dtype, Sizes shape, const std::function<float(int64_t)>& value, Sizes strides = {}) {
  Tensor t = make(dtype, shape, strides);
  for (int64_t i = 0; i < t.size(); ++i) t.flat(i) = value(i);
  return t;
}
Tensor ints(std::initializer_list<std::int32_t> values) {
  Tensor t = make(DType::i32, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), &t.flat<std::int32_t>(0));
  return t;
}
std::vector<std::byte> bytes_of(const Tensor& t) {
  return {t.buffer().data(), t.buffer().data() + t.buffer().size()};
}

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
  Quantized(DType dtype, Sizes bhsd, int64_t groups, bool per_row, bool with_zero) : dtype(dtype) {
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
        const AppendArgs args = {fresh.view(),
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

namespace {

/// Appends two sequences of 3 and 6 new rows to caches that hold `before`, and checks every byte of the cache: place
/// (sequence, key) gives block and row of k and v, or a negative row where none is to be written.
void check_places(const KvCache& cache, Tensor& k, Tensor& v, const std::vector<int64_t>& before, bool ragged,
                  const std::function<std::pair<int64_t, int64_t>(int64_t, int64_t)>& place) {
  constexpr int64_t hk = 2, d = 4, dv = 3;
  constexpr int64_t counts[] = {3, 6};
  Tensor lengths = make(DType::i64, {2});
  for (int64_t i = 0; i < 2; ++i) lengths.flat<int64_t>(i) = before[static_cast<std::size_t>(i)];
  const Tensor starts = ints({0, 3, 9});
  // Number (t, h, c) of a sequence's side, and never 0.
  const auto value = [](int64_t i, int64_t t, int64_t h, int64_t c) {
    return static_cast<float>(1 + c + 10 * (h + 10 * (t + 10 * i)));
  };
  Tensor wanted_k(k.dtype(), k.layout()), wanted_v(v.dtype(), v.layout());
  k.poison(), v.poison();
  const auto fill = [&](Tensor& fresh, int64_t size, Tensor& wanted, int64_t i) {
    for (int64_t t = 0; t < counts[i]; ++t) {
      const auto [block, row] = place(i, before[static_cast<std::size_t>(i)] + t);
      for (int64_t h = 0; h < hk; ++h)
        for (int64_t c = 0; c < size; ++c) {
          if (ragged) fresh.at({3 * i + t, h, c}) = value(i, t, h, c);
          else fresh.at({0, h, t, c}) = value(i, t, h, c);
          if (row >= 0 && (cache.kind != KvSource::Kind::ring || t >= counts[i] - k.layout().shape[2]))
            wanted.at({block, h, row, c}) = value(i, t, h, c);
        }
    }
  };
  if (ragged) {
    Tensor fresh_k = make(DType::f32, {9, hk, d}, {2 * hk * d, d, 1}), fresh_v = make(DType::f32, {9, hk, dv});
    for (int64_t i = 0; i < 2; ++i) fill(fresh_k, d, wanted_k, i), fill(fresh_v, dv, wanted_v, i);
    append_kv({fresh_k.view(), fresh_v.view(), cache, lengths.view(), starts.view()});
  } else {
    // One sequence of the batch at a time, the other without new rows by ragged starts.
    for (int64_t i = 0; i < 2; ++i) {
      Tensor fresh_k = make(DType::f32, {1, hk, counts[i], d}, {0, d, 2 * hk * d, 1}),
             fresh_v = make(DType::f32, {1, hk, counts[i], dv});
      fill(fresh_k, d, wanted_k, i), fill(fresh_v, dv, wanted_v, i);
      KvCache one = cache;
      TensorView length = slice(lengths.view(), 0, i, 1);
      if (cache.kind == KvSource::Kind::paged) one.block_table = slice(cache.block_table, 0, i, 1);
      else one.k = slice(cache.k, 0, i, 1), one.v = slice(cache.v, 0, i, 1);
      append_kv({fresh_k.view(), fresh_v.view(), one, length, {}});
    }
  }
  CHECK(bytes_of(k) == bytes_of(wanted_k));
  CHECK(bytes_of(v) == bytes_of(wanted_v));
}

}  // namespace

TEST_CASE("append: rows land at their positions and nothing else changes", "[unit]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f16);
  const bool ragged = GENERATE(false, true);
  SECTION("strided, with gaps") {
    Tensor k = make(dtype, {2, 2, 9, 4}, {200, 90, 8, 2}), v = make(dtype, {2, 2, 9, 3}, {54, 3, 6, 1});
    check_places(KvCache::strided(k.mutable_view(), v.mutable_view()), k, v, {4, 3}, ragged,
                 [](int64_t i, int64_t j) { return std::pair(i, j); });
  }
  SECTION("ring") {
    Tensor k = make(dtype, {2, 2, 4, 4}), v = make(dtype, {2, 2, 4, 3});
    check_places(KvCache::ring(k.mutable_view(), v.mutable_view()), k, v, {7, 1'000'000'007}, ragged,
                 [](int64_t i, int64_t j) { return std::pair(i, j % 4); });
  }
  SECTION("pages of 4, of 1 and of 16") {
    for (const int64_t size : {4, 1, 16}) {
      constexpr int64_t pages = 40, columns = 16;
      Tensor k = make(dtype, {pages, 2, size, 4}), v = make(dtype, {pages, 2, size, 3}, {16 * 8, 3, 6, 1});
      const int64_t before[] = {5, 2};
      // Entries that no new row needs are no pages.
      Tensor table = make(DType::i64, {2, columns}, {columns + 3, 1});
      for (int64_t i = 0; i < table.size(); ++i) table.flat<int64_t>(i) = i % 2 ? -1 : pages;
      const auto page = [&](int64_t i, int64_t j) { return (i * 17 + j / size * 7 + 3) % pages; };
      for (int64_t i = 0; i < 2; ++i)
        for (int64_t t = 0; t < (i ? 6 : 3); ++t)
          table.at<int64_t>({i, (before[i] + t) / size}) = page(i, before[i] + t);
      check_places(KvCache::paged(k.mutable_view(), v.mutable_view(), table.view()), k, v, {5, 2}, ragged,
                   [&](int64_t i, int64_t j) { return std::pair(page(i, j), j % size); });
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

namespace {

struct Valid {
  Tensor k = make(DType::i8, {4, 2, 4, 8}), v = make(DType::i8, {4, 2, 4, 6});
  Tensor k_scale = make(DType::f32, {4, 2, 4, 2}), v_scale = make(DType::f32, {4, 2, 4, 1});
  Tensor k_zero = make(DType::f32, {4, 2, 4, 2});
  Tensor k_new = filled(DType::f32, {2, 2, 3, 8}, [](int64_t i) { return static_cast<float>(i % 5); });
  Tensor v_new = filled(DType::f32, {2, 2, 3, 6}, [](int64_t i) { return static_cast<float>(i % 7); });
  Tensor table = make(DType::i32, {2, 2}), seqlens = ints({2, 3}), starts = ints({0, 2, 6});
  AppendArgs args;

  Valid() {
    for (std::int32_t i = 0; i < 4; ++i) table.flat<std::int32_t>(i) = 3 - i;
    args.k_new = k_new.view(), args.v_new = v_new.view(), args.seqlens = seqlens.view();
    args.cache = KvCache::paged(k.mutable_view(), v.mutable_view(), table.view())
                     .quantized(k_scale.mutable_view(), v_scale.mutable_view(), k_zero.mutable_view());
  }
};

void refuses(const std::string& argument, const std::function<void(Valid&)>& spoil) {
  Valid valid;
  INFO(argument);
  spoil(valid);
  const Tensor* const outputs[] = {&valid.k, &valid.v, &valid.k_scale, &valid.v_scale, &valid.k_zero};
  std::vector<std::vector<std::byte>> before;
  for (const Tensor* t : outputs) before.push_back(bytes_of(*t));
  CHECK(refused_argument([&] { append_kv(valid.args); }) == argument);
  for (std::size_t i = 0; i < before.size(); ++i) CHECK(bytes_of(*outputs[i]) == before[i]);
}

}  // namespace

TEST_CASE("append: what is wrong is named, and nothing is written", "[unit]") {
  Valid valid;
  REQUIRE_NOTHROW(append_kv(valid.args));
  const auto to_strided = [](Valid& a) {
    a.args.cache.kind = KvSource::Kind::strided, a.args.cache.block_table = {};
    a.args.seqlens = TensorView(a.seqlens.buffer().data(), DType::i32, {4}, {0});
    a.args.k_new.shape[0] = a.args.v_new.shape[0] = 4, a.args.k_new.strides[0] = a.args.v_new.strides[0] = 0;
    a.seqlens.flat<std::int32_t>(0) = 1;
  };
  {
    Valid strided;
    to_strided(strided);
    REQUIRE_NOTHROW(append_kv(strided.args));
  }
  refuses("k_new", [](Valid& a) { a.args.k_new = {}; });
  refuses("k_new", [](Valid& a) { a.args.k_new.dtype = DType::i32; });
  refuses("k_new", [](Valid& a) { a.args.k_new.shape[0] = 1; });
  refuses("k_new", [](Valid& a) { a.args.k_new.strides[2] = -1; });
  refuses("k_new", [](Valid& a) { a.args.k_new.data = nullptr; });
  refuses("k_new", [](Valid& a) { a.args.k_new.device.type = DeviceType::cuda; });
  refuses("k_new", [](Valid& a) { a.args.k_new.shape[1] = 1; });
  refuses("k_new", [](Valid& a) { a.args.k_new.shape[3] = 0; });
  refuses("cache.k", [](Valid& a) { a.args.k_new.shape[3] = 4; });
  refuses("v_new", [](Valid& a) { a.args.v_new = {}; });
  refuses("v_new", [](Valid& a) { a.args.v_new.shape[2] = 2; });
  refuses("v_new", [](Valid& a) { a.args.v_new.shape[1] = 1; });
  refuses("v_new", [](Valid& a) { a.args.v_new.dtype = DType::i8; });
  refuses("seqlens", [](Valid& a) { a.args.seqlens = {}; });
  refuses("seqlens", [](Valid& a) { a.args.seqlens.dtype = DType::f32; });
  refuses("seqlens", [](Valid& a) { a.seqlens.flat<std::int32_t>(1) = -1; });
  refuses("seqlens", [](Valid& a) { a.seqlens.flat<std::int32_t>(1) = 6; });
  refuses("cu_seqlens", [](Valid& a) {
    a.args.k_new = TensorView(a.k_new.buffer().data(), DType::f32, {6, 2, 8});
    a.args.v_new = TensorView(a.v_new.buffer().data(), DType::f32, {6, 2, 6});
    a.starts.flat<std::int32_t>(2) = 5;
    a.args.cu_seqlens = a.starts.view();
  });
  refuses("k_new", [](Valid& a) { a.args.cu_seqlens = a.starts.view(); });  // of rank 4
  refuses("cache.kind", [](Valid& a) { a.args.cache.kind = KvSource::Kind::ragged; });
  refuses("cache.k", [](Valid& a) { a.args.cache.k = {}; });
  refuses("cache.k", [](Valid& a) { a.args.cache.k.dtype = DType::boolean; });
  refuses("cache.k", [](Valid& a) { a.args.cache.k.strides[2] = 0; });
  refuses("cache.v", [](Valid& a) { a.args.cache.v.dtype = DType::f8e4m3; });
  refuses("cache.v", [](Valid& a) { a.args.cache.v.shape[2] = 3; });
  refuses("cache.k", [](Valid& a) { a.args.cache.v = a.args.cache.k, a.args.cache.v.shape[3] = 6; });
  refuses("cache.v", [](Valid& a) { a.args.cache.v.data = a.v_new.buffer().data(); });
  refuses("cache.block_table", [](Valid& a) { a.args.cache.block_table = {}; });
  refuses("cache.block_table", [](Valid& a) { a.args.cache.block_table.dtype = DType::f32; });
  refuses("cache.block_table", [](Valid& a) { a.args.cache.block_table.shape[0] = 1; });
  refuses("cache.block_table", [](Valid& a) { a.table.flat<std::int32_t>(1) = 4; });
  refuses("cache.block_table", [](Valid& a) { a.table.flat<std::int32_t>(1) = -1; });
  refuses("cache.block_table", [](Valid& a) { a.table.flat<std::int32_t>(1) = a.table.flat<std::int32_t>(3); });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale = {}, a.args.cache.k_zero = {}; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.dtype = DType::bf16; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.shape[3] = 3; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.shape[1] = 1; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.shape[2] = 2; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.strides[2] = 0; });
  refuses("cache.k_scale", [](Valid& a) { a.args.cache.k_scale.data = a.args.cache.k_zero.data; });
  refuses("cache.v_scale", [](Valid& a) {  // groups of 3 nibbles
    a.args.cache.k.dtype = a.args.cache.v.dtype = DType::i4x2;
    a.args.cache.k.shape[3] = 4, a.args.cache.v.shape[3] = 3, a.args.cache.v_scale.shape[3] = 2;
    a.args.cache.v_scale.strides[0] = 16, a.args.cache.v_scale.shape[0] = 1;
  });
  refuses("cache.k_zero", [](Valid& a) { a.args.cache.k_zero.shape[2] = 1; });
  refuses("cache.k_zero", [](Valid& a) { a.args.cache.k_zero.shape[3] = 1; });
  refuses("cache.k_zero", [](Valid& a) { a.args.cache.k.dtype = a.args.cache.v.dtype = DType::f8e5m2; });
  for (const float bad : {0.f, -1.f, kNan, kInf}) {
    refuses("cache.v_scale", [&](Valid& a) {
      a.args.cache.v_scale.shape[2] = 1;
      a.v_scale.at({0, 1, 0, 0}) = bad;
      for (int64_t i = 0; i < 4; ++i)
        for (int64_t h = 0; h < 2; ++h)
          if (i != 0 || h != 1) a.v_scale.at({i, h, 0, 0}) = 1;
    });
  }
  refuses("seqlens", [&](Valid& a) { to_strided(a), a.seqlens.flat<std::int32_t>(0) = 2; });
  refuses("cache.block_table", [&](Valid& a) { to_strided(a), a.args.cache.block_table = a.table.view(); });
  refuses("cache.k", [&](Valid& a) {
    to_strided(a);
    a.args.k_new.shape[0] = a.args.v_new.shape[0] = 3, a.args.seqlens.shape[0] = 3;
  });
}

TEST_CASE("append: k, v and scales may lie in turn in one buffer", "[unit]") {
  // Rows of [k: 8 bytes | its scale | v: 4 bytes | its scale].
  constexpr int64_t rows = 6, row = 20;
  alignas(4) std::uint8_t buffer[rows * row];
  std::memset(buffer, 0xb5, sizeof buffer);
  const auto bytes = [&](int64_t at, int64_t d) {
    return MutableTensorView(buffer + at, DType::i8, {1, 1, rows, d}, {0, 0, row, 1});
  };
  const auto scale = [&](int64_t at) {
    return MutableTensorView(buffer + at, DType::f32, {1, 1, rows, 1}, {0, 0, row / 4, 1});
  };
  const Tensor k_new = filled(DType::f32, {1, 1, 2, 8}, [](int64_t i) { return static_cast<float>(i); });
  const Tensor v_new = filled(DType::f32, {1, 1, 2, 4}, [](int64_t i) { return static_cast<float>(i + 1); });
  const Tensor before = ints({3});
  AppendArgs args = {k_new.view(),
                     v_new.view(),
                     KvCache::strided(bytes(0, 8), bytes(12, 4)).quantized(scale(8), scale(16)),
                     before.view(),
                     {}};
  append_kv(args);
  for (int64_t i = 0; i < rows * row; ++i)
    if (i / row != 3 && i / row != 4) REQUIRE(buffer[i] == 0xb5);
  for (int64_t t = 0; t < 2; ++t) {
    const std::uint8_t* const at = buffer + (3 + t) * row;
    float s = 0;
    std::memcpy(&s, at + 16, 4);
    CHECK(s == Approx((4 * t + 4) / 127.f));
    CHECK(at[12 + 3] == 127);
    CHECK(at[7] == 127);
  }
  args.cache.v = bytes(10, 4);  // over k's scale
  CHECK(refused_argument([&] { append_kv(args); }) == "cache.v");
}

TEST_CASE("append: nothing to append writes nothing", "[unit]") {
  Tensor k = make(DType::f32, {2, 1, 3, 4}), v = make(DType::f32, {2, 1, 3, 4}), full = ints({3, 3});
  const std::vector<std::byte> untouched = bytes_of(k);
  const KvCache cache = KvCache::strided(k.mutable_view(), v.mutable_view());
  const TensorView none(nullptr, DType::f32, {2, 1, 0, 4});
  append_kv({none, none, cache, full.view(), {}});
  const Tensor starts = ints({0, 0, 0});
  const TensorView no_rows(nullptr, DType::f32, {0, 1, 4});
  append_kv({no_rows, no_rows, cache, full.view(), starts.view()});
  CHECK(bytes_of(k) == untouched);
  CHECK(bytes_of(v) == untouched);
}
