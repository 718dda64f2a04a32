// Rows of k or v -> rows of a cache: copied, rounded or quantised. Rows are short: what loops over them inlines this.
#pragma once

#include "cpu/tile/pack.hpp"
#include "operations/append_kv/params.hpp"
#include "semantics/coding.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

Extent extent_of(const float* x, std::int64_t n) {
  vec low(kInfinity), high(-kInfinity), others(0.f);  // others: how many are not finite
  const auto see = [&](vec y) __attribute__((always_inline)) {
    const auto is_finite = xsimd::abs(y) < vec(kInfinity);
    low = xsimd::min(low, xsimd::select(is_finite, y, vec(kInfinity)));
    high = xsimd::max(high, xsimd::select(is_finite, y, vec(-kInfinity)));
    others = others + xsimd::select(is_finite, vec(0.f), vec(1.f));
  };
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) see(load_any(x + i));
  if (i < n) {  // the last elements; x[i] fills the other lanes, which changes no extent
    alignas(64) float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < n ? x[i + lane] : x[i];
    see(load(rest));
  }
  low = over_period(low, 1, [](vec a, vec b) { return xsimd::min(a, b); });
  high = over_period(high, 1, [](vec a, vec b) { return xsimd::max(a, b); });
  alignas(64) float lows[kLanes], highs[kLanes];
  store(lows, low), store(highs, high);
  return {lows[0], highs[0], !xsimd::any(others > vec(0.f))};
}

void encode(DType dtype, const float* x, std::int64_t n, Coding coding, std::uint8_t* codes) {
  const double factor = 1 / static_cast<double>(coding.scale), zero = static_cast<double>(coding.zero);
  const double half = half_range(dtype);
  const auto encode_floats = [&](auto type) {
    for (std::int64_t i = 0; i < n; ++i) codes[i] = float_code<Fp8<type.value>>(x[i], factor);
  };
  if (with_dtype<kFp8Types>(dtype, encode_floats)) return;
  for (std::int64_t i = 0; i < n; ++i) codes[i] = integer_code(x[i], factor, zero, half);
}

// Indices of a row of one head: its source, its place in the cache, its scale and zero.
struct RowIndices {
  std::int64_t from, to, scale, zero;
};

template <class T>
void copy_row(const AppendKvSide& s, const void* from, void* to, const RowIndices& at) {
  const T* const source = static_cast<const T*>(from) + at.from;
  T* const target = static_cast<T*>(to) + at.to;
  if (s.from_stride.d == 1 && s.to_stride.d == 1) {
    __builtin_memcpy(target, source, static_cast<std::size_t>(s.size) * sizeof(T));
    return;
  }
  for (std::int64_t c = 0; c < s.size; ++c) target[c * s.to_stride.d] = source[c * s.from_stride.d];
}

void store_codes(const AppendKvSide& s, const std::uint8_t* codes, std::uint8_t* to) {
  const std::int64_t stride = s.to_stride.d;
  if (s.to_type == DType::i4x2) {
    for (std::int64_t c = 0; c < s.size / 2; ++c)
      to[c * stride] = static_cast<std::uint8_t>((codes[2 * c] & 0xf) | codes[2 * c + 1] << 4);
  } else if (stride == 1) {
    __builtin_memcpy(to, codes, static_cast<std::size_t>(s.size));
  } else {
    for (std::int64_t c = 0; c < s.size; ++c) to[c * stride] = codes[c];
  }
}

// Numbers of a row to the cache. `row` may be unaligned and has whole vectors; `codes` is scratch for as many bytes.
[[gnu::always_inline]] inline void write_numbers(const AppendKvSide& s, const float* row, const RowIndices& at,
                                                 std::uint8_t* codes) {
  if (set_of(s.to_type) & kFloatTypes) {
    with_float_type(s.to_type, [&](auto element) {
      auto* const to = static_cast<decltype(element)*>(s.to) + at.to;
      for (std::int64_t c = 0; c < s.size; c += kLanes)
        store_strided(to + c * s.to_stride.d, s.to_stride.d, min(kLanes, s.size - c), load_any(row + c));
    });
    return;
  }
  for (std::int64_t first = 0, group = 0; first < s.size; first += s.group, ++group) {
    float* const scale = s.scale ? s.scale + at.scale + group * s.scale_stride.d : nullptr;
    float* const zero = s.zero ? s.zero + at.zero + group * s.zero_stride.d : nullptr;
    Coding coding;
    if (s.computes_scale) {
      coding = coding_of(s.to_type, extent_of(row + first, s.group), zero != nullptr);
      *scale = coding.scale;
      if (zero) *zero = coding.zero;
    } else {
      if (scale) coding.scale = *scale;
      if (zero) coding.zero = *zero;
    }
    encode(s.to_type, row + first, s.group, coding, codes + first);
  }
  store_codes(s, codes, static_cast<std::uint8_t*>(s.to) + at.to);
}

// A row of the call to the cache; `row` is scratch for its numbers.
[[gnu::always_inline]] inline void write_row(const AppendKvSide& s, const RowIndices& at, float* row,
                                             std::uint8_t* codes) {
  if (s.from_type == s.to_type)
    return s.to_type == DType::f32 ? copy_row<float>(s, s.from, s.to, at)
                                   : copy_row<std::uint16_t>(s, s.from, s.to, at);
  with_float_type(s.from_type, [&](auto element) {
    pack_row(static_cast<const decltype(element)*>(s.from) + at.from, s.from_stride.d, s.size, row);
  });
  write_numbers(s, row, at, codes);
}

// Where key j of sequence i is, of head h; `from` is the row's index in the call's tensor.
[[gnu::always_inline]] inline RowIndices places_of_key(const AppendKvParams& p, const AppendKvSide& s, std::int64_t i,
                                                       std::int64_t h, std::int64_t j, std::int64_t from) {
  const auto in_cache = [&](const Strides& stride) { return key_index(p, stride, i, h, 0, j); };
  return {from, in_cache(s.to_stride), in_cache(s.scale_stride), in_cache(s.zero_stride)};
}

// The sequence of new row r, where new rows are counted over all sequences.
std::int64_t sequence_with(const AppendKvParams& p, std::int64_t r) {
  if (!p.from_begin) return r / p.n;
  std::int64_t low = 0, high = p.b;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (p.from_begin[middle] <= r ? low : high) = middle;
  }
  return low;
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
