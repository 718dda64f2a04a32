// attention_decode: the same function as attention_prefill for a few query rows, bound by reading K and V from memory:
// 2 (d + dv) FLOPs a row and key, one pass over the cache for all rows (tokens x group).
//
//   for each block of keys that some row sees             K and V rows in place, or dequantised to fp32 in scratch
//     for each query block of kLanes rows
//       S[key][row] = q . k                               lanes along d
//       finish the scores, move m, P = 2^(scale S - m)    lanes along rows, as in attention_prefill; along several
//                                                         keys' where rows are few
//       O[row] += P V                                     lanes along dv
//
// Each product prefetches the rows that the next ones need: this block's values, then the next block's keys; where
// rows are packed, the next block's keys and values. After the last block comes the first one of the next work item.
// Scales of whole rows multiply scores and weights instead of elements.
//
// The code: decode_item.hpp has the state of a work item, decode_keys.hpp finds and packs a block's rows, and
// decode_nonfinite.hpp computes the sums where NaN or Inf may be.
#include "cpu/kernels/decode_keys.hpp"
#include "cpu/kernels/decode_nonfinite.hpp"
#include "cpu/tile/epilogue.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

void start(DecodeItem& item, std::int64_t i) {
  reset(item.head, item.q_blocks[i]);
  // Rounded up: a tile of four computes three rows, and also adds to the row after them.
  for (float* rows : {item.o(i), item.o_accum(i)})
    fill(rows, round_up(item.q_blocks[i].rows, kRowsOfTile) * item.w.o_stride, 0);
}

// A query block of rows [r, r + rows), its Q packed, with nothing seen yet.
void make_query_block(DecodeItem& item, std::int64_t i, std::int64_t r, std::int64_t rows) {
  const AttentionParams& p = item.p;
  const AttentionDecodeScratch& w = item.w;
  const std::int64_t at = i * kLanes;
  float* const partial = item.item.partial ? item.item.partial + at * partial_floats(p.dv) : nullptr;
  QueryBlock& q_block = item.q_blocks[i];
  q_block = {.vecs = 1,
             .width = kLanes,
             .rows = rows,
             .row = w.row + at,
             .neg_m = w.neg_m + at,
             .l = w.l + at,
             .l_compensation = w.l_compensation + at,
             .partial = partial};
  find_rows(item.head, r, rows, q_block.row);
  // With few rows, a vector holds the scores of several keys, unless dropout follows: it needs one key to a vector.
  std::int64_t& stride = item.score_stride[i] = kLanes;
  while (stride / 2 >= rows && !p.score.dropout.given) stride /= 2;
  for (std::int64_t lane = rows; lane < stride; ++lane) q_block.row[lane] = q_block.row[rows - 1];
  for (std::int64_t lane = stride; lane < kLanes; ++lane) q_block.row[lane] = q_block.row[lane - stride];
  with_row_tiles(rows, [&](auto tile_rows, std::int64_t r0) {
    for (int lane = 0; lane < tile_rows; ++lane) {
      const Row& row = q_block.row[r0 + lane];
      if (p.q_type == DType::f8e4m3) pack_coded_query(item.head, row, w.q_row);
      else
        with_float_type(p.q_type, [&](auto element) {
          const auto* q = static_cast<const decltype(element)*>(p.q);
          pack_row(q + row_at(p.q_stride, item.head, row), p.q_stride.d, p.d, w.q_row);
        });
      if (item.deinterleaves_keys()) deinterleave(w.q_row, p.d);
      put_query(w.q_row, item.d, tile_rows, w.q + (at + r0) * w.q_stride + lane * kLanes);
    }
  });
  start(item, i);
}

// Ends an accumulation interval: o_accum += o. After the last block, o_accum is the output.
void add_to_accum(const DecodeItem& item, std::int64_t q_block) {
  float *const o = item.o(q_block), *const accum = item.o_accum(q_block);
  for (std::int64_t c = 0; c < item.q_blocks[q_block].rows * item.w.o_stride; c += kLanes) {
    store(accum + c, load(accum + c) + load(o + c));
    store(o + c, vec(0.f));
  }
}

