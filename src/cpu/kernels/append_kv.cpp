// append_kv: new rows of k and v -> rows of the cache, copied, rounded or quantised. Codes are computed in float64, so
// that x / scale + zero is rounded once.
#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/carver.hpp"
#include "cpu/tile/pack.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// x is stored as the number nearest to x / scale + zero.
struct Coding {
  float scale = 1, zero = 0;
};

// The integers from -half_range to half_range - 1.
double half_range(DType integers) {
  return integers == DType::i8 ? 128 : 8;
}

// An 8-bit float of kFraction bits after the leading one; codes without the sign.
template <int kFraction_, int kBias_, std::uint32_t kMaxFinite_, std::uint32_t kInf_, std::uint32_t kNan_>
struct Float8 {
  static constexpr int kFraction = kFraction_, kBias = kBias_;
  static constexpr std::uint32_t kMaxFinite = kMaxFinite_, kInf = kInf_, kNan = kNan_;
  static constexpr float kLargest = kFraction == 3 ? 448.f : 57344.f;

  // The code nearest to x, ties to the even one, at most kMaxFinite. Without branches, so that compilers make vectors
  // of it.
  [[gnu::always_inline]] static std::uint8_t nearest(float x) {
    constexpr std::uint32_t kShift = 23 - kFraction, kMinExponent = 128 - kBias;  // of f32's field, of normal numbers
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    const std::uint32_t size = bits & 0x7fffffff, exponent = size >> 23;
    const bool denormal = exponent < kMinExponent;
    const std::uint32_t below = kShift + kMinExponent - exponent;
    const std::uint32_t shift = !denormal ? kShift : below < 25 ? below : 25;  // past that nothing is left of 24 bits
    const std::uint32_t value = denormal ? (size & 0x7fffff) | 0x800000 : size - ((127u - kBias) << 23);
    const std::uint32_t code = (value + (1u << (shift - 1)) - 1 + (value >> shift & 1)) >> shift;
    const std::uint32_t finite = code < kMaxFinite ? code : kMaxFinite;
    const std::uint32_t any = size > 0x7f800000 ? kNan : size == 0x7f800000 ? kInf : finite;
    return static_cast<std::uint8_t>((bits >> 24 & 0x80) | any);
  }
};
using E4m3 = Float8<3, 7, 0x7e, 0x7f, 0x7f>;
using E5m2 = Float8<2, 15, 0x7b, 0x7c, 0x7e>;

struct Extent {
  float low, high;
  bool finite;  // all of them are; else low and high are of those that are
};
Extent extent_of(const float* x, std::int64_t n) {
  vec low(kInfinity), high(-kInfinity), finite(0.f);
  const auto see = [&](vec y) __attribute__((always_inline)) {
    const auto is_finite = xsimd::abs(y) < vec(kInfinity);
    low = xsimd::min(low, xsimd::select(is_finite, y, vec(kInfinity)));
    high = xsimd::max(high, xsimd::select(is_finite, y, vec(-kInfinity)));
    finite = finite + xsimd::select(is_finite, vec(0.f), vec(1.f));
  };
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) see(load_any(x + i));
  if (i < n) {  // the last ones, and the first again in their place
    alignas(64) float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < n ? x[i + lane] : x[i];
    see(load(rest));
  }
  alignas(64) float lows[kLanes], highs[kLanes], others[kLanes];
  store(lows, low), store(highs, high), store(others, finite);
  Extent all{lows[0], highs[0], others[0] == 0};
  for (int lane = 1; lane < kLanes; ++lane) {
    all.low = lows[lane] < all.low ? lows[lane] : all.low;
    all.high = highs[lane] > all.high ? highs[lane] : all.high;
    all.finite = all.finite && others[lane] == 0;
  }
  return all;
}

// Maps `range` onto so many steps.
float scale_for(double range, double steps) {
  const auto scale = static_cast<float>(range / steps);
  return range == 0 ? 1 : scale > __FLT_MIN__ ? scale : __FLT_MIN__;
}

