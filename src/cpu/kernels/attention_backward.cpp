// attention_backward in fp32: dq, dk, dv from q, k, v, out, lse and dout; no S x S matrix. Lanes are queries, as in
// attention_prefill, whose products and scores it shares; for few queries they are columns, as in attention_decode.
//
// A work item is a range of keys of one kv head. Its dK and dV stay in scratch while the query rows pass in chunks:
//
//   for each chunk of rows that sees some of the keys        Q^T, dO^T in query blocks; Q, dO in strips; delta of each
//   row
//     for each block of kBlockK keys in the range
//       for each query block of `width` rows
//         S^T = K Q^T, dP^T = V dO^T                         4 kBlockK width (d + dv) bytes of K, V from L1 and L2
//         P^T = 2^(scale S^T - lse), dS^T = P^T (dP^T - delta)
//         dQ^T += K^T dS^T
//       dV += P^T dO, dK += dS^T Q
//
// dK and dV are summed over rows chunk by chunk, the last chunk first, and dQ over blocks of keys in order. Chunks and
// blocks begin at multiples of their sizes. So neither threads nor the way keys are divided into work items changes
// bits. If a head has several work items, dQ is in the workspace, and its items process a chunk one after another; if
// the items are splits, each has a dQ of its own.
#include "cpu/kernels/backward_chunk.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kMaxTile =
    16;  // rows of the largest register tile: keys are cleared and multiplied in multiples of it

// A strip: the columns of dK and dV that are computed together. Strips have equal numbers of vectors, as far as
// possible.
struct Strips {
  std::int64_t vecs, count;  // vectors of all columns; number of strips

  explicit Strips(std::int64_t n) : vecs((n + kLanes - 1) / kLanes), count((vecs + kVecs - 1) / kVecs) {}
  std::int64_t begin(std::int64_t i) const { return vecs * i / count; }  // in vectors
  std::int64_t floats() const { return vecs * kLanes; }                  // of a row
};

// State of a work item between its chunks.
struct ItemState {
  bool finite_keys;
};

struct AttentionBackwardScratch {
  ItemState* state;
  bool* started;               // [blocks of keys] whether dk and dv of the block hold sums; garbage until then
  float *dk, *dv;              // [keys of the item][Strips::floats()]
  float *k, *v;                // the item's keys and values, where they must be packed
  float* clean_k;              // a block of keys with non-finite elements replaced by 0
  Row* row;                    // [chunk]
  float *qt, *dout_t, *dqt;    // all query blocks, back to back
  float *q, *dout;             // strips: [strip][row of the chunk][vectors of the strip]
  float *s, *ds, *derivative;  // all query blocks
  float *neg_m, *neg_delta;
  float *zero, *discarded;  // a row of zeros, a row that is written, never read
  FewRows few_rows;

  AttentionBackwardScratch(BumpAllocator& allocator, const BackwardShape& p) {
    const std::int64_t padded = round_up(max(p.keys, 1), kBlockK);
    state = allocator.take<ItemState>(1);
    started = allocator.take<bool>(padded / kBlockK);
    dk = allocator.take<float>(padded * Strips(p.d).floats());
    dv = allocator.take<float>(padded * Strips(p.dv).floats());
    k = allocator.take<float>(padded * packed_stride(p.d));
    v = allocator.take<float>(padded * packed_stride(p.dv));
    clean_k = allocator.take<float>(kBlockK * packed_stride(p.d));
    row = allocator.take<Row>(kChunkRows);
    qt = allocator.take<float>(kChunkRows * p.d);
    dout_t = allocator.take<float>(kChunkRows * p.dv);
    dqt = allocator.take<float>(kChunkRows * (p.d + 1));
    q = allocator.take<float>(kChunkRows * Strips(p.d).floats());
    dout = allocator.take<float>(kChunkRows * Strips(p.dv).floats());
    s = allocator.take<float>(kChunkRows * kBlockK);
    ds = allocator.take<float>(kChunkRows * kBlockK);
    derivative = allocator.take<float>(p.has_derivatives ? kChunkRows * kBlockK : 0);
    neg_m = allocator.take<float>(kChunkRows);
    neg_delta = allocator.take<float>(kChunkRows);
    zero = allocator.take<float>(kWidth);
    discarded = allocator.take<float>(kWidth);
    few_rows = FewRows(allocator, p.d, p.dv);
  }
};

