// attention_backward by products of bf16 components, fp32 sums, on the matrix unit or in vectors that multiply pairs of
// bf16. As in attention_backward.cpp an item is a range of keys, rows come in chunks, and tile columns of scores are
// queries.
//
//   bf16   one component: P and dS are rounded to bf16 to be multiplied again
//   f16x3  two components, exact for fp16 inputs, P and dS to 16 bits. dQ, dK and dV are three products each, without
//          that of the low components; S and dP have all four, since dP and delta may cancel
//
//   for each block of kBlockKeys keys in the range
//     for each 32 keys x 32 rows                 S^T = K Q^T, dP^T = V dO^T      A: rows of K and V   B: Q^T, dO^T
//       P^T, dS^T -> components over them, interleaved with the products of the next
//     dV += P^T dO, dK += dS^T Q                 for 32 keys over all rows       A: P^T, dS^T         B: dO, Q
//     dQ^T += K^T dS^T                           for 32 rows over the block      A: K^T               B: dS^T
//
// The loops transpose nothing: K and V are A in place, and other operands are packed once per work item (K^T) or
// chunk. A, dO and Q pair rows i and i + 16, which lets two vectors of rows merge without a shuffle; B and K^T pair
// keys likewise. P and dS overwrite the scores that they are computed from, since those lines are in L1: stores
// elsewhere would miss L1 and take longer than the exponentials. Heads with elements that the matrix unit cannot hold
// (Inf and NaN among them) go to the vector kernel.
#include "cpu/kernels/backward_tiles_scores.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

template <int kComponents>
void begin(const AttentionBackwardParams& p, const BackwardItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  BumpAllocator allocator(scratch);
  const AttentionBackwardTilesScratch<kComponents> w(allocator, shape_of(p, item));
  *w.falls_back = falls_back<kComponents>(p, head, item);
  if (*w.falls_back) return vector_kernel().begin(p, item, w.rest);
  w.fill_steps();
  fill(w.zero, kChunk, 0);
  const auto [first, end] = keys_of(head, item);
  const auto split = [&](const void* base, const Strides& s, std::int64_t n, std::int64_t j, bf16* to) {
    const auto key_at = [&](std::int64_t i) {
      return static_cast<const Input<kComponents>*>(base) + head.key_at(s, j + i);
    };
    return components<kComponents>(s, min(kChunk, head.len_k - j), n, to, key_at, may_be_in_place(p));
  };
  for (std::int64_t j = first; j < end; j += kChunk) {
    const std::int64_t at = (j - first) * kComponents;
    const ComponentRows keys = split(p.k, p.k_stride, p.d, j, w.k + at * w.d);
    for (int c = 0; c < kComponents; ++c)
      tile_values<kTileRows>(keys, c * kChunk * w.d, w.d, w.k_t + (at + c * kChunk) * w.d * 2);
    if (!is_in_place<kComponents>(p.v_stride, p.dv) || !may_be_in_place(p) || j + kChunk > head.len_k)
      split(p.v, p.v_stride, p.dv, j, w.v + at * w.dv);
  }
  for (std::int64_t i = 0; i < (end - first + kChunk - 1) / kChunk; ++i) w.started[i] = false;
}

// ---- The products of a chunk of rows and a block of keys.

template <int kComponents>
struct BlockProducts {
  static constexpr std::int64_t kChunkBytes = AttentionBackwardTilesScratch<kComponents>::kChunkBytes;

  const AttentionBackwardParams& p;
  const Head& head;
  const AttentionBackwardTilesScratch<kComponents>& w;
  Tiles& tiles;
  Pending& pending;
  RowChunk* rows;
  std::int64_t count;       // chunks of 32 rows
  std::int64_t key, first;  // first key of the block; of the work item
  std::int64_t key_chunks;  // chunks of 32 keys that exist

  bool sees(std::int64_t r, std::int64_t c) const {
    const std::int64_t from = key + c * kChunk;
    return rows[r].low < from + kChunk && rows[r].high > from;
  }
  std::int64_t at(std::int64_t c) const { return key - first + c * kChunk; }  // relative to the work item's first key
  char* scores_of(std::int64_t c, std::int64_t r) const { return w.scores + (c * kRowChunks + r) * kChunkBytes; }

  template <class Layout = InRows, class Interleaved>
  [[gnu::always_inline]] void multiply(const char* a, std::int64_t a_stride, std::int64_t a_other, const char* b,
                                       const Steps& steps, std::int64_t products, float* start, float* c,
                                       Interleaved&& interleaved) {
    multiply_chunk<false, false, Layout>(tiles, {a, steps.a, a_stride, a_other}, {b, steps.b, 64, kTileBytes}, products,
                                         start, c, pending, interleaved);
  }

