// attention_prefill: out = softmax(score(q k^T)) v in fp32, by online softmax, without an S x S matrix. Packing widens
// inputs that are not fp32, query block by query block and key block by key block; storing rounds the output.
//
//   for each block of kBlockK keys that some row sees         K and V blocks: 4 kBlockK (d + dv) bytes from L2
//     for each query block of `width` query rows                    Q^T, O^T: 4 width (d + dv) bytes from L2
//       S^T = K Q^T           2 kBlockK width d FLOPs         S^T stays in L1: 4 kBlockK width bytes
//       finish the scores of partial blocks (masks, bias, ...); move m where a lane must
//       P^T = 2^(scale S^T - m), l += sum; dropout
//       O^T += V^T P^T        2 kBlockK width dv FLOPs
//
// Key blocks start at multiples of kBlockK from the sequence's first key, and sums run in key order. So a row's bits
// do not depend on how rows are grouped into query blocks and work items. A masked key adds an exact 0.
#include "cpu/kernels/attention_table.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/causal_segments.hpp"
#include "cpu/tile/dropout.hpp"
#include "cpu/tile/epilogue.hpp"
#include "cpu/tile/key_block.hpp"
#include "cpu/tile/mma.hpp"
#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// The scores of a query block stay in L1 beside a strip of V, and sums over a block stay short. 192 keys were 0.3
// points faster on Zen 4 with AVX2 (on Sapphire Rapids 0.5 with AVX-512, -0.5 with AVX2), but broke the contract's
// bound on rising values.
constexpr std::int64_t kBlockK = 128;
constexpr std::int64_t kWidth = kVecs * kLanes;
constexpr std::int64_t kTileKeys = rows_of_tile(kVecs);
constexpr std::int64_t kMaxQueryBlocks = 16;  // of a work item
constexpr std::int64_t kIntervalKeys = kIntervalBlocks * kBlockK;

struct AttentionPrefillScratch {
  Row* row;
  float *qt, *ot, *ot_accum, *neg_m, *l, *l_compensation;  // for all query blocks, one after another
  float *s, *block_max, *block_max_exponent, *short_sum,
      *sum;                         // for one score block: scores, maxima and sums
  float *k, *v;                     // one block, packed
  float *zero, *discarded;          // a row of zeros, a row that is written, never read
  QueryBlock* q_blocks;             // here, because a local array would zero all 16 even if few are used
  const std::byte** prefetch_rows;  // rows to prefetch: keys, values and tails of two key blocks, Q, out
  Row* next_row;                    // of the next item

  AttentionPrefillScratch(BumpAllocator& allocator, const AttentionShape& shape) {
    const std::int64_t lanes = round_up(shape.rows, kLanes);
    row = allocator.take<Row>(lanes);
    qt = allocator.take<float>(lanes * shape.d);
    ot = allocator.take<float>(lanes * shape.dv);
    ot_accum = allocator.take<float>(shape.sk + kBlockK > kIntervalKeys ? lanes * shape.dv : 0);
    neg_m = allocator.take<float>(lanes);
    l = allocator.take<float>(lanes);
    l_compensation = allocator.take<float>(lanes);
    s = allocator.take<float>(kBlockK * kWidth);
    block_max = allocator.take<float>(kWidth);
    block_max_exponent = allocator.take<float>(kWidth);
    short_sum = allocator.take<float>(kWidth);
    sum = allocator.take<float>(kWidth);
    k = allocator.take<float>(kBlockK * packed_stride(shape.d));
    v = allocator.take<float>(kBlockK * packed_stride(shape.dv));
    zero = allocator.take<float>(kWidth);
    discarded = allocator.take<float>(kWidth);
    q_blocks = allocator.take<QueryBlock>(kMaxQueryBlocks);
    prefetch_rows = allocator.take<const std::byte*>(6 * kBlockK + (kMaxQueryBlocks + 2) * kWidth);
    next_row = allocator.take<Row>(kMaxQueryBlocks * kWidth);
  }
};