// ---- The products that are not attention_prefill's: dst[key][c] += sum over rows of p[key][row] x[row][c].

template <int kW>
struct GradTile {
  const GradQueryBlock* q_blocks;
  std::int64_t count;
  float* GradQueryBlock::*p;  // P or dS
  std::int64_t key;
  const float* x;     // the strip: rows of kW vectors
  const float* base;  // the sums so far, in rows of base_stride; or, with 0, one row of zeros
  std::int64_t base_stride;
  float* dst;
  std::int64_t dst_stride;

  template <int kR, int kV>
  [[gnu::always_inline]] void run() const {
    static_assert(kV == kW);
    vec acc[kR][kV];
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) acc[i][v] = vec(0.f);
    for (std::int64_t i = 0; i < count; ++i) {
      const GradQueryBlock& q_block = q_blocks[i];
      accumulate<0, kW>(acc, q_block.*p + key * q_block.width, q_block.width, 1, x + q_block.lane * kW * kLanes, 0,
                        q_block.rows);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v)
        store(dst + i * dst_stride + v * kLanes, load(base + i * base_stride + v * kLanes) + acc[i][v]);
  }
  [[gnu::always_inline]] void advance(int rows) {
    key += rows, base += rows * base_stride, dst += rows * dst_stride;
  }
};

// The keys of a block that a query block reads, [first_of(), last_of()), widened to whole tiles. P and dS are 0 in the
// added keys.
std::int64_t first_of(const GradQueryBlock& q_block) {
  return q_block.segments.begin / kMaxTile * kMaxTile;
}
std::int64_t last_of(const GradQueryBlock& q_block, std::int64_t n) {
  return q_block.segments.count == 0 ? 0 : min(round_up(q_block.segments.end[q_block.vecs - 1], kMaxTile), n);
}

// dst += P^T dO or dS^T Q, for n keys of the block. `zero`: a row of zeros if dst has no sums yet, else null.
void add_products(const GradQueryBlock* q_blocks, std::int64_t count, float* GradQueryBlock::*p, const float* x,
                  Strips strips, std::int64_t n, float* dst, const float* zero) {
  for (std::int64_t i = 0; i < strips.count; ++i) {
    const std::int64_t begin = strips.begin(i), vecs = strips.begin(i + 1) - begin;
    const float* strip = x + begin * kLanes * kChunkRows;
    for (std::int64_t key = 0; key < n;) {
      // Panels that look at these keys; both ends rise from query block to query block.
      std::int64_t a = 0, b = count;
      while (a < count && last_of(q_blocks[a], n) <= key) ++a;
      while (b > a && (q_blocks[b - 1].segments.count == 0 || first_of(q_blocks[b - 1]) > key)) --b;
      std::int64_t stop = n;
      for (std::int64_t q_block = 0; q_block < count; ++q_block)
        for (const std::int64_t edge : {first_of(q_blocks[q_block]), last_of(q_blocks[q_block], n)})
          if (q_blocks[q_block].segments.count != 0 && edge > key) stop = min(stop, edge);
      bool visible = false;
      for (std::int64_t q_block = a; q_block < b; ++q_block) visible |= q_blocks[q_block].visible;
      float* const sums = dst + key * strips.floats() + begin * kLanes;
      if (visible)
        with_vecs(vecs, [&](auto v) {
          tiles<v>(GradTile<v>{q_blocks + a, b - a, p, key, strip, zero ? zero : sums, zero ? 0 : strips.floats(), sums,
                               strips.floats()},
                   stop - key);
        });
      else if (zero)
        for (std::int64_t j = key; j < stop; ++j) fill(sums + (j - key) * strips.floats(), vecs * kLanes, 0);
      key = stop;
    }
  }
}