  // Computes P and dS of the block. The exponentials of one 32 x 32 chunk are interleaved with the products of the
  // next: `due` grows by `rate` per product, and at kOne a pair of rows is due.
  [[gnu::noinline]] void scores() {
    const bool modified = needs_finish(p.score), has_derivatives = changes_derivative(p.score);
    constexpr std::int64_t kPairs = kTileRows / kMergedRows, kOne = 1 << 16;
    const std::int64_t rate =
        kPairs * kOne / (4 * kScoreProducts<kComponents> * (w.d + w.dv) / kTileDepth - kPendingTiles) + 1;
    ChunkGradients<kComponents> previous;
    std::int64_t due = 0;
    const auto next = [&]() __attribute__((always_inline)) {
      if ((due += rate) < kOne) return;
      due -= kOne;
      if (!previous.is_done()) previous.next_pairs();
    };
    store_pending(tiles, pending, w.discarded);
    // The order of chunks keeps four operands, of two chunks of keys and one of rows, in L1 beside the scores.
    for (std::int64_t step = 0; step < (key_chunks + 1) / 2 * count; ++step)
      for (std::int64_t c = step / count * 2, r = step % count; c < min(step / count * 2 + 2, key_chunks); ++c) {
        if (!sees(r, c)) continue;
        const std::int64_t j = key + c * kChunk;
        float* const s = reinterpret_cast<float*>(scores_of(c, r));
        float* const dp = s + AttentionBackwardTilesScratch<kComponents>::kDsAt / 4;
        const auto operand = [&](const void* base, const Strides& stride, std::int64_t n, const bf16* packed) {
          return key_operand<kComponents>(head, base, stride, n, j, packed + at(c) * padded(n) * kComponents);
        };
        const KeyOperand k = operand(p.k, p.k_stride, p.d, w.k), v = operand(p.v, p.v_stride, p.dv, w.v);
        constexpr std::int64_t kProducts = kScoreProducts<kComponents>;
        multiply<InHalves>(k.base, k.stride, kTileRows * k.stride, w.q_t + r * kComponents * kChunk * w.d * 2, w.of_s,
                           w.d / kTileDepth * kProducts, nullptr, s, next);
        multiply<InHalves>(v.base, v.stride, kTileRows * v.stride, w.dout_t + r * kComponents * kChunk * w.dv * 2,
                           w.of_dp, w.dv / kTileDepth * kProducts, nullptr, dp, next);
        while (!previous.is_done()) previous.next_pairs();
        if (!is_finished(rows[r], j, modified))
          finish(head, rows[r], j, modified, s, has_derivatives ? w.derivatives : nullptr, w.discarded);
        if (has_derivatives || p.grad_alibi) store_pending<InHalves>(tiles, pending, w.discarded);
        if (p.grad_alibi) add_exact_slopes(head, rows[r], j, s, w.zero, w.exact);
        if (has_derivatives) apply_derivatives(rows[r].neg_delta, w.derivatives, dp);
        previous.scores = s, previous.end = s + kTileRows * InHalves::kRow;
        due = -kPendingTiles * rate;
        previous.scale = vec(modified ? 1.f : p.score.scale_log2);
        for (int i = 0; i < kVecsOfChunk; ++i) {
          previous.add[i] = load((modified ? w.zero : rows[r].neg_m) + i * kLanes);
          previous.neg_delta[i] = load((has_derivatives ? w.zero : rows[r].neg_delta) + i * kLanes);
        }
      }
    store_pending<InHalves>(tiles, pending, w.discarded);
    while (!previous.is_done()) previous.next_pairs();
  }

  // The range of row chunks that see one of 32 keys.
  KeyRange rows_of(std::int64_t c) const {
    std::int64_t from = 0, to = count;
    while (from < to && !sees(from, c)) ++from;
    while (to > from && !sees(to - 1, c)) --to;
    return {from, to};
  }
  void mark_started() const {
    for (std::int64_t c = 0; c < key_chunks; ++c)
      if (const auto [from, to] = rows_of(c); from < to) w.started[at(c) / kChunk] = true;
  }

  // sums += A B over the rows that see each 32 keys. A is P or dS, `a_at` bytes after the scores; `b` is dO or Q.
  [[gnu::noinline]] void add_to_keys(std::int64_t a_at, const char* b, const Steps& steps, std::int64_t width,
                                     float* sums) {
    for (std::int64_t c = 0; c < key_chunks; ++c) {
      const auto [from, to] = rows_of(c);
      for (std::int64_t column = 0; from < to && column < width; column += kChunk) {
        float* const sum = sums + at(c) * width + column * kChunk;
        multiply(scores_of(c, from) + a_at, 64, kTileBytes,
                 b + from * kComponents * kChunk * width * 2 + column / kTileRows * kTileBytes, steps,
                 (to - from) * kSumProducts<kComponents>, w.started[at(c) / kChunk] ? sum : nullptr, sum, [] {});
      }
    }
  }