// Computes w.s, the final scores of keys [begin, end) of the block in the form that to_exponents() describes, and
// w.block_max, their maxima. Returns false if all keys are masked.
bool score(DecodeItem& item, std::int64_t i, const BlockRows& block, const DecodeScores& scores) {
  const AttentionParams& p = item.p;
  const AttentionDecodeScratch& w = item.w;
  const QueryBlock& q_block = item.q_blocks[i];
  const auto [s, stride, begin, end] = scores;
  item.k_products.dots(q_block.rows, item.q(i), w.q_stride, item.d, item.keys(block), w.k_scales, begin, end, s, stride,
                       item.prefetch_with_dots);
  if (one_scale_per_row(p.k_quant, p.d)) {
    scores.multiply(w.k_scales.scale);
    for (std::int64_t j = begin; j < end; ++j)
      if (const float scale = w.k_scales.scale[j]; scale - scale != 0) [[unlikely]]
        dot_scaled_row(item, i, block, j, s + j * stride);
  }
  if (needs_finish(p.score)) {
    scores.clear_rest(q_block.rows);
    return scores.finish(item.head, q_block, block.k0, w.block_max);
  }
  if (q_block.first(kLanes - 1) > block.k0 + begin || q_block.last(0) < block.k0 + end) scores.mask(q_block, block.k0);
  scores.clear_rest(q_block.rows);
  store(w.block_max, scores.maximum());
  return true;
}

// Moves m of the lanes that must move, and rescales O. Also lowers the scores in vectors [from, to), none if they are
// equal.
[[gnu::noinline, gnu::cold]] void move_m_and_o(const DecodeItem& item, std::int64_t i, std::int64_t from,
                                               std::int64_t to) {
  const AttentionDecodeScratch& w = item.w;
  const QueryBlock& q_block = item.q_blocks[i];
  const vec block_max = load(w.block_max_exponent);
  const vec step = xsimd::select(must_move(block_max, load(q_block.l)), xsimd::ceil(block_max), vec(0.f));
  alignas(64) float factor[kLanes];
  store(factor, raise_m(q_block, 0, step));
  for (std::int64_t x = from; x < to; x += kLanes) store(w.s + x, load(w.s + x) - step);
  for (std::int64_t r = 0; r < q_block.rows; ++r)
    for (float* rows : {item.o(i), item.o_accum(i)})
      rescale(rows + r * w.o_stride, kLanes, w.o_stride / kLanes, vec(factor[r]));
}

// Attention of query block i to a block of keys.
void attend_block(DecodeItem& item, std::int64_t i, const BlockRows& block, bool isolate_non_finite) {
  const FlushDenormals flush;
  const AttentionParams& p = item.p;
  const AttentionDecodeScratch& w = item.w;
  const QueryBlock& q_block = item.q_blocks[i];
  const std::int64_t begin = clamp(q_block.first(0) - block.k0, block.from - block.k0, block.end - block.k0);
  const std::int64_t end = clamp(q_block.last(kLanes - 1) - block.k0, begin, block.end - block.k0);
  const DecodeScores scores{w.s, item.score_stride[i], begin, end};
  if (begin == end || !score(item, i, block, scores)) return;
  const std::int64_t from = scores.from(), to = scores.to();
  ToExponents exponents = to_exponents(p.score, q_block, w.zero);
  apply(exponents, kLanes, w.block_max, w.block_max_exponent);
  if (any_must_move(q_block, w.block_max_exponent)) [[unlikely]] {  // as in attention_prefill
    move_m_and_o(item, i, from, from);
    if (needs_finish(p.score)) score(item, i, block, scores);
    apply(exponents, kLanes, w.block_max, w.block_max_exponent);
    if (any_must_move(q_block, w.block_max_exponent)) {
      for (std::int64_t x = from; x < to; x += kLanes) apply(exponents, kLanes, w.s + x, w.s + x);
      exponents = {1, w.zero};
      move_m_and_o(item, i, from, to);
    }
  }
  for (std::int64_t x = from; isolate_non_finite && x < to; x += kLanes) store(w.scores_before + x, load(w.s + x));
  add_to_sum(q_block, 0, scores.to_weights(exponents, w.sums));
  if (p.score.dropout.given) drop_weights(item.head, q_block.row, block.k0, begin, end, kLanes, w.s);
  if (one_scale_per_row(p.v_quant, p.dv)) scores.multiply(w.v_scales.scale);
  if (isolate_non_finite) add_isolating_non_finite(item, i, block, begin, end);
  else
    item.v_products.add(q_block.rows, w.s, scores.stride, item.values(block), w.v_scales, item.dv, begin, end,
                        item.o(i), w.o_stride, item.prefetch_with_values);
}