// Replaces the non-finite elements of V's block, packed in `w.v`, by 0, and adds them to the output of the rows that
// see them and do not drop them (any positive weight gives the same inf or NaN). Scores must be final and not yet
// exponentiated.
[[gnu::noinline, gnu::cold]] void add_non_finite(const Head& head, const QueryBlock& q_block, std::int64_t k0,
                                                 std::int64_t begin, std::int64_t end,
                                                 const AttentionPrefillScratch& w) {
  const std::int64_t dv = head.p.dv;
  for (std::int64_t j = begin; j < end; ++j)
    for (std::int64_t c = 0; c < dv; ++c) {
      float& element = w.v[j * packed_stride(dv) + c];
      const float x = element;
      if (x - x == 0.f) continue;
      element = 0;
      for (std::int64_t i = 0; i < q_block.width; ++i) {
        const bool in_range = k0 + j >= q_block.first(i) && k0 + j < q_block.last(i);
        if (in_range && w.s[j * q_block.width + i] != -__builtin_inff() &&
            !is_dropped(head.p.score, place_of(head, q_block.row[i], k0 + j)))
          q_block.ot[c * q_block.width + i] += x;
      }
    }
}

// Computes w.s, the final scores of a score block of kW vectors, in the form that to_exponents() describes, and
// w.block_max, their maxima. Returns false if all keys are masked.
template <int kW>
bool score(const Head& head, const QueryBlock& q_block, std::int64_t k0, const BlockSegments& c, KvBlock kb,
           const AttentionPrefillScratch& w, TilePrefetcher* prefetcher) {
  const bool modified = needs_finish(head.p.score);
  bool visible = !modified;
  for (int v = 0; v < kW; ++v) store(w.block_max + v * kLanes, minus_infinity());
  for (int i = 0; i < c.count; ++i) {
    const Segment& g = c.segment[i];
    const std::int64_t lane = g.vec * kLanes;
    const ScoresTile<kW> tile{kb.data + g.begin * kb.stride,
                              kb.stride,
                              head.p.d,
                              q_block.qt + lane,
                              w.s + g.begin * q_block.width + lane,
                              g.masked ? w.discarded : w.block_max + lane,  // masked scores must not raise the maximum
                              prefetcher};
    with_vecs<kW>(kW - g.vec, [&](auto vecs) { tiles<vecs>(tile, g.end - g.begin); });
    if (!g.masked) continue;
    for (std::int64_t v = g.vec; v < kW; ++v)
      visible |= (modified ? finish_scores<true> : finish_scores<false>)(head, q_block, v, k0, g.begin, g.end, w.s,
                                                                         w.block_max, nullptr);
  }
  return visible;
}

