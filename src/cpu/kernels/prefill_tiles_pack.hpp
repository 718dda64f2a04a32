// Part of attention_prefill_tiles.cpp: splits Q, K and V into components, and packs these into tiles.
#pragma once

#include "cpu/kernels/prefill_tiles_fallback.hpp"
#include "cpu/kernels/prefill_tiles_scores.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Packs Q of one query block.
template <int kComponents>
void pack_queries(PrefillItem<kComponents>& item, std::int64_t i) {
  const AttentionParams& p = item.p;
  const QueryBlock& q_block = item.q_blocks[i];
  const std::int64_t d = item.w.d, component = kRows * d;
  const ComponentRows rows = with_float_type(p.q_type, [&](auto type) {
    const auto* q = static_cast<const decltype(type)*>(p.q);
    const auto row_of = [q, at = places_of_rows(p.q_stride, item.head), row = q_block.row](std::int64_t r) {
      return q + at(row[r]);
    };
    return split_rows<kComponents, RepresentableFactor<kComponents>>(row_of, p.q_stride.d, q_block.rows, p.d, d,
                                                                     item.w.rows, component, InPlace::in_parts);
  });
  item.fallback[i] |= rows.not_representable;
  for (int c = 0; c < kComponents; ++c) tile_queries(rows, c * component, p.d, d, item.q_tiles(i) + c * component * 2);
}

// Makes the query blocks, of 32 rows each, with no key seen yet.
template <int kComponents>
void make_query_blocks(PrefillItem<kComponents>& item) {
  const auto& w = item.w.q_blocks;
  const std::int64_t dv = item.w.dv, row_end = min(item.item.row_end, item.head.len_q * item.p.group);
  for (std::int64_t r = item.item.row_begin; r < row_end; r += kRows, ++item.count) {
    const std::int64_t at = item.count * kRows;
    QueryBlock& q_block = item.q_blocks[item.count];
    q_block.vecs = kVecsOfRow, q_block.width = kRows, q_block.rows = min(kRows, row_end - r);
    q_block.row = w.row + at, q_block.ot = w.ot + at * dv, q_block.ot_accum = w.ot_accum + at * dv;
    q_block.neg_m = w.neg_m + at, q_block.l = w.l + at, q_block.l_compensation = w.l_compensation + at;
    q_block.partial = item.partial_result(r);
    find_rows(item.head, r, q_block.rows, q_block.row);
    for (std::int64_t i = q_block.rows; i < kRows; ++i) q_block.row[i] = q_block.row[q_block.rows - 1];
    reset(item.head, q_block);
    for (int i = 0; i < kVecsOfRow; ++i) {
      raise_m(q_block, i * kLanes, vec(Exponentials<kComponents>::kHeadroom));
      item.large_m[item.count] |= xsimd::any(m_is_large(q_block, i));  // a sink may be
    }
    pack_queries(item, item.count);
    const bool usable_scale = __builtin_fabsf(item.p.score.scale_log2) < 0x1p60f;
    if (!usable_scale) item.fallback[item.count] |= item.all_rows(item.count);
  }
}

// Whether 32 keys from `key` on, whose rows begin at `row`, are adjacent in whole cache lines. (Rows apart from each
// other, as in [b, s, h, d], would map a packed range to few cache sets.)
template <int kComponents>
bool are_lines(const PrefillItem<kComponents>& item, const void* row, std::int64_t key) {
  return item.p.k_stride.s == item.w.d && reinterpret_cast<std::uintptr_t>(row) % 64 == 0 &&
         item.head.is_contiguous(key, kTileDepth);
}

// Whether each row is split into components once, for both K and V.
inline bool are_split_together(const AttentionParams& p) {
  return values_in_keys(p) && p.dv % kChunk == 0;
}