Coding coding_of(DType dtype, const float* x, std::int64_t n, bool with_zero) {
  const Extent extent = extent_of(x, n);
  const auto low = static_cast<double>(extent.low), high = static_cast<double>(extent.high);
  const double largest = -low > high ? -low : high;  // -inf: no number is finite
  if (dtype == DType::f8e4m3 || dtype == DType::f8e5m2) {
    const float end = dtype == DType::f8e4m3 ? E4m3::kLargest : E5m2::kLargest;
    return {scale_for(largest > 0 ? largest : 0, static_cast<double>(end)), 0};
  }
  if (!extent.finite) return {__builtin_nanf(""), 0};
  const double half = half_range(dtype);
  if (!with_zero || largest == 0) return {scale_for(largest, half - 1), 0};
  // Of a group whose numbers differ little, zero would grow until (code - zero) loses its digits.
  const double step = (high - low) / (2 * half - 1), min_step = largest * 0x1p-20;
  const float scale = scale_for(step > min_step ? step : min_step, 1);
  return {scale, static_cast<float>(-half - low / static_cast<double>(scale))};
}

template <class F8>
void encode_floats(const float* x, std::int64_t n, double factor, std::uint8_t* codes) {
  constexpr auto kLargest = static_cast<double>(F8::kLargest);
  for (std::int64_t i = 0; i < n; ++i) {
    const double y = static_cast<double>(x[i]) * factor, above = y > -kLargest ? y : -kLargest;
    const double inside = above < kLargest ? above : kLargest;
    codes[i] = F8::nearest(abs_of(x[i]) < kInfinity ? static_cast<float>(inside) : x[i]);
  }
}

void encode(DType dtype, const float* x, std::int64_t n, Coding coding, std::uint8_t* codes) {
  const double factor = 1 / static_cast<double>(coding.scale), zero = static_cast<double>(coding.zero);
  if (dtype == DType::f8e4m3) return encode_floats<E4m3>(x, n, factor, codes);
  if (dtype == DType::f8e5m2) return encode_floats<E5m2>(x, n, factor, codes);
  const double half = half_range(dtype);  // where the scale is NaN any code will do
  constexpr double kRounder = 0x1.8p52;   // numbers of this size are whole
  for (std::int64_t i = 0; i < n; ++i) {
    const double y = static_cast<double>(x[i]) * factor + zero, above = y > -half ? y : -half;
    const double inside = above < half - 1 ? above : half - 1;
    codes[i] = static_cast<std::uint8_t>(static_cast<int>(inside + kRounder - kRounder));
  }
}

struct Scratch {
  float* row;
  std::uint8_t* codes;

  Scratch(Carver& carver, std::int64_t size) {
    row = carver.take<float>(round_up(size, kLanes));
    codes = carver.take<std::uint8_t>(size);
  }
};

// Where a row of one head comes from and goes to, as indices.
struct RowPlace {
  std::int64_t from, to, scale, zero;
};

template <class T>
void copy_row(const AppendKvSide& s, const void* from, void* to, const RowPlace& at) {
  const T* const source = static_cast<const T*>(from) + at.from;
  T* const target = static_cast<T*>(to) + at.to;
  if (s.from_stride.d == 1 && s.to_stride.d == 1) {
    __builtin_memcpy(target, source, static_cast<std::size_t>(s.size) * sizeof(T));
    return;
  }
  for (std::int64_t c = 0; c < s.size; ++c) target[c * s.to_stride.d] = source[c * s.from_stride.d];
}

void store_codes(const AppendKvSide& s, const std::uint8_t* codes, std::uint8_t* to) {
  const std::int64_t step = s.to_stride.d;
  if (s.to_type == DType::i4x2) {
    for (std::int64_t c = 0; c < s.size / 2; ++c)
      to[c * step] = static_cast<std::uint8_t>((codes[2 * c] & 0xf) | codes[2 * c + 1] << 4);
  } else if (step == 1) {
    __builtin_memcpy(to, codes, static_cast<std::size_t>(s.size));
  } else {
    for (std::int64_t c = 0; c < s.size; ++c) to[c * step] = codes[c];
  }
}