// Attends query blocks [begin, end) over all keys that any of them sees.
void sweep(DecodeItem& item, std::int64_t begin, std::int64_t end, bool isolate_non_finite) {
  const std::int64_t first = item.q_blocks[begin].first(0), last = item.q_blocks[end - 1].last(kLanes - 1);
  if (first >= last) return;
  BlockRows blocks[2];
  BlockRows *now = &blocks[0], *next = &blocks[1];
  const std::int64_t keys = block_keys(item.p), k0 = first / keys * keys;
  find_block(item.head, *now, k0, first, last);
  for (std::int64_t k = k0; k < last; k += keys) {
    bool more = k + keys < last;
    if (more) find_block(item.head, *next, k + keys, first, last);
    else if (item.item.next && !isolate_non_finite) more = find_first_block(item.p, *item.item.next, *next);
    load_block(item, *now);
    plan_prefetches(item, now, more ? next : nullptr);
    const bool interval_ends = k > k0 && (k - item.head.low / keys * keys) % (kIntervalBlocks * keys) == 0;
    for (std::int64_t i = begin; i < end; ++i) {
      if (interval_ends) add_to_accum(item, i);
      attend_block(item, i, *now, isolate_non_finite);
    }
    BlockRows* const done = now;
    now = next, next = done;
  }
  for (std::int64_t i = begin; i < end; ++i) add_to_accum(item, i);
}

template <class Out>
void store_row(const DecodeItem& item, Out* out, std::int64_t inner, const float* from, vec scale, vec& poison) {
  for (std::int64_t c = 0; c < item.w.o_stride; c += kLanes) {
    const vec x = load(from + c) * scale;
    poison = fma(x, vec(0.f), poison);
    const std::int64_t at = column_of(c, item.dv);
    store_strided(out + at * inner, inner, min(kLanes, item.p.dv - at), x);
  }
}
// Stores the query block's rows of O / l, or their partial results. Returns false if some number is not finite: then a
// masked value may have leaked into it (0 * inf).
bool store_rows(const DecodeItem& item, std::int64_t i, bool deinterleaved) {
  const AttentionParams& p = item.p;
  const QueryBlock& q_block = item.q_blocks[i];
  add_compensation(q_block);
  vec poison(0.f);
  for (std::int64_t r = 0; r < q_block.rows; ++r) {
    float* const from = item.o_accum(i) + r * item.w.o_stride;
    if (deinterleaved) reinterleave(from, p.dv);
    const float l = q_block.l[r];
    if (q_block.partial) {
      float* const partial = q_block.partial + r * partial_floats(p.dv);
      store_row(item, partial, 1, from, vec(1.f), poison);
      partial[p.dv] = q_block.neg_m[r], partial[p.dv + 1] = l;
      continue;
    }
    const vec scale(l == 0 ? 0.f : 1 / l);  // a row without keys is 0
    with_float_type(p.out_type, [&](auto element) {
      auto* const out = static_cast<decltype(element)*>(p.out) + row_at(p.out_stride, item.head, q_block.row[r]);
      store_row(item, out, p.out_stride.d, from, scale, poison);
    });
  }
  return xsimd::all(poison == vec(0.f));
}

void run(const AttentionParams& p, const WorkItem& work_item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  DecodeItem item(p, work_item, scratch);
  const std::int64_t row_end = min(work_item.row_end, item.head.len_q * p.group);
  std::int64_t count = 0;
  for (std::int64_t r = work_item.row_begin; r < row_end; r += kLanes)
    make_query_block(item, count++, r, min(kLanes, row_end - r));
  sweep(item, 0, count, false);
  for (std::int64_t i = 0; i < count; ++i) {
    // The columns of O are in the order of the values that were summed: deinterleaved if read in place, in order if
    // isolated.
    const bool deinterleaved = p.kv_type == DType::bf16 && !item.packed;
    if (!store_rows(item, i, deinterleaved)) [[unlikely]] {
      start(item, i);
      sweep(item, i, i + 1, true);
      store_rows(item, i, false);
    }
    store_lse(item.head, item.q_blocks[i]);
  }
}

}  // namespace

const AttentionKernel kAttentionDecode = {.facts = {.operation = Operation::attention,
                                                    .phase = Phase::decode,
                                                    .arithmetic = "f32",
                                                    .dtypes = kCacheTypes,
                                                    .dropout = true,
                                                    .key_tail = true,
                                                    .block_q = kLanes,
                                                    .block_k = kKeysOfBlock},
                                          .max_rows = kMaxRows,
                                          .scratch_bytes = bytes_of<AttentionDecodeScratch>,
                                          .run = run};

}  // namespace rapt::cpu::RAPT_ISA
