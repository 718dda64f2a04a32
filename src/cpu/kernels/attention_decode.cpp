// attention_decode: the same function as attention_prefill for a few query rows, bound by reading K and V from memory:
// 2 (d + dv) FLOPs a row and key, one pass over the cache for all rows (tokens x group).
//
//   for each block of keys that some row sees             K and V rows in place, or dequantised to fp32 in scratch
//     for each panel of kLanes rows
//       S[key][row] = q . k                               lanes along d
//       finish the scores, move m, P = 2^(scale S - m)    lanes along rows, as in attention_prefill; along several
//                                                         keys' where rows are few
//       O[row] += P V                                     lanes along dv
//
// During each product the rows needed next are prefetched: this block's values and the next block's keys; where rows
// are packed, the next block's keys and values. Scales of whole rows multiply scores and weights instead of elements.
#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/carver.hpp"
#include "cpu/tile/decode_products.hpp"
#include "cpu/tile/decode_scores.hpp"
#include "cpu/tile/dropout.hpp"
#include "cpu/tile/epilogue.hpp"
#include "cpu/tile/pack.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kMaxRows = 64, kMaxPanels = kMaxRows / kLanes;

// Keys of a block: half of them where rows are long, so that K and V of a block stay in L1 or L2. By the problem alone,
// since sums are taken by blocks.
std::int64_t block_keys(const AttentionParams& p) {
  return p.kv_type == DType::f32 && p.d + p.dv > 256 ? kKeysOfBlock / 2 : kKeysOfBlock;
}

struct Scratch {
  Row* row;
  // Q in tiles, as DotsTile has them; O, [rows][dv], padded to whole vectors: of this run of blocks, and of those
  // before.
  float *q, *o, *total, *neg_m, *l, *l_low;
  float *q_row, *scaled_row;  // of q, on its way; of keys
  // [keys][stride of the panel's scores], with room for those that a tile computes past the last key; what they were
  // before they became weights; [kLanes][kLanes]; [kLanes].
  float *s, *scores_before, *sums, *block_max, *block_max_exponent, *zero;
  float *k, *v;  // a block's rows, where they are packed
  RowScales k_scales, v_scales;
  std::int64_t q_stride, o_stride;

  Scratch(Carver& carver, const AttentionShape& shape) {
    const std::int64_t rows = round_up(shape.rows, kLanes);
    q_stride = round_up(shape.d, kLanes), o_stride = round_up(shape.dv, kLanes);
    row = carver.take<Row>(rows);
    q = carver.take<float>(rows * q_stride);
    q_row = carver.take<float>(q_stride), scaled_row = carver.take<float>(q_stride);
    o = carver.take<float>(rows * o_stride);
    total = carver.take<float>(rows * o_stride);
    neg_m = carver.take<float>(rows);
    l = carver.take<float>(rows);
    l_low = carver.take<float>(rows);
    s = carver.take<float>((kKeysOfBlock + kMostKeysOfTile) * kLanes);
    scores_before = carver.take<float>(kKeysOfBlock * kLanes);
    sums = carver.take<float>(kLanes * kLanes);
    for (float** lanes : {&block_max, &block_max_exponent, &zero}) *lanes = carver.take<float>(kLanes);
    k = carver.take<float>(kKeysOfBlock * q_stride);
    v = carver.take<float>(kKeysOfBlock * o_stride);
    k_scales = take_scales(carver, q_stride), v_scales = take_scales(carver, o_stride);
  }
  static RowScales take_scales(Carver& carver, std::int64_t n) {
    const std::int64_t count = round_up(n, kLeastGroup) / kLeastGroup * kKeysOfBlock + kMostKeysOfTile;
    float* const scale = carver.take<float>(count);
    return {scale, carver.take<float>(count), 0};
  }
};

// One scale for a row, and nothing else: it multiplies scores or weights.
bool one_scale_per_row(const Quantization& quant, std::int64_t n) {
  return quant.scale && !quant.zero && quant.group == n;
}

