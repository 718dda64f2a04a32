// The gradient of attention's bias: dS, summed over the dimensions that the bias broadcasts over. The kernel computes
// scores once more, and for each piece of the bias goes over batch and heads, so that sums have one order and each
// piece has one writer.
#include "cpu/kernels/backward_chunk.hpp"
#include "cpu/tile/bump_allocator.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

struct AttentionBackwardBiasScratch {
  Row* row;
  float *qt, *dout_t, *s, *ds, *sum, *neg_m, *neg_delta;  // all query blocks
  float *k, *v;                                           // a block of keys, packed
  float *zero, *discarded;

  AttentionBackwardBiasScratch(BumpAllocator& allocator, std::int64_t d, std::int64_t dv) {
    row = allocator.take<Row>(kChunkRows);
    qt = allocator.take<float>(kChunkRows * d);
    dout_t = allocator.take<float>(kChunkRows * dv);
    s = allocator.take<float>(kChunkRows * kBlockK);
    ds = allocator.take<float>(kChunkRows * kBlockK);
    sum = allocator.take<float>(kChunkRows * kBlockK);
    neg_m = allocator.take<float>(kChunkRows);
    neg_delta = allocator.take<float>(kChunkRows);
    k = allocator.take<float>(kBlockK * packed_stride(d));
    v = allocator.take<float>(kBlockK * packed_stride(dv));
    zero = allocator.take<float>(kWidth);
    discarded = allocator.take<float>(kWidth);
  }
};

// sum[q_block][key][lane] += dS of tokens [first, first + rows) of a query head, as far as the sequence has them, and
// the block of n keys at k0.
void add_scores(const AttentionBackwardParams& p, const Head& head, std::int64_t q_head, std::int64_t first,
                std::int64_t rows, std::int64_t k0, std::int64_t n, const AttentionBackwardBiasScratch& w) {
  GradQueryBlock q_blocks[kChunkQueryBlocks + 1];
  const std::int64_t there = min(rows, head.len_q - first);
  const std::int64_t count = make_query_blocks(rows, q_blocks, [&](GradQueryBlock& q_block, std::int64_t r) {
    const std::int64_t lane = q_block.lane;
    q_block.row = w.row + lane;
    q_block.qt = w.qt + lane * p.d, q_block.dout_t = w.dout_t + lane * p.dv;
    q_block.s = w.s + lane * kBlockK, q_block.ds = w.ds + lane * kBlockK;
    q_block.neg_m = w.neg_m + lane, q_block.neg_delta = w.neg_delta + lane;
    // Lanes without a row see no key. The lanes of a sum must not depend on where the rows of a sequence end.
    q_block.rows = q_block.width;
    for (std::int64_t i = 0; i < q_block.width; ++i) {
      q_block.row[i] = row_of(head, first + min(r + i, there - 1), q_head);
      if (r + i >= there) q_block.row[i].first = q_block.row[i].last;
    }
  });
  const KvBlock kb = kv_block(head, {p.k, p.k_stride, p.k_quant, p.d}, k0, k0, k0 + n, must_pack_keys_twice(p), w.k);
  const KvBlock vb = kv_block(head, {p.v, p.v_stride, p.v_quant, p.dv}, k0, k0, k0 + n, must_pack_value_rows(p), w.v);
  for (std::int64_t i = 0; i < count; ++i) {
    GradQueryBlock& q_block = q_blocks[i];
    if (q_block.first(0) >= q_block.last(q_block.width - 1)) continue;
    prepare_query_block(p, head, q_block);
    const FlushDenormals flush;
    with_vecs(q_block.vecs, [&](auto vecs) {
      if (!score<vecs>(head, q_block, k0, n, kb, vb, w.discarded)) return;
      differentiate<vecs>(head, q_block, k0, w.zero);
      const BlockSegments& c = q_block.segments;
      for (std::int64_t v = 0; v < vecs; ++v)
        for (std::int64_t j = c.begin; j < c.end[v]; ++j) {
          const std::int64_t at = j * q_block.width + v * kLanes;
          float* const to = w.sum + q_block.lane * kBlockK + at;
          store(to, load(to) + load(q_block.ds + at));
        }
    });
  }
}