  [[gnu::noinline]] void add_to_rows() {
    for (std::int64_t r = 0; r < count; ++r) {
      std::int64_t from = 0, to = key_chunks;
      while (from < to && !sees(r, from)) ++from;
      while (to > from && !sees(r, to - 1)) --to;
      if (from == to) continue;
      for (std::int64_t column = 0; column < w.d; column += kChunk) {
        float* const sum = rows[r].ot + column * kChunk;
        multiply(w.k_t + at(from) * kComponents * w.d * 2 + column / kTileRows * kTileBytes, 64, kTileBytes,
                 scores_of(from, r) + AttentionBackwardTilesScratch<kComponents>::kDsPairsAt, w.of_dq,
                 (to - from) * kSumProducts<kComponents>, rows[r].started ? sum : nullptr, sum, [] {});
      }
      rows[r].started = true;
    }
  }
};

std::int64_t sums_of_row(std::int64_t d) noexcept {
  return padded(d) + 1;  // dQ^T of 32 rows and each row's sum for dalibi, all chunks' dQ^T first
}

template <int kComponents>
void prepare(const AttentionBackwardParams& p, const Head& head, RowChunk& rows, std::int64_t i,
             const AttentionBackwardTilesScratch<kComponents>& w) {
  // The rows whose bits are set in `zeros` are transposed as 0.
  const auto pack = [&](const void* base, const Strides& s, std::int64_t n, char* transposed, char* pairs,
                        std::uint64_t zeros) {
    const std::int64_t width = padded(n), component = kChunk * width;
    ComponentRows split = components<kComponents>(s, rows.rows, n, w.rows, [&](std::int64_t r) {
      return static_cast<const Input<kComponents>*>(base) + row_at(s, head, rows.row[r]);
    });
    const auto at = [&](int c) { return (i * kComponents + c) * component * 2; };
    for (int c = 0; c < kComponents; ++c) tile_row_pairs(split, c * component, rows.rows, width, pairs + at(c));
    for (; zeros != 0; zeros &= zeros - 1) {
      const std::int64_t r = __builtin_ctzll(zeros);
      for (int c = 0; c < kComponents; ++c) __builtin_memset(w.rows + c * component + r * width, 0, 2 * width);
      split.row[r] = w.rows + r * width;
    }
    for (int c = 0; c < kComponents; ++c) tile_queries(split, c * component, width, width, transposed + at(c));
  };
  pack(p.q, p.q_stride, p.d, w.q_t, w.q, 0);
  pack(p.dout, p.dout_stride, p.dv, w.dout_t, w.dout,
       prepare_rows(p, head, rows.row, kChunk, rows.neg_m, w.neg_delta + i * kChunk));
}