// Attention of a query block of kW vectors to the block of n keys at k0.
template <int kW>
void attend_block(const Head& head, QueryBlock& q_block, std::int64_t k0, std::int64_t n, KvBlock kb, KvBlock vb,
                  bool isolate_non_finite, const AttentionPrefillScratch& w, TilePrefetcher* prefetcher) {
  const FlushDenormals flush;
  const std::int64_t dv = head.p.dv, width = q_block.width;
  const BlockSegments c = find_segments(q_block, k0, n, needs_finish(head.p.score));
  if (c.count == 0 || !score<kW>(head, q_block, k0, c, kb, w, prefetcher)) return;

  ToExponents exponents = to_exponents(head.p.score, q_block, w.zero);
  apply(exponents, width, w.block_max, w.block_max_exponent);
  if (any_must_move(q_block, w.block_max_exponent)) [[unlikely]] {
    move_m(q_block, dv, w.block_max_exponent, nullptr, 0);
    // Modified scores are computed again relative to the new m: equal keys of different blocks then get equal weights,
    // and small scores keep their low bits.
    if (needs_finish(head.p.score)) score<kW>(head, q_block, k0, c, kb, w, prefetcher);
    apply(exponents, width, w.block_max, w.block_max_exponent);
    if (any_must_move(q_block, w.block_max_exponent)) {
      // m is too large to absorb the step, so the scores themselves are lowered. (Vectors that read no keys here have
      // garbage lanes, which is harmless.)
      const std::int64_t begin = c.begin * width, keys = c.end[kW - 1] - c.begin;
      for (std::int64_t i = 0; i < keys * width; i += width) apply(exponents, width, w.s + begin + i, w.s + begin + i);
      exponents = {1, w.zero};
      move_m(q_block, dv, w.block_max_exponent, w.s + begin, keys);
    }
  }
  if (isolate_non_finite) {
    if (!q_block.started)
      for (std::int64_t i = 0; i < dv * width; i += kLanes) store(q_block.ot + i, vec(0.f));
    q_block.started = true;
    add_non_finite(head, q_block, k0, c.begin, c.end[kW - 1], w);
  }

  for (int v = 0; v < kW; ++v)
    for (float* row : {w.short_sum, w.sum}) store(row + v * kLanes, vec(0.f));
  for (int i = 0; i < c.count; ++i) {
    const Segment& g = c.segment[i];
    const std::int64_t lane = g.vec * kLanes;
    with_vecs<kW>(kW - g.vec, [&](auto vecs) {
      exponentiate<vecs, kW>(w.s + lane, g.begin, g.end, {exponents.scale, exponents.add + lane}, w.short_sum + lane,
                             w.sum + lane);
    });
  }
  for (int v = 0; v < kW; ++v) {
    const std::int64_t lane = v * kLanes;
    add_to_sum(q_block, lane, load(w.sum + lane) + load(w.short_sum + lane));
    if (head.p.score.dropout.given) drop_weights(head, q_block.row + lane, k0, c.begin, c.end[v], width, w.s + lane);
  }

  for (std::int64_t begin = c.begin, end = c.end[kW - 1]; begin < end;) {
    const std::int64_t stop = (begin / kSumKeys + 1) * kSumKeys;
    std::int64_t keys[kW];
    for (int v = 0; v < kW; ++v) keys[v] = clamp(c.end[v], begin, stop) - begin;
    tiles<kW>(
        OutputTile<kW>{vb.data + begin * vb.stride, vb.stride, w.s + begin * width, keys,
                       q_block.started ? q_block.ot : w.zero, q_block.started ? width : 0, q_block.ot, prefetcher},
        dv);
    q_block.started = true;
    begin = stop;
  }
}

// Prefetch into L2 during arithmetic. Cache misses of a head's tensors would otherwise come in bursts and stall the
// kernel.
void add_keys(TilePrefetcher& prefetcher, const Head& head, const void* data, DType type, const Strides& s,
              std::int64_t n, std::int64_t first, std::int64_t last) {
  if (s.d != 1 || first >= last) return;
  const auto* base = static_cast<const std::byte*>(data);
  prefetcher.add(last - first, bytes_of(type, n),
                 [&](std::int64_t i) { return base + head.key_at(s, first + i) * unit_bytes(type); });
}
void add_keys(TilePrefetcher& prefetcher, const Head& head, bool shared, std::int64_t first, std::int64_t last) {
  const AttentionParams& p = head.p;
  const KeyTail& tail = p.k_tail;
  add_keys(prefetcher, head, p.k, p.kv_type, p.k_stride, p.d - tail.size, first, last);
  if (!shared) add_keys(prefetcher, head, p.v, p.kv_type, p.v_stride, p.dv, first, last);
  if (tail.size > 0) add_keys(prefetcher, head, tail.data, tail.type, tail.stride, tail.size, first, last);
}
void add_rows(TilePrefetcher& prefetcher, const Head& head, const void* data, DType type, const Strides& s,
              std::int64_t n, const Row* row, std::int64_t rows) {
  if (s.d != 1) return;
  const auto* base = static_cast<const std::byte*>(data);
  prefetcher.add(rows, bytes_of(type, n),
                 [&](std::int64_t i) { return base + row_at(s, head, row[i]) * unit_bytes(type); });
}

bool sees(const QueryBlock& q_block, std::int64_t k0) {
  return q_block.first(0) < k0 + kBlockK && q_block.last(q_block.width - 1) > k0;
}
// The register tiles of a score block.
std::int64_t tiles_of(std::int64_t keys, std::int64_t dv) {
  const auto parts = [](std::int64_t n, std::int64_t of) { return (n + of - 1) / of; };
  return parts(keys, kTileKeys) + parts(keys, kSumKeys) * parts(dv, kTileKeys);
}