// Adds the sums of a block's other keys to those of its first.
void add_keys(const AttentionBackwardBiasScratch& w, std::int64_t rows) {
  static_assert((kBlockK & (kBlockK - 1)) == 0);
  GradQueryBlock q_blocks[kChunkQueryBlocks + 1];
  const std::int64_t count = make_query_blocks(
      rows, q_blocks, [&](GradQueryBlock& q_block, std::int64_t) { q_block.row = w.row + q_block.lane; });
  for (std::int64_t i = 0; i < count; ++i) {
    float* const sum = w.sum + q_blocks[i].lane * kBlockK;
    const std::int64_t width = q_blocks[i].width;
    for (std::int64_t n = kBlockK / 2 * width; n >= width; n /= 2)
      for (std::int64_t at = 0; at < n; at += kLanes) store(sum + at, load(sum + at) + load(sum + n + at));
  }
}

// Stores the rows of the sums as the gradient; with `one_row`, their sum over rows.
void store_sums(const AttentionBackwardParams& p, const BiasItem& item, bool one_row, std::int64_t rows,
                std::int64_t keys, const AttentionBackwardBiasScratch& w) {
  const Gradient& to = p.grad_bias;
  with_float_type(to.type, [&](auto element) {
    auto* const base = static_cast<decltype(element)*>(to.data) + item.b * to.stride.b + item.h * to.stride.h +
                       item.key_begin * to.stride.d;
    GradQueryBlock q_blocks[kChunkQueryBlocks + 1];
    const std::int64_t count = make_query_blocks(
        rows, q_blocks, [&](GradQueryBlock& q_block, std::int64_t) { q_block.row = w.row + q_block.lane; });
    vec total[kBlockK / kLanes];
    for (vec& x : total) x = vec(0.f);
    for (std::int64_t i = 0; i < count; ++i)
      for (std::int64_t lane = 0; lane < q_blocks[i].width; lane += kLanes)
        for (std::int64_t j0 = 0; j0 < keys; j0 += kLanes) {
          vec r[kLanes];
          for (int j = 0; j < kLanes; ++j)
            r[j] = load(w.sum + q_blocks[i].lane * kBlockK + (j0 + j) * q_blocks[i].width + lane);
          transpose(r);
          for (std::int64_t row = 0; row < kLanes; ++row) {
            const std::int64_t at = q_blocks[i].lane + lane + row;
            if (one_row) total[j0 / kLanes] = total[j0 / kLanes] + r[row];
            else if (at < rows)
              store_strided(base + (item.row_begin + at) * to.stride.s + j0 * to.stride.d, to.stride.d,
                            min(kLanes, keys - j0), r[row]);
          }
        }
    for (std::int64_t j0 = 0; one_row && j0 < keys; j0 += kLanes)
      store_strided(base + j0 * to.stride.d, to.stride.d, min(kLanes, keys - j0), total[j0 / kLanes]);
  });
}

}  // namespace

std::size_t bias_scratch_bytes(const BackwardShape& shape) noexcept {
  return bytes_of<AttentionBackwardBiasScratch>(shape.d, shape.dv);
}

void add_bias(const AttentionBackwardParams& p, const BiasItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  BumpAllocator allocator(scratch);
  const AttentionBackwardBiasScratch w(allocator, p.d, p.dv);
  fill(w.sum, kChunkRows * kBlockK, 0);
  fill(w.zero, kWidth, 0);
  const bool one_row = p.grad_bias_q == 1, one_key = p.grad_bias_k == 1;
  const std::int64_t rows = one_row ? kChunkRows : min(kChunkRows, p.grad_bias_q - item.row_begin);
  for (std::int64_t b = p.grad_bias_b == 1 ? 0 : item.b; b < (p.grad_bias_b == 1 ? p.b : item.b + 1); ++b)
    for (std::int64_t h = p.grad_bias_h == 1 ? 0 : item.h; h < (p.grad_bias_h == 1 ? p.hq : item.h + 1); ++h) {
      const Head head(p, {b, h / p.group, 0, 0, 0, INT64_MAX, nullptr});
      const std::int64_t end = one_row ? head.len_q : min(item.row_begin + rows, head.len_q);
      const std::int64_t key_end = one_key ? head.len_k : min(item.key_begin + kBlockK, head.len_k);
      for (std::int64_t k0 = item.key_begin; k0 < key_end; k0 += kBlockK)
        for (std::int64_t r = item.row_begin; r < end; r += kChunkRows)
          add_scores(p, head, h, r, rows, k0, min(kBlockK, key_end - k0), w);
    }
  if (one_key) add_keys(w, rows);
  store_sums(p, item, one_row, rows, min(kBlockK, p.grad_bias_k - item.key_begin), w);
}

}  // namespace rapt::cpu::RAPT_ISA