class Item {
 public:
  Item(const AttentionParams& p, const WorkItem& item, std::byte* scratch, bool packed)
      : p_(p),
        item_(item),
        head_(p, item),
        carver_(scratch),
        w_(carver_, {p.sk, p.d, p.dv, item.row_end - item.row_begin}),
        packed_(packed),
        shared_(packed && p.dv >= kLanes && begin_with_values(p) && !one_scale_per_row(p.k_quant, p.d) &&
                !one_scale_per_row(p.v_quant, p.dv) && !deinterleaves_keys()),
        k_products_(products_of_rows(keys_of(p))),
        v_products_(products_of_rows(values_of(p))),
        d_(max(p.d, kLanes)),
        dv_(max(p.dv, kLanes)) {
    for (std::int64_t j = 0; packed && j < kKeysOfBlock; ++j) {
      packed_k_[j] = reinterpret_cast<const std::byte*>(w_.k + j * w_.q_stride);
      packed_v_[j] = reinterpret_cast<const std::byte*>(w_.v + j * w_.o_stride);
    }
  }

  void run() {
    const std::int64_t row_end = min(item_.row_end, head_.len_q * p_.group);
    store(w_.zero, vec(0.f));
    std::int64_t count = 0;
    for (std::int64_t r = item_.row_begin; r < row_end; r += kLanes) make_panel(count++, r, min(kLanes, row_end - r));
    sweep(0, count, false);
    for (std::int64_t i = 0; i < count; ++i) {
      // O has the order of the values that it sums: those in place are deinterleaved, isolated ones are not.
      const bool deinterleaved = p_.kv_type == DType::bf16 && !packed_;
      if (!store_rows(i, deinterleaved)) [[unlikely]] {
        start(i);
        sweep(i, i + 1, true);
        store_rows(i, false);
      }
      store_lse(head_, panels_[i]);
    }
  }

 private:
  // Rows of a block, indexed by key.
  struct Block {
    std::int64_t k0, from, end;  // keys; those before `from` must not be read, since their pages may not exist
    const std::byte *k[kKeysOfBlock], *v[kKeysOfBlock], *tail[kKeysOfBlock];
  };

  // Keys of bf16, and queries, are deinterleaved where they are packed, too: sums, and bits, are the same.
  bool deinterleaves_keys() const { return p_.kv_type == DType::bf16; }

  const Products& products_of_rows(const KeyRows& rows) const {
    if (packed_) return products_of(DType::f32);
    const bool groups = rows.quant.scale && !one_scale_per_row(rows.quant, rows.n);
    return groups ? products_of_groups(p_.kv_type, rows.quant.zero) : products_of(p_.kv_type);
  }

  void make_panel(std::int64_t i, std::int64_t r, std::int64_t rows) {
    const std::int64_t at = i * kLanes;
    float* const partial = item_.partial ? item_.partial + at * partial_floats(p_.dv) : nullptr;
    panels_[i] = {.vecs = 1,
                  .width = kLanes,
                  .rows = rows,
                  .row = w_.row + at,
                  .neg_m = w_.neg_m + at,
                  .l = w_.l + at,
                  .l_low = w_.l_low + at,
                  .partial = partial};
    Panel& panel = panels_[i];
    find_rows(head_, r, rows, panel.row);
    for (std::int64_t lane = rows; lane < kLanes; ++lane) panel.row[lane] = panel.row[rows - 1];
    // Few rows share a vector with several keys, unless modifiers or dropout follow, which take one key to a vector.
    std::int64_t& stride = score_stride_[i] = kLanes;
    while (stride / 2 >= rows && !needs_finish(p_.score) && !p_.score.dropout.given) stride /= 2;
    for (std::int64_t lane = stride; lane < kLanes; ++lane) panel.row[lane] = panel.row[lane - stride];
    with_row_tiles(rows, [&](auto tile_rows, std::int64_t r0) {
      for (int lane = 0; lane < tile_rows; ++lane) {
        with_float_type(p_.q_type, [&](auto element) {
          const auto* q = static_cast<const decltype(element)*>(p_.q);
          pack_row(q + row_at(p_.q_stride, head_, panel.row[r0 + lane]), p_.q_stride.d, p_.d, w_.q_row);
        });
        if (deinterleaves_keys()) deinterleave(w_.q_row, p_.d);
        float* q = w_.q + (at + r0) * w_.q_stride + lane * kLanes;
        for (std::int64_t c = 0; c < d_; c += kLanes, q += tile_rows * kLanes) {
          store(q, c + kLanes <= d_ ? load(w_.q_row + c) : load_tail(w_.q_row, d_));
        }
      }
    });
    start(i);
  }
  void start(std::int64_t i) {
    reset(head_, panels_[i]);
    // Three rows are a tile of four, which adds to a row more than there is.
    for (float* rows : {o(i), total(i)}) fill(rows, round_up(panels_[i].rows, kRowsOfTile) * w_.o_stride, 0);
  }
  float* q(std::int64_t panel) const { return w_.q + panel * kLanes * w_.q_stride; }
  float* o(std::int64_t panel) const { return w_.o + panel * kLanes * w_.o_stride; }
  float* total(std::int64_t panel) const { return w_.total + panel * kLanes * w_.o_stride; }
  // A run of blocks joins the panel's total, which is the output after the last.
  void join_total(std::int64_t panel) const {
    for (std::int64_t c = 0; c < panels_[panel].rows * w_.o_stride; c += kLanes) {
      store(total(panel) + c, load(total(panel) + c) + load(o(panel) + c));
      store(o(panel) + c, vec(0.f));
    }
  }