// The rows that the next work item reads first: its first block of keys, and the queries that see it.
struct NextItem {
  Head head;
  std::int64_t key_begin, key_end, rows;
  const Row* row;

  NextItem(const AttentionParams& p, const WorkItem& item, Row* row_of) : head(p, item), row(row_of) {
    rows = min(min(item.row_end, head.len_q * p.group) - item.row_begin, kMaxQueryBlocks * kWidth);
    find_rows(head, item.row_begin, rows, row_of);
    const std::int64_t last = row[rows - 1].last;
    // Starts at the first visible key, not at the block's start: keys that no row sees may not exist.
    key_begin = row[0].first;
    key_end = min(last, (key_begin / kBlockK + 1) * kBlockK);
    if (key_end < last) rows = min(rows, kWidth);
  }
  // Adds part i of n of these rows to the prefetcher.
  void add_to(TilePrefetcher& prefetcher, bool shared, std::int64_t i, std::int64_t n) const {
    const AttentionParams& p = head.p;
    const auto at = [&](std::int64_t count, std::int64_t part) { return max(count, 0) * part / n; };
    const std::int64_t keys = key_end - key_begin, r = at(rows, i);
    add_keys(prefetcher, head, shared, key_begin + at(keys, i), key_begin + at(keys, i + 1));
    add_rows(prefetcher, head, p.q, p.q_type, p.q_stride, p.d, row + r, at(rows, i + 1) - r);
  }
};

// Attends over all keys that any query block sees, block by block; all query blocks share each block of keys.
void sweep(const Head& head, QueryBlock* q_blocks, std::int64_t count, bool isolate_non_finite,
           const AttentionPrefillScratch& w, const NextItem* next_item) {
  const AttentionParams& p = head.p;
  const std::int64_t first = q_blocks[0].first(0), last = q_blocks[count - 1].last(q_blocks[count - 1].width - 1);
  if (first >= last) return;
  const bool far = last - first > kBlockK;
  const bool pack_k = must_pack_keys(p),
             pack_v = must_pack_values(p) || isolate_non_finite;  // add_non_finite() edits the packed copy
  const bool shared = pack_k && !isolate_non_finite && keys_begin_with_values(p);
  const bool prefetches = far || next_item;
  const auto count_seeing = [&](std::int64_t k0) {
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < count; ++i) n += sees(q_blocks[i], k0);
    return n;
  };
  TilePrefetcher prefetcher(w.prefetch_rows);
  const std::int64_t last_block = (last - 1) / kBlockK * kBlockK;
  const std::int64_t last_count = next_item ? count_seeing(last_block) + count_seeing(last_block - kBlockK) : 0;
  std::int64_t last_index = 0;
  for (std::int64_t k0 = first / kBlockK * kBlockK; k0 < last; k0 += kBlockK) {
    const std::int64_t n = min(kBlockK, last - k0);
    const std::int64_t from = max(k0, first);
    const KvBlock kb = kv_block(head, keys_of(p), k0, from, k0 + n, pack_k, w.k);
    const KvBlock vb = shared ? kb : kv_block(head, values_of(p), k0, from, k0 + n, pack_v, w.v);
    const std::int64_t next = k0 + kBlockK, ahead = clamp(last - next, 0, kBlockK);
    const std::int64_t seeing = prefetches ? count_seeing(k0) : 0;
    std::int64_t index = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      QueryBlock& q_block = q_blocks[i];
      if (k0 <= first && p.q_type == DType::f8e4m3) pack_coded_queries(head, q_block);
      else if (k0 <= first)
        with_float_type(p.q_type, [&](auto element) {
          pack_rows(static_cast<const decltype(element)*>(p.q), p.q_stride, p.d, head, q_block, q_block.qt);
        });
      if ((k0 - head.low / kBlockK * kBlockK) % kIntervalKeys == 0) add_to_accum(q_block, p.dv);
      if (!sees(q_block, k0)) continue;
      const auto attend = [&](TilePrefetcher* during) {
        with_vecs(q_block.vecs,
                  [&](auto vecs) { attend_block<vecs>(head, q_block, k0, n, kb, vb, isolate_non_finite, w, during); });
      };
      if (!prefetches) {
        attend(nullptr);
        continue;
      }
      prefetcher.clear();
      if (k0 <= first && far && i + 1 < count)
        add_rows(prefetcher, head, p.q, p.q_type, p.q_stride, p.d, q_blocks[i + 1].row, q_blocks[i + 1].rows);
      add_keys(prefetcher, head, shared, next + ahead * index / seeing, next + ahead * (index + 1) / seeing);
      ++index;
      if (head.whole && q_block.last(q_block.width - 1) <= next)
        add_rows(prefetcher, head, p.out, p.out_type, p.out_stride, p.dv, q_block.row, q_block.rows);
      if (next_item && k0 >= last_block - kBlockK)
        next_item->add_to(prefetcher, shared, last_index, last_count), ++last_index;
      prefetcher.spread_over(tiles_of(min(q_block.last(q_block.width - 1) - k0, n), p.dv));
      attend(&prefetcher);
      prefetcher.prefetch_rest();
    }
  }
  for (std::int64_t i = 0; i < count; ++i) finish_accum(q_blocks[i], p.dv);
}

