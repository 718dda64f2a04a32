// attention_prefill by products of bf16 components, fp32 sums: out = softmax(score(q k^T)) v on the matrix unit, or in
// vectors that multiply pairs of bf16 (only bf16 is faster there).
//
//   bf16   one component, one product: P is rounded to bf16
//   f16x3  two components, three products: exact for fp16 inputs, P to 16 bits
//
// As in attention_prefill.cpp lanes and tile columns are queries: S^T = K Q^T, P^T = 2^(S^T scale - m), O^T += V^T P^T.
//
//   for each range of keys whose packed components fit L2    packs K and V as components, which stay for the next work
//                                                            item; bf16 keys in whole cache lines are read in place
//     for each score block                                   32 query rows, 64 to 256 keys
//       S^T = K Q^T                      tiles               while the vectors exponentiate the previous score block
//       mask, or finish the scores                           partial blocks only
//       P^T = 2^(S^T scale - m)          vectors             while the tiles multiply the two other score blocks
//       O^T += V^T P^T                   tiles               while the vectors exponentiate the next score block
//
// Quantised keys: the codes are the components. Each group of columns is multiplied by itself, and scale_scores() sums
// the products times the groups' scales. Quantised values are dequantised and rounded to bf16, as weights are.
//
// P overwrites S. O is summed over an accumulation interval of several packed ranges, then added to ot_accum. A row
// falls back to the vector kernel if components cannot hold its query (Inf, NaN, numbers that the matrix unit takes
// for 0) or a key or value that it sees, or if its output is not finite.
//
// The code: prefill_tiles_item.hpp has the state of a work item, prefill_tiles_pack.hpp splits into components,
// prefill_tiles_pipeline.hpp runs the score blocks, prefill_tiles_scores.hpp finishes scores between the products, and
// prefill_tiles_fallback.hpp finds the fallback rows.
#include "cpu/kernels/prefill_tiles_fallback.hpp"
#include "cpu/kernels/prefill_tiles_pack.hpp"
#include "cpu/kernels/prefill_tiles_pipeline.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Stores outputs and lse of all query blocks.
template <int kComponents>
void finish(PrefillItem<kComponents>& item) {
  for (std::int64_t i = 0; i < item.count; ++i) {
    finish_accum(item.q_blocks[i], item.w.dv);
    // Relative to a large sink, weights may be denormals, which the matrix unit takes for 0.
    if (item.p.score.sinks && item.head.whole)
      item.fallback[i] |= rows_whose_sink_outweighs_keys(item, item.q_blocks[i]);
  }
  {
    const FlushDenormals flush;  // round_to_bf16_pairs() may flush denormals; with this it always does
    for (std::int64_t i = 0; i < item.count; ++i) {
      if (item.all_fall_back(i)) continue;
      const QueryBlock& q_block = item.q_blocks[i];
      if (!store_query_block(item.head, q_block)) [[unlikely]]
        item.fallback[i] |=
            rows_not_finite(item, q_block);  // a value that the row does not see may have leaked in (0 * inf)
      store_lse(item.head, q_block);
    }
  }
  for (std::int64_t i = 0; i < item.count; ++i) run_fallback_rows(item, i);
}

template <int kComponents>
void run(const AttentionParams& p, const WorkItem& work_item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  PrefillItem<kComponents> item(p, work_item, scratch);
  const auto& w = item.w;
  if (!work_item.same_keys) *w.packed_range.packed = {-1, 0, 0};
  make_query_blocks(item);
  if (item.count == 0) return;
  w.fill_offsets();
  Tiles tiles;
  const std::int64_t first = item.q_blocks[0].first(0), last = item.q_blocks[item.count - 1].last(kRows - 1);
  for (std::int64_t begin = first / w.keys * w.keys; first < last && begin < last; begin += w.keys) {
    const std::int64_t from = max(first, begin), to = min(last, begin + w.keys);
    const PackedKeys& packed = *w.packed_range.packed;
    plan_prefetch(item, to, min(last, begin + 2 * w.keys));
    if (packed.begin != begin || packed.first > from || packed.last < to) pack_key_range(item, begin, from, to);
    add_rows_that_see_not_representable(item, begin, from, to);
    const bool interval_ends = (begin - item.head.low / w.keys * w.keys) % w.interval_keys() == 0;
    if (interval_ends)
      for (std::int64_t i = 0; i < item.count; ++i) add_to_accum(item.q_blocks[i], w.dv);
    attend_key_range(item, tiles, begin);
  }
  finish(item);
}

// From which sizes on this kernel is faster than others: members of AttentionKernel.
struct Limits {
  int min_rows = 0;
  int min_key_elements = 0;
  int decode_rows = kDecodeRows;
};

template <int kComponents>
constexpr AttentionKernel kernel(const char* arithmetic, DTypeSet dtypes, const Limits& limits) {
  return {.facts = {.operation = Operation::attention,
                    .phase = Phase::prefill,
                    .arithmetic = arithmetic,
                    .dtypes = dtypes,
                    .key_tail = kComponents == 1,
                    .block_q = kRows,
                    .block_k = kBlockKeys},
          .max_rows = kMaxQueryBlocks * kRows,
          .items_per_worker = 4,
          .min_item_rows = 128,
          .min_rows = limits.min_rows,
          .min_key_elements = limits.min_key_elements,
          .decode_rows = limits.decode_rows,
          .group_multiple = kComponents == 1 ? static_cast<int>(kTileDepth) : 0,
          .kept_keys = packed_range_keys<kComponents>,
          .scratch_bytes = bytes_of<AttentionPrefillTilesScratch<kComponents>>,
          .run = run<kComponents>};
}

}  // namespace

constexpr DTypeSet kBf16AndQuantized = set_of(DType::bf16) | (kCacheTypes & ~kFloatTypes);
#if defined(RAPT_HAVE_TILES)
// Below these AVX-512's kernel is faster (docs/internals/amx.md).
constexpr int kMinKeyElements = 2560, kMinKeyElementsOfF16 = 8192, kMinRowsOfF16 = 144;
// With 16 rows attention_decode took 1.2 to 1.7 times as long, with 8 it took 0.7 to 0.9 of the time, on a Xeon.
constexpr int kDecodeRowsBesideBf16 = 8;
extern constexpr AttentionKernel kTilesBf16 =
    kernel<1>("bf16", kBf16AndQuantized, {.min_key_elements = kMinKeyElements, .decode_rows = kDecodeRowsBesideBf16});
constexpr DTypeSet kHalf = set_of(DType::bf16) | set_of(DType::f16);
extern constexpr AttentionKernel kTilesF16x3 =
    kernel<2>("f16x3", kHalf, {.min_rows = kMinRowsOfF16, .min_key_elements = kMinKeyElementsOfF16});
#else
// AVX512-BF16's has no limit; that of NEON was not measured.
constexpr int kMinKeyElements = kDotRows == 1 ? 0 : 8192;
extern constexpr AttentionKernel kTilesBf16 =
    kernel<1>("bf16", kBf16AndQuantized, {.min_key_elements = kMinKeyElements});
#endif

}  // namespace rapt::cpu::RAPT_ISA