  // Finds the rows of keys [from, end) of the block at k0.
  void find_block(Block& block, std::int64_t k0, std::int64_t from, std::int64_t end) const {
    block.k0 = k0, block.from = from, block.end = end;
    find_rows_of(p_.k, p_.k_stride, p_.kv_type, block, block.k);
    find_rows_of(p_.v, p_.v_stride, p_.kv_type, block, block.v);
    if (p_.k_tail.size > 0) find_rows_of(p_.k_tail.data, p_.k_tail.stride, p_.k_tail.type, block, block.tail);
  }
  void find_rows_of(const void* data, Strides stride, DType type, const Block& block, const std::byte** row) const {
    for (std::int64_t* of_dim : {&stride.b, &stride.h, &stride.s}) *of_dim *= unit_bytes(type);
    const auto* const base = static_cast<const std::byte*>(data);
    row += block.from - block.k0;
    head_.for_each_run(stride, block.from, block.end - block.from, [&](auto i, auto end, auto at) {
      for (; i < end; ++i, at += stride.s) row[i] = base + at;
    });
  }
  Prefetcher prefetch_keys(const Block* block) const {
    if (!block) return {nullptr, 0, 0};
    return {block->k + (block->from - block->k0), block->end - block->from,
            bytes_of(p_.kv_type, p_.d - p_.k_tail.size)};
  }
  Prefetcher prefetch_values(const Block* block) const {
    if (!block || (shared_ && p_.k_tail.size == 0)) return {nullptr, 0, 0};
    if (shared_)  // they are there with the keys, but for what these have elsewhere
      return {block->tail + (block->from - block->k0), block->end - block->from,
              bytes_of(p_.k_tail.type, p_.k_tail.size)};
    return {block->v + (block->from - block->k0), block->end - block->from, bytes_of(p_.kv_type, p_.dv)};
  }

  // Packs the block's keys or values, or finds the scales that those in place are read with.
  void load_block(const Block& block, const KeyRows& rows, float* packed, std::int64_t stride,
                  RowScales& scales) const {
    const Quantization& quant = rows.quant;
    const bool one_scale = one_scale_per_row(quant, rows.n);
    const std::int64_t first = block.from - block.k0, n = block.end - block.from;
    if (packed_) pack_keys(head_, rows, block.from, n, packed + first * stride, stride, !one_scale);
    if (!quant.scale || (packed_ && !one_scale)) return;
    scales.shift = __builtin_ctzll(static_cast<std::uint64_t>(quant.group));
    const auto copy = [&](const float* from, const Strides& of, float* to) {
      for (std::int64_t group = 0; group < rows.n / quant.group; ++group, from += of.d, to += kKeysOfBlock)
        head_.for_each_run(of, block.from, n, [&](auto i, auto end, auto at) {
          for (; i < end; ++i, at += of.s) to[first + i] = from[at];
        });
    };
    copy(quant.scale, quant.scale_stride, scales.scale);
    if (quant.zero) copy(quant.zero, quant.zero_stride, scales.zero);
  }

  // Rows as the products read them.
  const std::byte* const* keys(const Block& block) const { return packed_ ? packed_k_ : block.k; }
  const std::byte* const* values(const Block& block) const {
    return !packed_ ? block.v : shared_ ? packed_k_ : packed_v_;
  }