void run(const AttentionParams& p, const WorkItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, item);
  const std::int64_t row_end = min(item.row_end, head.len_q * p.group);
  BumpAllocator allocator(scratch);
  const AttentionPrefillScratch w(allocator, {p.sk, p.d, p.dv, item.row_end - item.row_begin});
  for (std::int64_t i = 0; i < kWidth; i += kLanes) store(w.zero + i, vec(0.f));

  QueryBlock* const q_blocks = w.q_blocks;
  std::int64_t count = 0;
  for (std::int64_t r = item.row_begin, lanes = 0; r < row_end; ++count) {
    QueryBlock& q_block = q_blocks[count] = {};
    const std::int64_t vecs_left = (row_end - r + kLanes - 1) / kLanes;
    q_block.vecs = vecs_left == kVecs + 1 && kVecs > 2 ? 2 : min(vecs_left, kVecs);  // 2 + 2, not 3 + 1
    q_block.width = q_block.vecs * kLanes;
    q_block.rows = min(q_block.width, row_end - r);
    q_block.row = w.row + lanes;
    q_block.qt = w.qt + lanes * p.d;
    q_block.ot = w.ot + lanes * p.dv;
    q_block.ot_accum = w.ot_accum + lanes * p.dv;
    q_block.neg_m = w.neg_m + lanes;
    q_block.l = w.l + lanes;
    q_block.l_compensation = w.l_compensation + lanes;
    q_block.partial = item.partial ? item.partial + (r - item.row_begin) * partial_floats(p.dv) : nullptr;
    find_rows(head, r, q_block.rows, q_block.row);
    for (std::int64_t i = q_block.rows; i < q_block.width; ++i) q_block.row[i] = q_block.row[q_block.rows - 1];
    reset(head, q_block);
    r += q_block.rows;
    lanes += q_block.width;
  }
  if (item.next) {
    const NextItem next(p, *item.next, w.next_row);
    sweep(head, q_blocks, count, false, w, &next);
  } else {
    sweep(head, q_blocks, count, false, w, nullptr);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    if (!store_query_block(head, q_blocks[i])) [[unlikely]] {
      reset(head, q_blocks[i]);
      sweep(head, &q_blocks[i], 1, true, w, nullptr);
      store_query_block(head, q_blocks[i]);
    }
    store_lse(head, q_blocks[i]);
  }
}

}  // namespace

const AttentionKernel kAttentionPrefill = {.facts = {.operation = Operation::attention,
                                                     .phase = Phase::prefill,
                                                     .arithmetic = "f32",
                                                     .dtypes = kCacheTypes,
                                                     .dropout = true,
                                                     .key_tail = true,
                                                     .block_q = kWidth,
                                                     .block_k = kBlockK},
                                           .max_rows = kMaxQueryBlocks * kWidth,
                                           .items_per_worker = 4,
                                           .full_rows = kLanes < 8 ? 8 : kLanes,
                                           .scratch_bytes = bytes_of<AttentionPrefillScratch>,
                                           .run = run};

}  // namespace rapt::cpu::RAPT_ISA