// Calls f(T()) for the types that keys may have here. One component takes quantised ones too.
template <int kComponents, class F>
auto with_type_of_keys(DType dtype, const F& f) {
  if constexpr (kComponents == 1) return with_cache_type(dtype, f);
  else return with_float_type(dtype, f);
}

// Prepares to prefetch keys [first, last), the next to be packed.
template <int kComponents>
void plan_prefetch(PrefillItem<kComponents>& item, std::int64_t first, std::int64_t last) {
  const AttentionParams& p = item.p;
  const std::byte** row = item.w.prefetch_rows;
  const std::int64_t n = clamp(last - first, 0, kPrefetchKeys);
  const auto add = [&](const void* data, const Strides& stride) {
    for (std::int64_t i = 0; i < n; ++i)
      *row++ = static_cast<const std::byte*>(data) + bytes_of(p.kv_type, item.head.key_at(stride, first + i));
  };
  add(p.k, p.k_stride);
  if (!are_split_together(p)) add(p.v, p.v_stride);
  const std::int64_t bytes = bytes_of(p.kv_type, max(p.d - p.k_tail.size, p.dv));
  item.prefetcher = Prefetcher(item.w.prefetch_rows, row - item.w.prefetch_rows, bytes);
  const std::int64_t products_of_keys =
      4 * products(kComponents) * (item.w.d + item.w.dv) / kChunk * item.w.keys / kTileDepth;
  item.prefetch_lines =
      static_cast<int>(max(1, (row - item.w.prefetch_rows) * ((bytes + 63) / 64) / (products_of_keys * item.count)));
}

// Packs the scales of 32 keys from `key` on into `to`, [32][k_groups]. Only `rows` of them exist, and those before
// `first` must not be read. Returns a bit for each key with a scale that is not finite.
template <int kComponents>
std::uint32_t pack_scales(const PrefillItem<kComponents>& item, std::int64_t key, std::int64_t first, std::int64_t rows,
                          float* to) {
  const Quantization& quant = item.p.k_quant;
  std::uint32_t not_finite = 0;
  for (std::int64_t i = 0; i < kTileDepth; ++i) {
    const float* const from = quant.scale + item.head.key_at(quant.scale_stride, max(key + min(i, rows - 1), first));
    for (std::int64_t g = 0; g < item.w.k_groups; ++g) {
      const bool is_tail = item.p.k_tail.size > 0 && g + 1 == item.w.k_groups;
      const float scale = is_tail ? 1 : from[g * quant.scale_stride.d];
      const bool finite = __builtin_fabsf(scale) < kInfinity;
      *to++ = finite ? scale : 0;
      if (!finite) not_finite |= std::uint32_t{1} << i;
    }
  }
  return not_finite;
}

// Packs the tails of 32 keys, of which `rows` exist as in pack_scales(), as the last columns of `to`, [32][d]. Returns
// a bit for each key with an element that is not representable.
template <int kComponents>
std::uint32_t pack_tails(const PrefillItem<kComponents>& item, std::int64_t key, std::int64_t first, std::int64_t rows,
                         bf16* to) {
  const KeyTail& tail = item.p.k_tail;
  const std::int64_t codes = item.p.d - tail.size;
  std::uint32_t not_representable = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const bf16* const row = static_cast<const bf16*>(tail.data) + item.head.key_at(tail.stride, max(key + i, first));
    const auto split = [&](std::int64_t n, auto& check) {
      split_row<kComponents>(row, tail.stride.d, n, tail.size, to + i * item.w.d + codes, 0, check);
    };
    RepresentableCheck<RepresentableFactor<kComponents>> check;
    split(tail.size, check);
    if (!check.failed()) continue;
    not_representable |= std::uint32_t{1} << i;
    split(0, check);
  }
  return not_representable;
}