  // Panels [begin, end) over all keys that any of them sees.
  void sweep(std::int64_t begin, std::int64_t end, bool isolate_non_finite) {
    const std::int64_t first = panels_[begin].first(0), last = panels_[end - 1].last(kLanes - 1);
    if (first >= last) return;
    Block blocks[2];
    Block *now = &blocks[0], *next = &blocks[1];
    const std::int64_t keys = block_keys(p_), k0 = first / keys * keys;
    find_block(*now, k0, first, min(k0 + keys, last));
    for (std::int64_t k = k0; k < last; k += keys) {
      const bool more = k + keys < last;
      if (more) find_block(*next, k + keys, k + keys, min(k + 2 * keys, last));
      load_block(*now, keys_of(p_), w_.k, w_.q_stride, w_.k_scales);
      for (std::int64_t j = now->from; packed_ && deinterleaves_keys() && j < now->end; ++j)
        deinterleave(w_.k + (j - now->k0) * w_.q_stride, p_.d);
      if (!shared_) load_block(*now, values_of(p_), w_.v, w_.o_stride, w_.v_scales);
      const Block* const after = more ? next : nullptr;
      prefetch_with_dots_ = packed_ ? prefetch_keys(after) : prefetch_values(now);
      prefetch_with_values_ = packed_ ? prefetch_values(after) : prefetch_keys(after);
      const bool run_ends = k > k0 && (k - head_.low / keys * keys) % (kRunBlocks * keys) == 0;
      for (std::int64_t i = begin; i < end; ++i) {
        if (run_ends) join_total(i);
        visit(i, *now, isolate_non_finite);
      }
      Block* const done = now;
      now = next, next = done;
    }
    for (std::int64_t i = begin; i < end; ++i) join_total(i);
  }

  // w_.s = the final scores of keys [begin, end) of the block, as to_exponents() has them, w_.block_max their maxima.
  // Returns false if all are masked.
  bool score(std::int64_t i, const Block& block, const DecodeScores& scores) {
    const Panel& panel = panels_[i];
    const auto [s, stride, begin, end] = scores;
    k_products_.dots(panel.rows, q(i), w_.q_stride, d_, keys(block), w_.k_scales, begin, end, s, stride,
                     prefetch_with_dots_);
    if (one_scale_per_row(p_.k_quant, p_.d)) {
      scores.multiply(w_.k_scales.scale);
      for (std::int64_t j = begin; j < end; ++j)
        if (const float scale = w_.k_scales.scale[j]; scale - scale != 0) [[unlikely]]
          dot_scaled_row(i, block, j, s + j * stride);
    }
    if (needs_finish(p_.score)) {
      scores.clear_rest(panel.rows);
      store(w_.block_max, minus_infinity());
      return finish_scores<true>(head_, panel, 0, block.k0, begin, end, s, w_.block_max);
    }
    if (panel.first(kLanes - 1) > block.k0 + begin || panel.last(0) < block.k0 + end) scores.mask(panel, block.k0);
    scores.clear_rest(panel.rows);
    store(w_.block_max, scores.maximum());
    return true;
  }

  // The scores of key j, whose scale is not finite: elements of +inf and -inf, or 0 * inf, add up to NaN.
  [[gnu::noinline, gnu::cold]] void dot_scaled_row(std::int64_t i, const Block& block, std::int64_t j,
                                                   float* scores) const {
    float* const row = w_.scaled_row;
    for (std::int64_t c = 0; c < d_; c += kLanes) {
      alignas(64) float codes[kLanes];
      k_products_.widen(keys(block)[j], w_.k_scales, j, column_of(c, d_), codes);
      store_any(row + column_of(c, d_), load(codes) * vec(w_.k_scales.scale[j]));
    }
    const auto* const scaled = reinterpret_cast<const std::byte*>(row);
    alignas(64) float s[kMostKeysOfTile * kLanes];
    Prefetcher none{nullptr, 0, 0};
    products_of(DType::f32).dots(panels_[i].rows, q(i), w_.q_stride, d_, &scaled, w_.k_scales, 0, 1, s, kLanes, none);
    for (std::int64_t r = 0; r < panels_[i].rows; ++r) scores[r] = s[r];
  }

