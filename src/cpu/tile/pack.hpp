// Packs Q with rows in the lanes, and packs rows of K or V that are not fp32, or not contiguous, into contiguous fp32.
#pragma once

#include "cpu/tile/head.hpp"

namespace rapt::cpu::RAPT_ISA {

// Transposes the query block's rows of a tensor with one row of n elements per query (q, dout) into dst [n][width].
template <class T>
[[gnu::noinline]] void pack_rows(const T* base, const Strides& strides, std::int64_t n, const Head& head,
                                 const QueryBlock& q_block, float* dst) {
  const std::int64_t inner = strides.d;
  const auto at = places_of_rows(strides, head);
  for (std::int64_t lane = 0; lane < q_block.width; lane += kLanes) {
    const T* src[kLanes];
    for (int i = 0; i < kLanes; ++i) src[i] = base + at(q_block.row[lane + i]);
    for (std::int64_t c0 = 0; c0 < n; c0 += kLanes) {
      const std::int64_t count = min(kLanes, n - c0);
      vec r[kLanes];
      if (inner == 1 && count == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) r[i] = load_any(src[i] + c0);
      } else {
        for (int i = 0; i < kLanes; ++i) r[i] = load_repeated(src[i] + c0 * inner, inner, count);
      }
      transpose(r);
      float* to = dst + c0 * q_block.width + lane;
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j, to += q_block.width)
        if (j < count) store(to, r[j]);
    }
  }
}

// A row of n elements, `inner` units apart -> fp32, padded with zeros to whole vectors.
template <class T>
[[gnu::always_inline]] inline void pack_row(const T* src, std::int64_t inner, std::int64_t n, float* dst) {
  constexpr std::int64_t kUnits = kLanes / kPerUnit<T>;
  const std::int64_t whole = inner == 1 ? n / kLanes * kLanes : 0;
  for (std::int64_t i = 0; i < whole; i += kLanes) store(dst + i, load_any(src + i / kPerUnit<T>));
  for (std::int64_t i = whole; i < n; i += kLanes)
    store(dst + i,
          load_strided(src + i / kPerUnit<T> * inner, inner, min(kUnits, (n - i + kPerUnit<T> - 1) / kPerUnit<T>)));
}

// Dequantises a row in place. `scale_at` and `zero_at` are the indices of the row's first scale and zero.
inline void dequantize_row(const Quantization& quant, std::int64_t scale_at, std::int64_t zero_at, std::int64_t n,
                           float* row) {
  for (std::int64_t i = 0, group = 0; i < n; ++group) {
    const float scale = quant.scale ? quant.scale[scale_at + group * quant.scale_stride.d] : 1.f;
    const float zero = quant.zero ? quant.zero[zero_at + group * quant.zero_stride.d] : 0.f;
    const std::int64_t end = i + quant.group;
    if (quant.group % kLanes == 0)
      for (; i < end; i += kLanes) store(row + i, (load(row + i) - vec(zero)) * vec(scale));
    for (; i < end; ++i) row[i] = (row[i] - zero) * scale;
  }
}

// A row of f8e4m3 queries, times its scale -> fp32, padded with zeros to whole vectors.
[[gnu::noinline]] inline void pack_coded_query(const Head& head, const Row& row, float* dst) {
  const AttentionParams& p = head.p;
  pack_row(static_cast<const e4m3*>(p.q) + row_at(p.q_stride, head, row), p.q_stride.d, p.d, dst);
  if (p.q_scale)
    dequantize_row({p.q_scale, nullptr, p.q_scale_stride, {}, p.d}, row_at(p.q_scale_stride, head, row), 0, p.d, dst);
}
// Q^T of a query block of f8e4m3 rows, times their scales.
[[gnu::noinline]] inline void pack_coded_queries(const Head& head, const QueryBlock& q_block) {
  const AttentionParams& p = head.p;
  pack_rows(static_cast<const e4m3*>(p.q), p.q_stride, p.d, head, q_block, q_block.qt);
  for (std::int64_t lane = 0; p.q_scale && lane < q_block.width; lane += kLanes) {
    alignas(64) float scales[kLanes];
    for (int i = 0; i < kLanes; ++i) scales[i] = p.q_scale[row_at(p.q_scale_stride, head, q_block.row[lane + i])];
    const vec scale = load(scales);
    for (float *q = q_block.qt + lane, *const end = q + p.d * q_block.width; q != end; q += q_block.width)
      store(q, load(q) * scale);
  }
}

