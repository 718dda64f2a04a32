// Part of attention_prefill_tiles.cpp: the state of one work item, and its scratch. The other prefill_tiles_*.hpp have
// the functions that work on it.
#pragma once

#include "cpu/kernels/attention_table.hpp"
#include "cpu/kernels/vector_kernels.hpp"
#include "cpu/tile/bf16_mma.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/exponentials.hpp"
#include "cpu/tile/prefetcher.hpp"
#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kRows = kChunk, kMaxQueryBlocks = 32;

// Keys of a block. O of a query block with large heads does not fit L1 and is read from L2 once a block, so large
// heads have large blocks.
inline std::int64_t block_keys(std::int64_t d, std::int64_t dv) {
  constexpr std::int64_t kLargeHead = 512;  // d + dv
  return d + dv >= kLargeHead ? kMaxBlockKeys : kBlockKeys;
}

// Which component of each operand each product has: all products but those below the last bit.
constexpr int kProductOf[2][3][2] = {{{0, 0}}, {{0, 0}, {0, 1}, {1, 0}}};
constexpr int products(int components) {
  return components == 1 ? 1 : 3;
}

// Keys of a packed range: their components of K and V take 1 MiB, half of the L2 of Xeons with AMX and all of Zen 4's,
// where fewer were no faster.
template <int kComponents>
std::int64_t packed_range_keys(std::int64_t d, std::int64_t dv) noexcept {
  d = round_up(d, kTileDepth), dv = round_up(dv, kChunk);
  const std::int64_t fit = (std::int64_t{1} << 20) / (2 * kComponents * (d + dv)) / 256 * 256;
  return clamp(fit, 256, 4096);
}

constexpr std::int64_t kIntervalKeys = 4096;

// Address of 32 rows of keys, and bytes from row to row.
struct KeyTiles {
  const char* row;
  std::int64_t stride;
};

// Keys [first, last) are packed, of the range that starts at key `begin`.
struct PackedKeys {
  std::int64_t begin, first, last;
};

// The kernel for fallback rows. It takes all types.
const AttentionKernel& vector_kernel() {
  const AttentionKernel* const* row = vector_kernels().attention.in_order;
  while ((*row)->facts.phase != Phase::prefill) ++row;
  return **row;
}

// How many keys of the next packed range are prefetched into L2 while tiles multiply. With few rows, reading them
// afterwards would take as long as multiplying.
constexpr std::int64_t kPrefetchKeys = 512;

template <int kComponents>
struct AttentionPrefillTilesScratch {
  std::int64_t d, dv, keys, block;  // d and dv padded to tiles; keys of a packed range and of a block
  std::int64_t k_groups;            // groups of a key that have a scale each, counting its tail; 0: no scales

  // K and V of a packed range. They stay for the next work item of the same head, so they come before everything whose
  // size depends on the number of rows.
  struct {
    PackedKeys* packed;
    bf16* k;            // [component][keys][d]
    KeyTiles* k_tiles;  // [keys / 32]: in `k`, or in place
    char* v;            // [component][keys / 32][dv / 16] tiles
    float* k_scale;     // [keys][k_groups]
    std::uint32_t*
        not_representable;  // [keys / 32]: a bit for each key with an element of K or V that is not representable
  } packed_range;
  struct {
    Row* row;                                           // [q_block][32]
    char* q;                                            // [q_block][component][d / 32][2] tiles of Q^T
    float *ot, *ot_accum, *neg_m, *l, *l_compensation;  // [q_block][dv][32], [q_block][32]
  } q_blocks;
  char* s[2];                       // scores of a block, weights over them
  float* group_s;                   // [k_groups][32][32] products of each group of 32 keys, before scaling
  float* discarded;                 // [32][32] written, never read
  float* block_max;                 // [32] -inf where the row sees none of the block's keys, else 0
  const std::byte** prefetch_rows;  // [2 kPrefetchKeys] rows of K and V to prefetch
  bf16* rows;                       // [component][32][d or dv] on their way into tiles
  struct {
    std::int32_t *k, *q, *v, *p;
  } offset;             // of each product, as TileOperand has them
  std::byte* fallback;  // the vector kernel's scratch