  void visit(std::int64_t i, const Block& block, bool isolate_non_finite) {
    const FlushDenormals flush;
    const Panel& panel = panels_[i];
    const std::int64_t begin = clamp(panel.first(0) - block.k0, block.from - block.k0, block.end - block.k0);
    const std::int64_t end = clamp(panel.last(kLanes - 1) - block.k0, begin, block.end - block.k0);
    const DecodeScores scores{w_.s, score_stride_[i], begin, end};
    if (begin == end || !score(i, block, scores)) return;
    const std::int64_t from = scores.from(), to = scores.to();
    ToExponents exponents = to_exponents(p_.score, panel, w_.zero);
    apply(exponents, kLanes, w_.block_max, w_.block_max_exponent);
    if (any_must_move(panel, w_.block_max_exponent)) [[unlikely]] {  // as in attention_prefill
      move_m_and_o(i, from, from);
      if (needs_finish(p_.score)) score(i, block, scores);
      apply(exponents, kLanes, w_.block_max, w_.block_max_exponent);
      if (any_must_move(panel, w_.block_max_exponent)) {
        for (std::int64_t x = from; x < to; x += kLanes) apply(exponents, kLanes, w_.s + x, w_.s + x);
        exponents = {1, w_.zero};
        move_m_and_o(i, from, to);
      }
    }
    for (std::int64_t x = from; isolate_non_finite && x < to; x += kLanes) store(w_.scores_before + x, load(w_.s + x));
    add_to_sum(panel, 0, scores.to_weights(exponents, w_.sums));
    if (p_.score.dropout.given) drop_weights(head_, panel.row, block.k0, begin, end, kLanes, w_.s);
    if (one_scale_per_row(p_.v_quant, p_.dv)) scores.multiply(w_.v_scales.scale);
    if (isolate_non_finite) add_isolating_non_finite(i, block, begin, end);
    else
      v_products_.add(panel.rows, w_.s, scores.stride, values(block), w_.v_scales, dv_, begin, end, o(i), w_.o_stride,
                      prefetch_with_values_);
  }

  // Moves m of the lanes that must, and with it O, and the scores in vectors from `from` to `to` (none if equal).
  [[gnu::noinline, gnu::cold]] void move_m_and_o(std::int64_t i, std::int64_t from, std::int64_t to) const {
    const Panel& panel = panels_[i];
    const vec block_max = load(w_.block_max_exponent);
    const vec step = xsimd::select(must_move(block_max, load(panel.l)), xsimd::ceil(block_max), vec(0.f));
    alignas(64) float factor[kLanes];
    store(factor, raise_m(panel, 0, step));
    for (std::int64_t x = from; x < to; x += kLanes) store(w_.s + x, load(w_.s + x) - step);
    for (std::int64_t r = 0; r < panel.rows; ++r)
      for (float* rows : {o(i), total(i)})
        rescale(rows + r * w_.o_stride, kLanes, w_.o_stride / kLanes, vec(factor[r]));
  }

  // The same sums where a value may be NaN or infinite: those masked or dropped are left out, and others are not
  // multiplied by a weight that may have become 0.
  [[gnu::noinline, gnu::cold]] void add_isolating_non_finite(std::int64_t i, const Block& block, std::int64_t begin,
                                                             std::int64_t end) const {
    const float* const scale = one_scale_per_row(p_.v_quant, p_.dv) ? w_.v_scales.scale : nullptr;
    for (std::int64_t r = 0; r < panels_[i].rows; ++r)
      for (std::int64_t c = 0; c < w_.o_stride; c += kLanes) {
        vec acc(0.f), endless(0.f);
        for (std::int64_t j = begin; j < end; ++j) {
          const std::int64_t at = j * score_stride_[i] + r;
          if (w_.scores_before[at] == -__builtin_inff()) continue;
          alignas(64) float value[kLanes];
          v_products_.widen(values(block)[j], w_.v_scales, j, column_of(c, dv_), value);
          const vec x = load(value), factor(scale ? scale[j] : 1.f);
          const auto finite = (x - x == vec(0.f)) & (factor - factor == vec(0.f));
          const vec weight = xsimd::select(finite, vec(w_.s[at]), vec(0.f));  // it has the factor
          acc = fma(weight, xsimd::select(finite, x, vec(0.f)), acc);
          if (is_dropped(p_.score, place_of(head_, panels_[i].row[r], block.k0 + j))) continue;
          endless = endless + xsimd::select(finite, vec(0.f), x * factor);
        }
        float* const sum = o(i) + r * w_.o_stride + c;
        store(sum, load(sum) + acc + endless);
      }
  }

