// Part of attention_decode.cpp: finds the rows of a block of keys and values, plans what to prefetch, and packs rows
// where needed.
#pragma once

#include "cpu/kernels/decode_item.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

inline void find_rows_of(const Head& head, const void* data, Strides stride, DType type, const BlockRows& block,
                         const std::byte** row) {
  for (std::int64_t* of_dim : {&stride.b, &stride.h, &stride.s}) *of_dim *= unit_bytes(type);
  const auto* const base = static_cast<const std::byte*>(data);
  row += block.from - block.k0;
  head.for_each_run(stride, block.from, block.end - block.from, [&](auto i, auto end, auto at) {
    for (; i < end; ++i, at += stride.s) row[i] = base + at;
  });
}
// Finds the rows of keys [first, last) of the block at k0.
inline void find_block(const Head& head, BlockRows& block, std::int64_t k0, std::int64_t first, std::int64_t last) {
  const AttentionParams& p = head.p;
  block.k0 = k0, block.from = max(k0, first), block.end = min(k0 + block_keys(p), last);
  find_rows_of(head, p.k, p.k_stride, p.kv_type, block, block.k);
  find_rows_of(head, p.v, p.v_stride, p.kv_type, block, block.v);
  if (p.k_tail.size > 0) find_rows_of(head, p.k_tail.data, p.k_tail.stride, p.k_tail.type, block, block.tail);
}

// Finds the first block of another work item. Returns whether it has one.
inline bool find_first_block(const AttentionParams& p, const WorkItem& item, BlockRows& block) {
  const Head head(p, item);
  const std::int64_t row_end = min(item.row_end, head.len_q * p.group), keys = block_keys(p);
  if (item.row_begin >= row_end) return false;
  Row first, last;
  find_rows(head, item.row_begin, 1, &first), find_rows(head, row_end - 1, 1, &last);
  if (first.first >= last.last) return false;
  find_block(head, block, first.first / keys * keys, first.first, last.last);
  return true;
}

inline Prefetcher prefetch_keys(const DecodeItem& item, const BlockRows* block) {
  if (!block) return {nullptr, 0, 0};
  return {block->k + (block->from - block->k0), block->end - block->from,
          bytes_of(item.p.kv_type, item.p.d - item.p.k_tail.size)};
}
inline Prefetcher prefetch_values(const DecodeItem& item, const BlockRows* block) {
  const AttentionParams& p = item.p;
  if (!block || (item.shared && p.k_tail.size == 0)) return {nullptr, 0, 0};
  if (item.shared)  // values are part of the keys; only the keys' tails remain
    return {block->tail + (block->from - block->k0), block->end - block->from, bytes_of(p.k_tail.type, p.k_tail.size)};
  return {block->v + (block->from - block->k0), block->end - block->from, bytes_of(p.kv_type, p.dv)};
}
// Decides which rows of this block, or of the one after, each product prefetches.
inline void plan_prefetches(DecodeItem& item, const BlockRows* now, const BlockRows* after) {
  item.prefetch_with_dots = item.packed ? prefetch_keys(item, after) : prefetch_values(item, now);
  item.prefetch_with_values = item.packed ? prefetch_values(item, after) : prefetch_keys(item, after);
}

// Packs the block's keys or values, or collects the scales of those that are read in place.
inline void load_rows(const DecodeItem& item, const BlockRows& block, const KeyRows& rows, float* packed,
                      std::int64_t stride, RowScales& scales) {
  const Quantization& quant = rows.quant;
  const bool one_scale = one_scale_per_row(quant, rows.n);
  const std::int64_t first = block.from - block.k0, n = block.end - block.from;
  if (item.packed) pack_keys(item.head, rows, block.from, n, packed + first * stride, stride, !one_scale);
  if (!quant.scale || (item.packed && !one_scale)) return;
  scales.group_log2 = __builtin_ctzll(static_cast<std::uint64_t>(quant.group));
  const auto copy = [&](const float* from, const Strides& of, float* to) {
    for (std::int64_t group = 0; group < rows.n / quant.group; ++group, from += of.d, to += kKeysOfBlock)
      item.head.for_each_run(of, block.from, n, [&](auto i, auto end, auto at) {
        for (; i < end; ++i, at += of.s) to[first + i] = from[at];
      });
  };
  copy(quant.scale, quant.scale_stride, scales.scale);
  if (quant.zero) copy(quant.zero, quant.zero_stride, scales.zero);
}
inline void load_block(DecodeItem& item, const BlockRows& block) {
  AttentionDecodeScratch& w = item.w;
  load_rows(item, block, keys_of(item.p), w.k, w.q_stride, w.k_scales);
  for (std::int64_t j = block.from; item.packed && item.deinterleaves_keys() && j < block.end; ++j)
    deinterleave(w.k + (j - block.k0) * w.q_stride, item.p.d);
  if (!item.shared) load_rows(item, block, values_of(item.p), w.v, w.o_stride, w.v_scales);
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