// Packs keys [first, last) of the range at `begin`: keys as components, values as tiles of components. The codes of
// quantised keys are their components; the scales multiply scores later. Quantised values are dequantised.
template <int kComponents>
void pack_key_range(PrefillItem<kComponents>& item, std::int64_t begin, std::int64_t first, std::int64_t last) {
  const AttentionParams& p = item.p;
  const Head& head = item.head;
  const auto& w = item.w;
  const bool is_prefix = are_split_together(p), shared = is_prefix && !p.v_quant.scale;
  const std::int64_t component = shared ? w.keys * w.d : kTileDepth * w.dv;
  for (std::int64_t key = first / kTileDepth * kTileDepth; key < last; key += kTileDepth) {
    const std::int64_t rows = min(kTileDepth, last - key), at = key - begin;
    // Keys before `first` must not be read, since their pages may not exist: key `first` is read in their place.
    std::int64_t k_at[kTileDepth], v_at[kTileDepth];
    const std::int64_t missing = max(first - key, 0);
    const auto rows_at = [&](const Strides& stride, std::int64_t* to) {
      head.keys_at(stride, key + missing, rows - missing, to + missing);
      for (std::int64_t i = 0; i < missing; ++i) to[i] = to[missing];
    };
    rows_at(p.k_stride, k_at), rows_at(p.v_stride, v_at);
    std::uint32_t& not_representable = w.packed_range.not_representable[at / kTileDepth];
    const ComponentRows values = with_type_of_keys<kComponents>(p.kv_type, [&](auto type) {
      const auto *k = static_cast<const decltype(type)*>(p.k), *v = static_cast<const decltype(type)*>(p.v);
      const auto k_row = [&](std::int64_t i) { return k + k_at[i]; };
      const auto v_row = [&](std::int64_t i) { return v + v_at[i]; };
      const auto split_keys = [&](auto representable) {
        return split_rows<kComponents, decltype(representable)>(
            k_row, p.k_stride.d, rows, p.d - p.k_tail.size, w.d, w.packed_range.k + at * w.d, w.keys * w.d,
            key >= first && are_lines(item, k_row(0), key) ? InPlace::whole : InPlace::no);
      };
      const ComponentRows keys = shared ? split_keys(RepresentableFactorAndValue<kComponents>())
                                        : split_keys(RepresentableFactor<kComponents>());
      w.packed_range.k_tiles[at / kTileDepth] = {reinterpret_cast<const char*>(keys.row[0]),
                                                 2 * (keys.row[1] - keys.row[0])};
      not_representable = keys.not_representable;
      if (p.k_tail.size > 0) not_representable |= pack_tails(item, key, first, rows, w.packed_range.k + at * w.d);
      if (shared) return keys;
      if (kComponents == 1 && p.v_quant.scale) {
        const auto dequantize = [&](auto code_row, std::int64_t stride) {
          const Strides& of_scales = p.v_quant.scale_stride;
          return split_rows<kComponents, RepresentableValue<kComponents>>(
              code_row, stride, rows, p.dv, w.dv, w.rows, component, InPlace::no, [&](std::int64_t i) -> GroupScales {
                return {p.v_quant.scale + head.key_at(of_scales, max(key + i, first)), of_scales.d, p.v_quant.group};
              });
        };
        if (!is_prefix) return dequantize(v_row, p.v_stride.d);
        return dequantize([&](std::int64_t i) { return keys.row[i]; }, 1);  // codes that are widened already
      }
      return split_rows<kComponents, RepresentableValue<kComponents>>(v_row, p.v_stride.d, rows, p.dv, w.dv, w.rows,
                                                                      component, InPlace::in_parts);
    });
    if (w.k_groups > 0)
      not_representable |= pack_scales(item, key, first, rows, w.packed_range.k_scale + at * w.k_groups);
    for (int c = 0; c < kComponents; ++c)
      tile_values(values, c * component, p.dv, w.packed_range.v + c * w.v_component_bytes() + at * w.dv * 2);
    not_representable |= values.not_representable;
  }
  *w.packed_range.packed = {begin, first, last};
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