void write_row(const AppendKvSide& s, const RowPlace& at, const Scratch& w) {
  if (s.from_type == s.to_type)
    return s.to_type == DType::f32 ? copy_row<float>(s, s.from, s.to, at)
                                   : copy_row<std::uint16_t>(s, s.from, s.to, at);
  with_float_type(s.from_type, [&](auto element) {
    pack_row(static_cast<const decltype(element)*>(s.from) + at.from, s.from_stride.d, s.size, w.row);
  });
  if (only(s.to_type) & kFloatTypes) {
    with_float_type(s.to_type, [&](auto element) {
      auto* const to = static_cast<decltype(element)*>(s.to) + at.to;
      for (std::int64_t c = 0; c < s.size; c += kLanes)
        store_strided(to + c * s.to_stride.d, s.to_stride.d, min(kLanes, s.size - c), load(w.row + c));
    });
    return;
  }
  for (std::int64_t first = 0, group = 0; first < s.size; first += s.group, ++group) {
    float* const scale = s.scale ? s.scale + at.scale + group * s.scale_stride.d : nullptr;
    float* const zero = s.zero ? s.zero + at.zero + group * s.zero_stride.d : nullptr;
    Coding coding;
    if (s.computes_scale) {
      coding = coding_of(s.to_type, w.row + first, s.group, zero != nullptr);
      *scale = coding.scale;
      if (zero) *zero = coding.zero;
    } else {
      if (scale) coding.scale = *scale;
      if (zero) coding.zero = *zero;
    }
    encode(s.to_type, w.row + first, s.group, coding, w.codes + first);
  }
  store_codes(s, w.codes, static_cast<std::uint8_t*>(s.to) + at.to);
}

// The sequence that new row r, counted over all of them, belongs to.
std::int64_t sequence_with(const AppendKvParams& p, std::int64_t r) {
  if (!p.from_begin) return r / p.n;
  std::int64_t low = 0, high = p.b;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (p.from_begin[middle] <= r ? low : high) = middle;
  }
  return low;
}

void run(const AppendKvParams& p, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  Carver carver(scratch);
  std::int64_t size = 0;
  for (int side = 0; side < p.sides; ++side) size = max(size, p.side[side].size);
  const Scratch w(carver, size);
  for (std::int64_t r = begin, i = sequence_with(p, begin); r < end; ++i) {
    const NewRows rows = new_rows(p, i);
    const std::int64_t before = p.from_begin ? rows.first : i * p.n, last = min(end, before + rows.count);
    for (; r < last; ++r) {
      const std::int64_t t = r - before, j = p.len_before[i] + t;
      if (p.ring && t < rows.count - p.page_size) continue;  // of more rows than the ring has, the last stay
      for (int side = 0; side < p.sides; ++side) {
        const AppendKvSide& s = p.side[side];
        for (std::int64_t h = 0; h < p.hk; ++h) {
          const auto in_cache = [&](const Strides& stride) { return key_index(p, stride, i, h, 0, j); };
          const std::int64_t from = i * s.from_stride.b + h * s.from_stride.h + (rows.first + t) * s.from_stride.s;
          write_row(s, {from, in_cache(s.to_stride), in_cache(s.scale_stride), in_cache(s.zero_stride)}, w);
        }
      }
    }
  }
}

}  // namespace

const AppendKvKernel kAppendKv = {
    .facts = {.operation = Operation::append_kv, .phase = Phase::all, .arithmetic = "f64", .dtypes = kCacheTypes},
    .scratch_bytes = carved_bytes<Scratch>,
    .run = run};

}  // namespace rapt::cpu::RAPT_ISA