// ---- Chunks of rows.

// Packs rows of n elements into strips. Returns whether all elements are finite. With `clean`, elements that are not
// finite become 0.
template <class T>
[[gnu::noinline]] bool pack_strips(const T* base, const Strides& strides, std::int64_t n, const Head& head,
                                   const GradQueryBlock* q_blocks, std::int64_t count, bool clean, float* dst) {
  const Strips strips(n);
  vec poison(0.f);
  for (std::int64_t i = 0; i < count; ++i)
    for (std::int64_t r = 0; r < q_blocks[i].rows; ++r) {
      const T* const src = base + row_at(strides, head, q_blocks[i].row[r]);
      const std::int64_t lane = q_blocks[i].lane + r;
      for (std::int64_t strip = 0; strip < strips.count; ++strip) {
        const std::int64_t begin = strips.begin(strip), vecs = strips.begin(strip + 1) - begin;
        float* const to = dst + begin * kLanes * kChunkRows + lane * vecs * kLanes;
        for (std::int64_t v = 0; v < vecs; ++v) {
          const std::int64_t c = (begin + v) * kLanes;
          vec x = load_repeated(src + c * strides.d, strides.d, min(kLanes, n - c));
          poison = fma(x, vec(0.f), poison);
          if (clean) x = xsimd::select(x - x == vec(0.f), x, vec(0.f));
          store(to + v * kLanes, x);
        }
      }
    }
  return xsimd::all(poison == vec(0.f));
}

// ---- A query block and a block of keys.

// Clears P and dS of keys that the query block does not read, as far as the tiles of add_products() reach.
void clear_around(const GradQueryBlock& q_block, std::int64_t n) {
  const BlockSegments& c = q_block.segments;
  const std::int64_t first = first_of(q_block), last = last_of(q_block, n);
  for (std::int64_t v = 0; v < q_block.vecs; ++v)
    for (float* base : {q_block.s, q_block.ds}) {
      float* const lane = base + v * kLanes;
      const std::int64_t begin = q_block.visible ? c.begin : last, end = q_block.visible ? max(c.end[v], begin) : last;
      for (std::int64_t j = first; j < begin; ++j) store(lane + j * q_block.width, vec(0.f));
      for (std::int64_t j = end; j < last; ++j) store(lane + j * q_block.width, vec(0.f));
    }
}

// Adds dS to the sums of ALiBi's slopes, and then multiplies it by the score's derivative: bias and slopes get the
// gradient of the final score, q and k that of the scaled q.k.
void finish_modifiers(const Head& head, const GradQueryBlock& q_block, std::int64_t k0,
                      const AttentionBackwardParams& p) {
  const BlockSegments& c = q_block.segments;
  for (std::int64_t v = 0; v < q_block.vecs; ++v) {
    if (p.grad_alibi) add_to_slopes(head, q_block, v, k0, c.begin, c.end[v], q_block.ds, q_block.dslope);
    for (std::int64_t j = c.begin; q_block.derivative && j < c.end[v]; ++j) {
      const std::int64_t at = j * q_block.width + v * kLanes;
      const vec d = load(q_block.ds + at);
      store(q_block.ds + at, xsimd::select(d == vec(0.f), d, d * load(q_block.derivative + at)));
    }
  }
}