  AttentionPrefillTilesScratch(BumpAllocator& allocator, const AttentionShape& shape) {
    d = round_up(shape.d, kTileDepth), dv = round_up(shape.dv, kChunk);
    k_groups = shape.k_groups;
    block = block_keys(d, dv);
    keys = min(packed_range_keys<kComponents>(d, dv), round_up(max(shape.sk, 1), block));
    packed_range.packed = allocator.take<PackedKeys>(1);
    packed_range.k = allocator.take<bf16>(kComponents * keys * d);
    packed_range.k_tiles = allocator.take<KeyTiles>(keys / kTileDepth);
    packed_range.v = allocator.take<char>(kComponents * v_component_bytes());
    packed_range.k_scale = allocator.take<float>(keys * k_groups);
    packed_range.not_representable = allocator.take<std::uint32_t>(keys / kTileDepth);
    const std::int64_t count = (shape.rows + kRows - 1) / kRows;
    q_blocks.row = allocator.take<Row>(count * kRows);
    q_blocks.q = allocator.take<char>(count * q_bytes());
    q_blocks.ot = allocator.take<float>(count * kRows * dv);
    q_blocks.ot_accum = allocator.take<float>(needs_accum(shape) ? count * kRows * dv : 0);
    q_blocks.neg_m = allocator.take<float>(count * kRows);
    q_blocks.l = allocator.take<float>(count * kRows);
    q_blocks.l_compensation = allocator.take<float>(count * kRows);
    for (char*& scores : s) scores = allocator.take<char>(kScoreBytes);
    group_s = allocator.take<float>(k_groups * kChunk * kChunk);
    discarded = allocator.take<float>(kChunk * kChunk);
    block_max = allocator.take<float>(kRows);
    prefetch_rows = allocator.take<const std::byte*>(2 * kPrefetchKeys);
    rows = allocator.take<bf16>(kComponents * kRows * max(d, dv));
    const std::int64_t depth = d / kTileDepth;
    offset.k = allocator.take<std::int32_t>(products(kComponents) * depth);
    offset.q = allocator.take<std::int32_t>(products(kComponents) * depth);
    offset.v = allocator.take<std::int32_t>(products(kComponents) * (block / kTileDepth));
    offset.p = allocator.take<std::int32_t>(products(kComponents) * (block / kTileDepth));
    fallback = allocator.take<std::byte>(
        static_cast<std::int64_t>(vector_kernel().scratch_bytes({shape.sk, shape.d, shape.dv, kRows})));
  }
  // The accumulation interval in keys, whole packed ranges: longer sums would cost O its last bits.
  std::int64_t interval_keys() const { return max(kIntervalKeys / keys, 1) * keys; }
  bool needs_accum(const AttentionShape& shape) const { return shape.sk + keys > interval_keys(); }
  std::int64_t q_bytes() const { return kComponents * kRows * d * 2; }
  std::int64_t v_component_bytes() const { return keys * dv * 2; }

  void fill_offsets() const {
    const std::int64_t depth = d / kTileDepth;
    constexpr int n = products(kComponents);
    for (int i = 0; i < n; ++i) {
      const int x = kProductOf[kComponents - 1][i][0], y = kProductOf[kComponents - 1][i][1];
      for (std::int64_t j = 0; j < depth; ++j) {
        offset.k[j * n + i] = static_cast<std::int32_t>((x * keys * d + j * kTileDepth) * 2);
        offset.q[j * n + i] = static_cast<std::int32_t>((y * depth + j) * 2 * kTileBytes);
      }
      for (std::int64_t j = 0; j < block / kTileDepth; ++j) {
        offset.v[j * n + i] = static_cast<std::int32_t>(x * v_component_bytes() + j * kTileDepth * dv * 2);
        offset.p[j * n + i] = static_cast<std::int32_t>(weights_at(y) + j * kTileDepth * kRowBytes);
      }
    }
  }
};

// A score block: a query block against the block of keys that starts at `at` within the packed range.
struct ScoreBlock {
  std::int64_t q_block;
  std::int64_t at;
  std::int64_t chunks;  // chunks of 32 keys, up to the last one that some row sees
  bool unfinished;      // some row does not see all of its keys, or scores have modifiers
  bool first, last;     // of this query block's score blocks in this packed range
};

inline std::int64_t scaled_groups(const AttentionParams& p) {
  if (!p.k_quant.scale) return 0;
  return (p.d - p.k_tail.size) / p.k_quant.group + (p.k_tail.size > 0 ? 1 : 0);
}

template <int kComponents>
struct PrefillItem {
  PrefillItem(const AttentionParams& params, const WorkItem& work_item, std::byte* scratch)
      : p(params),
        item(work_item),
        head(params, work_item),
        allocator(scratch),
        w(allocator, {params.sk, params.d, params.dv, work_item.row_end - work_item.row_begin, scaled_groups(params)}) {
  }

  const AttentionParams& p;
  const WorkItem& item;
  Head head;
  BumpAllocator allocator;
  AttentionPrefillTilesScratch<kComponents> w;
  // Whether finish_scores() has to change scores. A mask alone does not count: it is -inf both before and after the
  // scale.
  bool modified = changes_scores(p.score) || !(p.score.scale_log2 >= __FLT_MIN__);
  vec scale = vec(p.score.scale_log2);
  std::int64_t count = 0;  // number of query blocks
  Pending pending{};
  Prefetcher prefetcher;
  int prefetch_lines = 0;  // lines to prefetch after each tile product
  QueryBlock q_blocks[kMaxQueryBlocks];
  std::uint32_t fallback[kMaxQueryBlocks] = {};  // rows, a bit each, that the vector kernel computes again
  bool large_m[kMaxQueryBlocks] = {};            // m_is_large() for some row

  // The steps of kTileDepth columns that a group of a key has; the last group has the rest.
  std::int64_t first_step(std::int64_t group) const { return group * p.k_quant.group / kTileDepth; }
  std::int64_t steps_of(std::int64_t group) const {
    return group + 1 < w.k_groups ? p.k_quant.group / kTileDepth : w.d / kTileDepth - first_step(group);
  }
  char* q_tiles(std::int64_t q_block) const { return w.q_blocks.q + q_block * w.q_bytes(); }
  float* partial_result(std::int64_t row) const {
    return item.partial ? item.partial + (row - item.row_begin) * partial_floats(p.dv) : nullptr;
  }
  std::uint32_t all_rows(std::int64_t q_block) const { return ~std::uint32_t{0} >> (kRows - q_blocks[q_block].rows); }
  bool all_fall_back(std::int64_t q_block) const {
    return (fallback[q_block] & all_rows(q_block)) == all_rows(q_block);
  }
};

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
