// New rows of k and v to a cache, rounded or quantised to the same bits as on CPUs: a warp for each head of a row.
#pragma once

#include "cuda/tile/head.cuh"
#include "operations/append_kv/params.hpp"
#include "semantics/coding.hpp"

namespace rapt::cuda {

// The offsets of a row of one head: in the source, in the cache, and of its scales and zeros.
struct RowPlace {
  std::int64_t from, to, scale, zero;
};

// The sequence of new row r, for starts that rise.
__device__ inline std::int64_t sequence_with(const AppendKvParams& p, std::int64_t r) {
  if (!p.from_begin) return r / p.n;
  std::int64_t low = 0, high = p.b;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (p.from_begin[middle] <= r ? low : high) = middle;
  }
  return low;
}

// Finds new row r of a head. False: it has no place in the cache.
__device__ inline bool find_row(const AppendKvParams& p, const AppendKvSide& s, std::int64_t r, std::int64_t h,
                                RowPlace& at) {
  constexpr std::int64_t kMaxKeys = std::int64_t{1} << 52;
  const std::int64_t i = sequence_with(p, r), first = p.from_begin ? p.from_begin[i] : i * p.n;
  const std::int64_t count = p.from_begin ? p.from_begin[i + 1] - first : p.n, t = r - first;
  const std::int64_t before = p.len_before[i], j = before + t;
  if (t < 0 || t >= count || before < 0 || before > kMaxKeys || p.room == 0) return false;
  if (t < first_kept(p, count) || (!p.ring && j >= p.room)) return false;
  if (p.page_size > 0 && !p.ring) {
    const std::int64_t page = p.pages.element(i * p.pages_stride_b + j / p.page_size * p.pages.stride);
    if (page < 0 || page >= p.page_count) return false;
  }
  const auto in_cache = [&](const Strides& stride) { return key_index(p, stride, i, h, 0, j); };
  at.from = h * s.from_stride.h + (p.from_begin ? r * s.from_stride.s : i * s.from_stride.b + t * s.from_stride.s);
  at.to = in_cache(s.to_stride), at.scale = in_cache(s.scale_stride), at.zero = in_cache(s.zero_stride);
  return true;
}

template <class T>
__device__ void copy_row(const AppendKvSide& s, const RowPlace& at) {
  const T* const from = static_cast<const T*>(s.from) + at.from;
  T* const to = static_cast<T*>(s.to) + at.to;
  for (std::int64_t c = threadIdx.x % 32; c < s.size; c += 32) to[c * s.to_stride.d] = from[c * s.from_stride.d];
}

// Writes numbers [begin, begin + s.group) of a row as codes; number(c) is one of them.
template <class Number>
__device__ void write_group(const AppendKvSide& s, const RowPlace& at, std::int64_t begin, std::int64_t group,
                            const Number& number) {
  const int lane = threadIdx.x % 32;
  const std::int64_t end = begin + s.group;
  float* const scale = s.scale ? s.scale + at.scale + group * s.scale_stride.d : nullptr;
  float* const zero = s.zero ? s.zero + at.zero + group * s.zero_stride.d : nullptr;
  Coding coding;
  if (s.computes_scale) {
    Extent extent{kInfinity, -kInfinity, true};
    for (std::int64_t c = begin + lane; c < end; c += 32) {
      const float x = number(c);
      if (!(abs_of(x) < kInfinity)) extent.finite = false;
      else extent.low = fminf(extent.low, x), extent.high = fmaxf(extent.high, x);
    }
    for (int bit = 16; bit > 0; bit /= 2) {
      extent.low = fminf(extent.low, __shfl_xor_sync(~0u, extent.low, bit));
      extent.high = fmaxf(extent.high, __shfl_xor_sync(~0u, extent.high, bit));
    }
    extent.finite = __all_sync(~0u, extent.finite);
    coding = coding_of(s.to_type, extent, zero != nullptr);
    if (lane == 0) {
      *scale = coding.scale;
      if (zero) *zero = coding.zero;
    }
  } else {
    if (scale) coding.scale = *scale;
    if (zero) coding.zero = *zero;
  }
  const double factor = 1 / static_cast<double>(coding.scale), half = half_range(s.to_type);
  const auto code = [&](std::int64_t c) -> std::uint8_t {
    const float x = number(c);
    std::uint8_t fp8 = 0;
    if (with_dtype<kFp8Types>(s.to_type, [&](auto type) { fp8 = float_code<Fp8<type.value>>(x, factor); })) return fp8;
    return integer_code(x, factor, static_cast<double>(coding.zero), half);
  };
  auto* const to = static_cast<std::uint8_t*>(s.to) + at.to;
  if (s.to_type == DType::i4x2) {
    for (std::int64_t c = begin / 2 + lane; c < end / 2; c += 32)
      to[c * s.to_stride.d] = static_cast<std::uint8_t>((code(2 * c) & 0xf) | code(2 * c + 1) << 4);
  } else {
    for (std::int64_t c = begin + lane; c < end; c += 32) to[c * s.to_stride.d] = code(c);
  }
}

// A row to the cache, from its numbers; the whole warp calls this.
template <class Number>
__device__ void write_numbers(const AppendKvSide& s, const RowPlace& at, const Number& number) {
  if (s.to_type == DType::f32 || s.to_type == DType::bf16 || s.to_type == DType::f16) {
    for (std::int64_t c = threadIdx.x % 32; c < s.size; c += 32)
      store(s.to, s.to_type, at.to + c * s.to_stride.d, number(c));
    return;
  }
  for (std::int64_t begin = 0, group = 0; begin < s.size; begin += s.group, ++group)
    write_group(s, at, begin, group, number);
}
// The same of a row of the call.
__device__ inline void write_row(const AppendKvSide& s, const RowPlace& at) {
  if (s.from_type != s.to_type)
    return write_numbers(s, at,
                         [&](std::int64_t c) { return load(s.from, s.from_type, at.from + c * s.from_stride.d); });
  if (s.to_type == DType::f32) copy_row<std::uint32_t>(s, at);
  else copy_row<std::uint16_t>(s, at);
}

}  // namespace rapt::cuda