// Non-finite elements of q, k and dout are left out of the products, where weights of 0 would make them NaN, and are
// added here to the gradients of what sees them. Scores must be final and not yet exponentiated.
[[gnu::noinline, gnu::cold]] void add_non_finite(const AttentionBackwardParams& p, const Head& head,
                                                 const GradQueryBlock& q_block, std::int64_t k0, std::int64_t n,
                                                 KvBlock kb, float* dk, float* dv) {
  for (std::int64_t i = 0; i < q_block.rows; ++i) {
    const Row& row = q_block.row[i];
    const auto sees = [&](std::int64_t j) {
      return k0 + j >= row.first && k0 + j < row.last && q_block.s[j * q_block.width + i] != -kInfinity;
    };
    for (std::int64_t j = q_block.segments.begin; j < n; ++j) {
      if (!sees(j)) continue;
      const bool kept = !p.score.dropout.given || !is_dropped(p.score, {head.b, row.q_head, row.token, k0 + j});
      for (std::int64_t c = 0; c < p.d; ++c) {
        const float q = q_block.qt[c * q_block.width + i], k = kb.data[j * kb.stride + c];
        if (q - q != 0.f) dk[j * Strips(p.d).floats() + c] += q;
        if (k - k != 0.f && p.grad_q) q_block.ot[c * q_block.width + i] += k;
      }
      for (std::int64_t c = 0; c < p.dv; ++c)
        if (const float x = q_block.dout_t[c * q_block.width + i]; x - x != 0.f && kept)
          dv[j * Strips(p.dv).floats() + c] += x;
    }
  }
}

template <int kW>
void add_block_gradients(const AttentionBackwardParams& p, const Head& head, GradQueryBlock& q_block, std::int64_t k0,
                         std::int64_t n, KvBlock kb, KvBlock vb, KvBlock clean, bool finite, float* dk, float* dv,
                         const AttentionBackwardScratch& w) {
  q_block.visible = score<kW>(head, q_block, k0, n, kb, vb, w.discarded);
  if (!q_block.visible) return clear_around(q_block, n);
  const BlockSegments& c = q_block.segments;
  if (!finite) {
    if (!q_block.started) fill(q_block.ot, p.d * q_block.width, 0);
    q_block.started = true;
    add_non_finite(p, head, q_block, k0, n, kb, dk, dv);
  }
  differentiate<kW>(head, q_block, k0, w.zero);
  if (p.grad_alibi || q_block.derivative) finish_modifiers(head, q_block, k0, p);
  if (p.grad_q && q_block.few) {
    if (!q_block.started) fill(q_block.ot, p.d * q_block.width, 0);
    add_few_to_rows(q_block, p.d, clean, c.begin, c.end[0]);
    q_block.started = true;
  } else if (p.grad_q) {
    std::int64_t keys[kW];
    for (int v = 0; v < kW; ++v) keys[v] = max(c.end[v] - c.begin, 0);
    tiles<kW>(
        OutputTile<kW>{clean.data + c.begin * clean.stride, clean.stride, q_block.ds + c.begin * q_block.width, keys,
                       q_block.started ? q_block.ot : w.zero, q_block.started ? q_block.width : 0, q_block.ot},
        p.d);
    q_block.started = true;
  }
  clear_around(q_block, n);
}

// ---- Items.

void begin(const AttentionBackwardParams& p, const BackwardItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  const ItemKeys keys = keys_of(head, item);
  BumpAllocator allocator(scratch);
  const AttentionBackwardScratch w(allocator, shape_of(p, item));
  fill(w.zero, kWidth, 0);
  vec poison(0.f);
  for (std::int64_t k0 = keys.begin; k0 < keys.end; k0 += kBlockK) {
    const std::int64_t n = min(kBlockK, keys.end - k0), at = k0 - keys.begin;
    w.started[at / kBlockK] = false;
    const KvBlock kb = kv_block(head, {p.k, p.k_stride, p.k_quant, p.d}, k0, k0, k0 + n, must_pack_keys_twice(p),
                                w.k + at * packed_stride(p.d));
    kv_block(head, {p.v, p.v_stride, p.v_quant, p.dv}, k0, k0, k0 + n, must_pack_value_rows(p),
             w.v + at * packed_stride(p.dv));
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t c = 0; c < p.d; c += kLanes)
        poison = fma(load_strided(kb.data + j * kb.stride + c, 1, min(kLanes, p.d - c)), vec(0.f), poison);
  }
  w.state->finite_keys = xsimd::all(poison == vec(0.f));
}

// Clears dK and dV of the n keys from the item's key `at` on, a block, if they hold no sums yet.
void clear_unless_started(const AttentionBackwardScratch& w, const AttentionBackwardParams& p, std::int64_t at,
                          std::int64_t n) {
  bool& started = w.started[at / kBlockK];
  if (started) return;
  fill(w.dk + at * Strips(p.d).floats(), n * Strips(p.d).floats(), 0);
  fill(w.dv + at * Strips(p.dv).floats(), n * Strips(p.dv).floats(), 0);
  started = true;
}