// The rows of k or v that pack_keys() reads.
struct KeyRows {
  const void* base;
  const Strides& strides;
  const Quantization& quant;
  std::int64_t n;                 // elements
  const KeyTail* tail = nullptr;  // the last elements of each row, if they are in a tensor of their own; else null
};
inline KeyRows keys_of(const AttentionParams& p) {
  return {p.k, p.k_stride, p.k_quant, p.d, p.k_tail.size > 0 ? &p.k_tail : nullptr};
}
inline KeyRows values_of(const AttentionParams& p) {
  return {p.v, p.v_stride, p.v_quant, p.dv};
}
// Whether a packed row of k begins with the row of v: values are a prefix of keys, and both are dequantised alike.
inline bool keys_begin_with_values(const AttentionParams& p) {
  const auto same = [](const Strides& a, const Strides& b) {
    return a.b == b.b && a.h == b.h && a.s == b.s && a.d == b.d;
  };
  const Quantization &k = p.k_quant, &v = p.v_quant;
  if (!values_in_keys(p) || k.scale != v.scale || k.zero != v.zero) return false;
  return (!k.scale || (k.group == v.group && same(k.scale_stride, v.scale_stride))) &&
         (!k.zero || same(k.zero_stride, v.zero_stride));
}

// The tail of a key, whose index is `at`, -> fp32. `dst` may be unaligned and need not have room for whole vectors.
[[gnu::noinline]] inline void pack_tail(const KeyTail& tail, std::int64_t at, float* dst) {
  with_float_type(tail.type, [&](auto element) {
    const auto* src = static_cast<const decltype(element)*>(tail.data) + at;
    for (std::int64_t i = 0; i < tail.size; i += kLanes) {
      const std::int64_t n = min(kLanes, tail.size - i);
      store_strided(dst + i, 1, n, load_strided(src + i * tail.stride.d, tail.stride.d, n));
    }
  });
}

// Transposes rows that are innermost in memory (rows 1 apart, elements `inner` apart) into contiguous rows of
// `dst_stride` floats, a multiple of kLanes, padded with zeros to whole vectors.
template <class T>
[[gnu::noinline]] void pack_columns(const T* src, std::int64_t inner, std::int64_t rows, std::int64_t n, float* dst,
                                    std::int64_t dst_stride) {
  for (std::int64_t r0 = 0; r0 < rows; r0 += kLanes) {
    const std::int64_t nr = min(kLanes, rows - r0);
    for (std::int64_t j0 = 0; j0 < n; j0 += kLanes) {
      vec t[kLanes];
      for (int j = 0; j < kLanes; ++j) t[j] = j0 + j < n ? load_first(src + r0 + (j0 + j) * inner, nr) : vec(0.f);
      transpose(t);
      for (std::int64_t r = 0; r < nr; ++r) store(dst + (r0 + r) * dst_stride + j0, t[r]);
    }
  }
}

// Whether the rows lie as pack_columns() takes them.
inline bool are_columns(const Head& head, const KeyRows& rows) {
  const bool plain = !rows.tail && head.p.page_size == 0 && (set_of(head.p.kv_type) & kFloatTypes) != 0;
  return plain && rows.strides.s == 1 && rows.strides.d != 1;
}

// Packs rows [j, j + rows). `dst_stride` is a multiple of kLanes.
[[gnu::noinline]] inline void pack_keys(const Head& head, const KeyRows& from, std::int64_t j, std::int64_t rows,
                                        float* dst, std::int64_t dst_stride, bool dequantize = true) {
  const Quantization& quant = from.quant;
  if (are_columns(head, from))
    return with_float_type(head.p.kv_type, [&](auto element) {
      const auto* src = static_cast<const decltype(element)*>(from.base) + head.key_at(from.strides, j);
      pack_columns(src, from.strides.d, rows, from.n, dst, dst_stride);
    });
  const std::int64_t n =
      from.tail ? from.n - from.tail->size : from.n;  // columns in the cache's type; the others are the tail
  with_cache_type(head.p.kv_type, [&](auto unit) {
    const auto* base = static_cast<const decltype(unit)*>(from.base);
    if (!from.tail && !(quant.scale && dequantize))
      return head.for_each_run(
          from.strides, j, rows,
          [&, s = from.strides.s, d = from.strides.d, to = dst, step = dst_stride](auto r, auto end, auto at) {
            if constexpr (kPerUnit<decltype(unit)> == 1)
              if (d == 1 && n < kLanes)
                for (; r < end; ++r, at += s) store(to + r * step, load_first(base + at, n));
            for (; r < end; ++r, at += s) pack_row(base + at, d, n, to + r * step);
          });
    for (std::int64_t r = 0; r < rows; ++r, dst += dst_stride) {
      if (from.tail) store(dst + (from.n - 1) / kLanes * kLanes, vec(0.f));  // past the last column
      pack_row(base + head.key_at(from.strides, j + r), from.strides.d, n, dst);
      if (quant.scale && dequantize)
        dequantize_row(quant, head.key_at(quant.scale_stride, j + r), head.key_at(quant.zero_stride, j + r), n, dst);
      if (from.tail) pack_tail(*from.tail, head.key_at(from.tail->stride, j + r), dst + n);
    }
  });
}

}  // namespace rapt::cpu::RAPT_ISA