  // Stores the panel's rows of O / l, or their partial results. Returns false if some number is not finite: then a
  // masked value may have leaked into it (0 * inf).
  bool store_rows(std::int64_t i, bool deinterleaved) const {
    const Panel& panel = panels_[i];
    settle_sum(panel);
    vec poison(0.f);
    for (std::int64_t r = 0; r < panel.rows; ++r) {
      float* const from = total(i) + r * w_.o_stride;
      if (deinterleaved) reinterleave(from, p_.dv);
      const float l = panel.l[r];
      if (panel.partial) {
        float* const partial = panel.partial + r * partial_floats(p_.dv);
        store_row(partial, 1, from, vec(1.f), poison);
        partial[p_.dv] = panel.neg_m[r], partial[p_.dv + 1] = l;
        continue;
      }
      const vec scale(l == 0 ? 0.f : 1 / l);  // a row without keys is 0
      with_float_type(p_.out_type, [&](auto element) {
        auto* const out = static_cast<decltype(element)*>(p_.out) + row_at(p_.out_stride, head_, panel.row[r]);
        store_row(out, p_.out_stride.d, from, scale, poison);
      });
    }
    return xsimd::all(poison == vec(0.f));
  }
  template <class Out>
  void store_row(Out* out, std::int64_t inner, const float* from, vec scale, vec& poison) const {
    for (std::int64_t c = 0; c < w_.o_stride; c += kLanes) {
      const vec x = load(from + c) * scale;
      poison = fma(x, vec(0.f), poison);
      const std::int64_t at = column_of(c, dv_);
      store_strided(out + at * inner, inner, min(kLanes, p_.dv - at), x);
    }
  }

  const AttentionParams& p_;
  const WorkItem& item_;
  Head head_;
  Carver carver_;
  Scratch w_;
  bool packed_, shared_;
  const Products &k_products_, &v_products_;
  const std::byte *packed_k_[kKeysOfBlock], *packed_v_[kKeysOfBlock];
  std::int64_t d_, dv_;  // of rows as the products read them: at least a whole vector
  Panel panels_[kMaxPanels];
  std::int64_t score_stride_[kMaxPanels];  // of the panel's scores, from key to key: a power of two up to kLanes
  Prefetcher prefetch_with_dots_{nullptr, 0, 0},
      prefetch_with_values_{nullptr, 0, 0};  // what to prefetch during each product
};

// Elements in place save a pass over them. Packed are rows too short or strided for whole vectors, those in groups that
// the products do not take, and elements that would be widened for too many tiles of rows.
bool must_pack(const AttentionParams& p, std::int64_t rows) {
  const auto in_place = [&](const Quantization& quant, std::int64_t n) {
    return !quant.scale || one_scale_per_row(quant, n) || has_products_of_groups(p.kv_type, quant, n);
  };
  if (!in_place(p.k_quant, p.d) || !in_place(p.v_quant, p.dv)) return true;
  // Widening costs most of e4m3, and of all that is dequantised where vectors are short.
  const bool dequantized = p.kv_type == DType::i4x2 || p.k_quant.group < p.d || p.v_quant.group < p.dv;
  const std::int64_t tiles = p.kv_type == DType::f8e4m3 || (kLanes < 8 && dequantized) ? 1 : 4;
  return p.k_stride.d != 1 || p.v_stride.d != 1 || p.d < kLanes || p.dv < kLanes || p.k_tail.size > 0 ||
         (p.kv_type != DType::f32 && rows > tiles * kMostRowsOfTile);
}

void run(const AttentionParams& p, const WorkItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  Item(p, item, scratch, must_pack(p, item.row_end - item.row_begin)).run();
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
                                          .scratch_bytes = carved_bytes<Scratch>,
                                          .run = run};

}  // namespace rapt::cpu::RAPT_ISA