// A block of the work item's keys, in place or as begin() packed it.
KvBlock prepared(const Head& head, const KeyRows& rows, std::int64_t k0, std::int64_t first, bool packed, float* data) {
  if (packed) return {data + (k0 - first) * packed_stride(rows.n), packed_stride(rows.n)};
  return {static_cast<const float*>(rows.base) + head.key_at(rows.strides, k0), rows.strides.s};
}

std::int64_t sums_of_row(std::int64_t d) noexcept {
  return d + 1;
}

void add_rows(const AttentionBackwardParams& p, const BackwardItem& item, std::int64_t row_begin,
              std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  const ItemKeys keys = keys_of(head, item);
  BumpAllocator allocator(scratch);
  const AttentionBackwardScratch w(allocator, shape_of(p, item));
  const std::int64_t rows = min(kChunkRows, head.len_q * p.group - row_begin);

  GradQueryBlock q_blocks[kChunkQueryBlocks + 1];
  float* const sums = item.dq_sums ? item.dq_sums + row_begin * sums_of_row(p.d) : w.dqt;
  const std::int64_t count = make_query_blocks(rows, q_blocks, [&](GradQueryBlock& q_block, std::int64_t r) {
    const std::int64_t lane = q_block.lane;
    q_block.row = w.row + lane;
    q_block.qt = w.qt + lane * p.d, q_block.dout_t = w.dout_t + lane * p.dv;
    q_block.ot = sums + lane * (p.d + 1), q_block.dslope = q_block.ot + p.d * q_block.width;
    q_block.s = w.s + lane * kBlockK, q_block.ds = w.ds + lane * kBlockK;
    q_block.derivative = changes_derivative(p.score) ? w.derivative + lane * kBlockK : nullptr;
    q_block.neg_m = w.neg_m + lane, q_block.neg_delta = w.neg_delta + lane;
    find_rows(head, row_begin + r, q_block.rows, q_block.row);
  });
  const std::int64_t first = q_blocks[0].first(0), last = q_blocks[count - 1].last(q_blocks[count - 1].width - 1);
  const bool sees = first < last;
  const bool is_first = item.split || !sees || keys.begin <= first;
  const bool is_last = !item.split && (!sees || keys.end >= last);

  for (std::int64_t i = 0; i < count; ++i) {
    GradQueryBlock& q_block = q_blocks[i];
    prepare_query_block(p, head, q_block);
    if (q_block.rows <= kFewRows && p.d >= kLanes && p.dv >= kLanes) put_few_rows(p, q_block, w.few_rows);
    q_block.started = !is_first;
    if (is_first) fill(q_block.dslope, q_block.width, 0);
  }
  const auto strips = [&](const void* base, DType type, const Strides& strides, std::int64_t n, float* to) {
    return with_float_type(type, [&](auto e) {
      const auto* typed = static_cast<const decltype(e)*>(base);
      const bool finite = pack_strips(typed, strides, n, head, q_blocks, count, false, to);
      if (!finite) pack_strips(typed, strides, n, head, q_blocks, count, true, to);
      return finite;
    });
  };
  const bool finite_q = strips(p.q, p.q_type, p.q_stride, p.d, w.q);
  const bool finite_dout = strips(p.dout, p.dout_type, p.dout_stride, p.dv, w.dout);
  const bool finite = finite_q && finite_dout && w.state->finite_keys;

  for (std::int64_t k0 = keys.begin + max(first - keys.begin, 0) / kBlockK * kBlockK; sees && k0 < min(keys.end, last);
       k0 += kBlockK) {
    const FlushDenormals flush;
    const std::int64_t n = min(kBlockK, keys.end - k0), at = k0 - keys.begin;
    const KvBlock kb = prepared(head, {p.k, p.k_stride, p.k_quant, p.d}, k0, keys.begin, must_pack_keys_twice(p), w.k);
    const KvBlock vb = prepared(head, {p.v, p.v_stride, p.v_quant, p.dv}, k0, keys.begin, must_pack_value_rows(p), w.v);
    KvBlock clean = kb;
    if (!w.state->finite_keys) {
      clean = {w.clean_k, packed_stride(p.d)};
      for (std::int64_t j = 0; j < n; ++j)
        for (std::int64_t c = 0; c < p.d; c += kLanes) {
          const vec x = load_strided(kb.data + j * kb.stride + c, 1, min(kLanes, p.d - c));
          store(w.clean_k + j * clean.stride + c, xsimd::select(x - x == vec(0.f), x, vec(0.f)));
        }
    }
    float* const dk = w.dk + at * Strips(p.d).floats();
    float* const dv = w.dv + at * Strips(p.dv).floats();
    if (!finite) clear_unless_started(w, p, at, n);
    for (std::int64_t i = 0; i < count; ++i)
      with_vecs(q_blocks[i].vecs, [&](auto vecs) {
        add_block_gradients<vecs>(p, head, q_blocks[i], k0, n, kb, vb, clean, finite, dk, dv, w);
      });
    bool& started = w.started[at / kBlockK];
    const float* const zero = started ? nullptr : w.zero;
    if (p.grad_v) add_products(q_blocks, count, &GradQueryBlock::s, w.dout, Strips(p.dv), n, dv, zero);
    if (p.grad_k) add_products(q_blocks, count, &GradQueryBlock::ds, w.q, Strips(p.d), n, dk, zero);
    started = true;
  }

  for (std::int64_t i = 0; i < count; ++i) {
    GradQueryBlock& q_block = q_blocks[i];
    if (!q_block.started) fill(q_block.ot, p.d * q_block.width, 0);
    if (!is_last) continue;  // the next work item continues these sums
    if (p.grad_q) store_rows(p.grad_q, head, q_block, p.d, p.scale);
    if (item.sink_sums || item.slope_sums) store_row_sums(p, head, q_block, q_block.neg_delta, q_block.dslope, item);
  }
}