template <int kComponents>
void add_rows(const AttentionBackwardParams& p, const BackwardItem& item, std::int64_t row_begin,
              std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  BumpAllocator allocator(scratch);
  const AttentionBackwardTilesScratch<kComponents> w(allocator, shape_of(p, item));
  const std::int64_t end = min(head.len_q * p.group, row_begin + kRows);
  if (*w.falls_back) {
    const std::int64_t step = vector_kernel().facts.block_q;
    for (std::int64_t r = row_begin; r < end; r += step) vector_kernel().add_rows(p, item, r, w.rest);
    return;
  }
  const auto [first_key, end_key] = keys_of(head, item);
  float* const sums = item.dq_sums ? item.dq_sums + row_begin * sums_of_row(p.d) : w.dq_t;
  RowChunk rows[kRowChunks];
  std::int64_t count = 0, low = INT64_MAX, high = 0;
  for (std::int64_t r = row_begin; r < end; r += kChunk, ++count) {
    RowChunk& chunk = rows[count];
    chunk.vecs = kVecsOfChunk, chunk.width = kChunk, chunk.rows = min(kChunk, end - r);
    chunk.row = w.row + count * kChunk;
    chunk.neg_m = w.neg_m + count * kChunk, chunk.neg_delta = w.neg_delta + count * kChunk;
    chunk.ot = sums + count * kChunk * w.d, chunk.dslope = sums + kRows * w.d + count * kChunk;
    find_rows(head, r, chunk.rows, chunk.row);
    for (std::int64_t i = chunk.rows; i < kChunk; ++i) chunk.row[i] = chunk.row[chunk.rows - 1];
    chunk.low = chunk.first(0), chunk.high = chunk.last(kChunk - 1);
    chunk.started = !item.split && chunk.low < chunk.high && chunk.low < first_key;  // by an earlier work item
    if (chunk.low < chunk.high) low = min(low, chunk.low), high = max(high, chunk.high);
    if (!chunk.started) fill(chunk.dslope, kChunk, 0);
    prepare(p, head, chunk, count, w);
  }
  if (low < high) {
    Tiles tiles;
    Pending pending{w.discarded};
    const FlushDenormals flush;
    for (std::int64_t key = first_key + max(low - first_key, 0) / kBlock * kBlock; key < min(end_key, high);
         key += kBlock) {
      BlockProducts<kComponents> block{p,    head,  w,   tiles,     pending,
                                       rows, count, key, first_key, (min(kBlock, end_key - key) + kChunk - 1) / kChunk};
      block.scores();
      if (p.grad_v) block.add_to_keys(0, w.dout, w.of_dv, w.dv, w.dv_);
      if (p.grad_k) block.add_to_keys(AttentionBackwardTilesScratch<kComponents>::kDsAt, w.q, w.of_dk, w.d, w.dk);
      if (p.grad_q) block.add_to_rows();
      block.mark_started();
    }
    store_pending(tiles, pending, w.discarded);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    RowChunk& chunk = rows[i];
    if (!chunk.started) fill(chunk.ot, w.d * kChunk, 0);
    chunk.started = true;
    // Rows without keys end with the others of their block.
    const std::int64_t last = chunk.low < chunk.high ? chunk.high : high;
    const bool is_last = low < high ? end_key >= last : item.key_begin == 0 || first_key == end_key;
    if (item.split || !is_last) continue;
    if (p.grad_q) store_rows(p.grad_q, head, chunk, p.d, p.scale);
    if (item.sink_sums || item.slope_sums) store_row_sums(p, head, chunk, chunk.neg_delta, chunk.dslope, item);
  }
}

template <int kComponents>
void end(const AttentionBackwardParams& p, const BackwardItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  BumpAllocator allocator(scratch);
  const AttentionBackwardTilesScratch<kComponents> w(allocator, shape_of(p, item));
  if (*w.falls_back) return vector_kernel().end(p, item, w.rest);
  const auto [first, last] = keys_of(head, item);
  for (std::int64_t j = 0; j < last - first; j += kChunk)
    if (!w.started[j / kChunk]) fill(w.dk + j * w.d, kChunk * w.d, 0), fill(w.dv_ + j * w.dv, kChunk * w.dv, 0);
  const auto chunks = [](const float* sums, std::int64_t width) {
    return [=](std::int64_t key, std::int64_t c) -> KeySums { return {sums + key * width + c * kChunk, kChunk}; };
  };
  if (item.pool) return add_to_pool(p, head, item, chunks(w.dk, w.d), chunks(w.dv_, w.dv));
  if (p.grad_k) store_keys(p.grad_k, head, item, p.d, p.scale, chunks(w.dk, w.d));
  if (p.grad_v) store_keys(p.grad_v, head, item, p.dv, 1, chunks(w.dv_, w.dv));
}

}  // namespace

// The vector kernel computes the gradient of the bias.
std::size_t bias_scratch_bytes(const BackwardShape& shape) noexcept {
  return vector_kernel().bias_scratch_bytes(shape);
}
void add_bias(const AttentionBackwardParams& p, const BiasItem& item, std::byte* scratch) noexcept {
  vector_kernel().add_bias(p, item, scratch);
}

namespace {
template <int kComponents>
constexpr AttentionBackwardKernel kernel(const char* arithmetic, DType dtype) {
  return {.facts = {.operation = Operation::attention_backward,
                    .phase = Phase::all,
                    .arithmetic = arithmetic,
                    .dtypes = set_of(dtype),
                    .block_q = kRows,
                    .block_k = kBlock},
          .sums_of_row = sums_of_row,
          .scratch_bytes = bytes_of<AttentionBackwardTilesScratch<kComponents>>,
          .begin = begin<kComponents>,
          .add_rows = add_rows<kComponents>,
          .end = end<kComponents>,
          .bias_scratch_bytes = bias_scratch_bytes,
          .bias_rows = kChunkRows,
          .add_bias = add_bias};
}
}  // namespace

extern constexpr AttentionBackwardKernel kAttentionBackward = kernel<1>("bf16", DType::bf16);
#if defined(RAPT_HAVE_TILES)
extern constexpr AttentionBackwardKernel kAttentionBackwardF16x3 = kernel<2>("f16x3", DType::f16);
#endif

}  // namespace rapt::cpu::RAPT_ISA
