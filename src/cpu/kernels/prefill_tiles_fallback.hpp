// Part of attention_prefill_tiles.cpp: finds the fallback rows, which products of components would get wrong, and has
// the vector kernel compute them.
#pragma once

#include "cpu/kernels/prefill_tiles_item.hpp"
#include "cpu/tile/epilogue.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

template <int kComponents>
bool has_infinite_bias(const PrefillItem<kComponents>& item, const Row& row, std::int64_t key) {
  const ScoreParams& s = item.p.score;
  if (!s.bias) return false;
  const std::int64_t at = modifier_index(s.bias_stride, place_of(item.head, row, key));
  return number_at(s.bias, s.bias_type, at) == -kInfinity;
}

// Marks the rows that see `key`, whose key or value components cannot hold, as fallback rows.
template <int kComponents>
[[gnu::noinline, gnu::cold]] void add_rows_that_see(PrefillItem<kComponents>& item, std::int64_t key) {
  for (std::int64_t i = 0; i < item.count; ++i)
    for (std::int64_t r = 0; r < item.q_blocks[i].rows; ++r) {
      const Row& row = item.q_blocks[i].row[r];
      if (key < row.first || key >= row.last) continue;
      if (is_masked(item.p.score, place_of(item.head, row, key))) continue;
      if (has_infinite_bias(item, row, key)) continue;
      item.fallback[i] |= std::uint32_t{1} << r;
    }
}

// Keys [first, last) are packed, of the range at `begin`.
template <int kComponents>
void add_rows_that_see_not_representable(PrefillItem<kComponents>& item, std::int64_t begin, std::int64_t first,
                                         std::int64_t last) {
  for (std::int64_t key = first / kTileDepth * kTileDepth; key < last; key += kTileDepth) {
    const std::uint32_t not_representable = item.w.packed_range.not_representable[(key - begin) / kTileDepth];
    for (std::int64_t i = 0; not_representable != 0 && i < kTileDepth; ++i)
      if (not_representable >> i & 1) add_rows_that_see(item, key + i);
  }
}

template <int kComponents>
std::uint32_t rows_whose_sink_outweighs_keys(const PrefillItem<kComponents>& item, const QueryBlock& q_block) {
  std::uint32_t rows = 0;
  for (std::int64_t i = 0; i < q_block.rows; ++i) {
    float neg_m = 0, sink = 0;
    start_row(item.head, q_block.row[i], neg_m, sink);
    sink *= __builtin_exp2f(q_block.neg_m[i] - neg_m);
    const bool sees = q_block.row[i].first < q_block.row[i].last;
    if (sees && sink > 0 && q_block.l[i] <= sink * (1 + 0x1p-21f)) rows |= 1u << i;
  }
  return rows;
}

template <int kComponents>
std::uint32_t rows_not_finite(const PrefillItem<kComponents>& item, const QueryBlock& q_block) {
  std::uint32_t rows = 0;
  for (std::int64_t i = 0; i < kRows; ++i) {
    const float scale = q_block.l[i] == 0 ? 0.f : 1 / q_block.l[i];
    for (std::int64_t c = 0; c < item.p.dv; ++c)
      if (!(q_block.ot[c * kRows + i] * scale * 0.f == 0.f)) rows |= 1u << i;
  }
  return rows;
}

// Has the vector kernel compute the query block's fallback rows, consecutive ones in one call.
template <int kComponents>
void run_fallback_rows(PrefillItem<kComponents>& item, std::int64_t i) {
  const std::int64_t row = item.item.row_begin + i * kRows, count = item.q_blocks[i].rows;
  const std::uint32_t rows = item.fallback[i];
  for (std::int64_t r = 0; r < count; ++r) {
    if (!(rows >> r & 1)) continue;
    std::int64_t end = r + 1;
    while (end < count && rows >> end & 1) ++end;
    vector_kernel().run(item.p,
                        {item.item.b, item.item.hk, row + r, row + end, item.item.key_begin, item.item.key_end,
                         item.partial_result(row + r)},
                        item.w.fallback);
    r = end;
  }
}

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