void end(const AttentionBackwardParams& p, const BackwardItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  const Head head(p, all_rows(item));
  BumpAllocator allocator(scratch);
  const AttentionBackwardScratch w(allocator, shape_of(p, item));
  const ItemKeys keys = keys_of(head, item);
  for (std::int64_t at = 0; at < keys.end - keys.begin; at += kBlockK)
    clear_unless_started(w, p, at, min(kBlockK, keys.end - keys.begin - at));
  const auto rows = [](const float* sums, std::int64_t n) {
    return [=](std::int64_t key, std::int64_t c) -> KeySums {
      return {sums + key * Strips(n).floats() + c, Strips(n).floats()};
    };
  };
  if (item.pool) return add_to_pool(p, head, item, rows(w.dk, p.d), rows(w.dv, p.dv));
  if (p.grad_k) store_keys(p.grad_k, head, item, p.d, p.scale, rows(w.dk, p.d));
  if (p.grad_v) store_keys(p.grad_v, head, item, p.dv, 1, rows(w.dv, p.dv));
}

}  // namespace

const AttentionBackwardKernel kAttentionBackward = {.facts = {.operation = Operation::attention_backward,
                                                              .phase = Phase::all,
                                                              .arithmetic = "f32",
                                                              .dtypes = kFloatTypes,
                                                              .dropout = true,
                                                              .block_q = static_cast<int>(kChunkRows),
                                                              .block_k = static_cast<int>(kBlockK)},
                                                    .sums_of_row = sums_of_row,
                                                    .scratch_bytes = bytes_of<AttentionBackwardScratch>,
                                                    .begin = begin,
                                                    .add_rows = add_rows,
                                                    .end = end,
                                                    .bias_scratch_bytes = bias_scratch_bytes,
                                                    .bias_rows = kChunkRows,
                                                    .add_bias = add_bias};

}  // namespace rapt::cpu::RAPT_ISA
