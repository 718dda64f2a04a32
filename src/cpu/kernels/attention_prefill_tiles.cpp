// attention_prefill by products of bf16 planes, fp32 sums: out = softmax(score(q k^T)) v on the matrix unit, or in
// vectors that multiply pairs of bf16 (only bf16 is faster there).
//
//   bf16   one plane, one product: P is rounded to bf16
//   f16x3  two planes, three products: exact for fp16 inputs, P to 16 bits
//   f32x6  three planes, six products: fp32; opt-in
//   f32x3  two planes, three products of fp32 inputs: 16 bits; opt-in
//
// As in attention_prefill.cpp lanes and tile columns are queries: S^T = K Q^T, P^T = 2^(S^T scale - m), O^T += V^T P^T.
//
//   for each range of keys whose planes fit L2                 K and V are split into planes, which stay for the next
//                                                              item; bf16 keys in whole cache lines are read in place
//     for each panel of 32 rows, for each block of keys        a visit
//       S^T = K Q^T                      tiles                 while the vectors exponentiate the visit before
//       mask, or finish the scores                             partial blocks only
//       P^T = 2^(S^T scale - m)          vectors               while the tiles do the two others
//       O^T += V^T P^T                   tiles                 while the vectors exponentiate the visit after
//
// P is written over S. O is summed per range, then joined. Rows with a query that planes cannot hold (Inf, NaN, numbers
// the matrix unit takes for 0), that see such a key or value, or whose output is not finite, go to the vector kernel.
#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/carver.hpp"
#include "cpu/tile/epilogue.hpp"
#include "cpu/tile/exponentials.hpp"
#include "cpu/tile/matrix.hpp"
#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// The kernel for all types and rows that components do not hold.
const AttentionKernel& prefill_kernel(const IsaKernels& kernels) {
  const AttentionKernel* const* row = kernels.attention;
  while ((*row)->facts.phase != Phase::prefill) ++row;
  return **row;
}
#if defined(RAPT_AMX_MODEL)
const AttentionKernel& vector_kernel() {
  return prefill_kernel(RAPT_AMX_MODEL::kKernels);
}
#else
const AttentionKernel& vector_kernel() {
  return prefill_kernel(avx512::kKernels);
}
#endif

constexpr std::int64_t kRows = kChunk, kKeys = kBlockKeys, kMaxPanels = 32;

// Products of planes (of one operand, of the other): all but those below the last bit.
constexpr int kPlane[3][6][2] = {{{0, 0}}, {{0, 0}, {0, 1}, {1, 0}}, {{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {2, 0}}};
constexpr int products(int planes) {
  return planes == 1 ? 1 : planes == 2 ? 3 : 6;
}

// Keys whose planes of K and V take 1 MiB: half of the L2 of Xeons with AMX, all of Zen 4's, where fewer were no
// faster. Of fp32 fewer: rounding grows with the sums within a range.
template <int kPlanes>
std::int64_t range_keys(std::int64_t d, std::int64_t dv) noexcept {
  d = round_up(d, kTileDepth), dv = round_up(dv, kChunk);
  const std::int64_t fit = (std::int64_t{1} << 20) / (2 * kPlanes * (d + dv)) / 256 * 256;
  return clamp(fit, 256, kPlanes == 3 ? 256 : 4096);
}

// Where the rows of 32 keys lie, and bytes from one to the next.
struct KeyTiles {
  const char* row;
  std::int64_t stride;
};

// Keys [first, last) of the range from `begin` on are in the planes.
struct Packed {
  std::int64_t begin, first, last;
};

template <int kPlanes>
struct Scratch {
  std::int64_t d, dv, keys;  // padded to tiles; of a range
  // From item to item, so before all that depends on the number of rows:
  Packed* packed;
  bf16* k;                 // [plane][keys][d]
  KeyTiles* k_tiles;       // [keys / 32]: in `k`, or in place
  char* v;                 // [plane][keys / 32][dv / 16] tiles
  std::uint32_t* unusual;  // [keys / 32]: a bit for every key that has no planes
  // Of the item:
  Row* row;
  char* qt;                               // [panel][plane][d / 32][2] tiles
  float *ot, *total, *neg_m, *l, *l_low;  // [panel][dv][32], [panel][32]
  char* s[2];                             // scores, weights over them; a third plane of weights behind
  float *partial, *unused;                // O of a range; 32 x 32 floats nobody wants
  float* top;                             // -inf: the row sees none of the block's keys
  bf16* rows;                             // 32 on their way into tiles, [plane][32][d or dv]
  std::int32_t *k_offset, *q_offset, *v_offset, *p_offset;  // of products
  std::byte* vector;                                        // the vector kernel's

  Scratch(Carver& carver, const AttentionShape& shape) {
    d = round_up(shape.d, kTileDepth), dv = round_up(shape.dv, kChunk);
    keys = min(range_keys<kPlanes>(d, dv), round_up(max(shape.sk, 1), kKeys));
    packed = carver.take<Packed>(1);
    k = carver.take<bf16>(kPlanes * keys * d);
    k_tiles = carver.take<KeyTiles>(keys / kTileDepth);
    v = carver.take<char>(kPlanes * v_plane());
    unusual = carver.take<std::uint32_t>(keys / kTileDepth);
    const std::int64_t panels = (shape.rows + kRows - 1) / kRows;
    row = carver.take<Row>(panels * kRows);
    qt = carver.take<char>(panels * q_bytes());
    ot = carver.take<float>(panels * kRows * dv);
    total = carver.take<float>(joins(shape) ? panels * kRows * dv : 0);
    neg_m = carver.take<float>(panels * kRows);
    l = carver.take<float>(panels * kRows);
    l_low = carver.take<float>(panels * kRows);
    for (char*& scores : s) scores = carver.take<char>(kScoreBytes * (kPlanes == 3 ? 2 : 1));
    partial = carver.take<float>(dv * kRows);
    unused = carver.take<float>(kChunk * kChunk);
    top = carver.take<float>(kRows);
    rows = carver.take<bf16>(kPlanes * kRows * max(d, dv));
    const std::int64_t depth = d / kTileDepth;
    k_offset = carver.take<std::int32_t>(products(kPlanes) * depth);
    q_offset = carver.take<std::int32_t>(products(kPlanes) * depth);
    v_offset = carver.take<std::int32_t>(products(kPlanes) * (kKeys / kTileDepth));
    p_offset = carver.take<std::int32_t>(products(kPlanes) * (kKeys / kTileDepth));
    vector = carver.take<std::byte>(
        static_cast<std::int64_t>(vector_kernel().scratch_bytes({shape.sk, shape.d, shape.dv, kRows})));
  }
  // Sums of ranges are long enough to cost fp32 its last bits.
  bool joins(const AttentionShape& shape) const { return kPlanes == 3 && shape.sk + keys > kRunBlocks * keys; }
  std::int64_t q_bytes() const { return kPlanes * kRows * d * 2; }
  std::int64_t v_plane() const { return keys * dv * 2; }

  void fill_offsets() const {
    const std::int64_t depth = d / kTileDepth;
    constexpr int n = products(kPlanes);
    for (int i = 0; i < n; ++i) {
      const int x = kPlane[kPlanes - 1][i][0], y = kPlane[kPlanes - 1][i][1];
      for (std::int64_t j = 0; j < depth; ++j) {
        k_offset[j * n + i] = static_cast<std::int32_t>((x * keys * d + j * kTileDepth) * 2);
        q_offset[j * n + i] = static_cast<std::int32_t>((y * depth + j) * 2 * kTileBytes);
      }
      for (int j = 0; j < kKeys / kTileDepth; ++j) {
        v_offset[j * n + i] = static_cast<std::int32_t>(x * v_plane() + j * kTileDepth * dv * 2);
        p_offset[j * n + i] = static_cast<std::int32_t>(weights_at(y) + j * kTileDepth * kRowBytes);
      }
    }
  }
};

// A panel against the block of keys at `at` within the range.
struct Visit {
  std::int64_t panel;
  std::int64_t at;
  std::int64_t chunks;  // of 32 keys, up to the last that some row sees
  bool partial;         // some row does not see all of its keys, or scores have terms
  bool first, last;     // of the panel in this range
};

template <int kPlanes>
class Item {
 public:
  Item(const AttentionParams& p, const WorkItem& item, std::byte* scratch)
      : p_(p), item_(item), head_(p, item), carver_(scratch), w_(carver_, shape(p, item)) {}

  void run() {
    if (!item_.same_keys) *w_.packed = {-1, 0, 0};
    make_panels();
    if (count_ == 0) return;
    w_.fill_offsets();
    Tiles tiles;
    const std::int64_t first = panels_[0].first(0), last = panels_[count_ - 1].last(kRows - 1);
    for (std::int64_t begin = first / w_.keys * w_.keys; first < last && begin < last; begin += w_.keys) {
      const std::int64_t from = max(first, begin), to = min(last, begin + w_.keys);
      const Packed& packed = *w_.packed;
      if (packed.begin != begin || packed.first > from || packed.last < to) pack_range(begin, from, to);
      leave_unusual(begin, from, to);
      const bool run_ends = (begin - head_.low / w_.keys * w_.keys) % (kRunBlocks * w_.keys) == 0;
      if (kPlanes == 3 && run_ends)
        for (std::int64_t i = 0; i < count_; ++i) join(panels_[i], w_.dv);
      sweep(tiles, begin);
    }
    for (std::int64_t i = 0; i < count_; ++i) {
      finish_joining(panels_[i], w_.dv);
      finish(i);
    }
  }

  static AttentionShape shape(const AttentionParams& p, const WorkItem& item) {
    return {p.sk, p.d, p.dv, item.row_end - item.row_begin};
  }

 private:
  using E = Exponentials<kPlanes>;

  void make_panels() {
    const std::int64_t row_end = min(item_.row_end, head_.len_q * p_.group);
    for (std::int64_t r = item_.row_begin; r < row_end; r += kRows, ++count_) {
      const std::int64_t at = count_ * kRows;
      const Panel panel{.vecs = kVecsOfRow,
                        .width = kRows,
                        .rows = min(kRows, row_end - r),
                        .row = w_.row + at,
                        .ot = w_.ot + at * w_.dv,
                        .total = w_.total + at * w_.dv,
                        .neg_m = w_.neg_m + at,
                        .l = w_.l + at,
                        .l_low = w_.l_low + at,
                        .partial = partial(r)};
      find_rows(head_, r, panel.rows, panel.row);
      for (std::int64_t i = panel.rows; i < kRows; ++i) panel.row[i] = panel.row[panel.rows - 1];
      panels_[count_] = panel;
      reset(head_, panels_[count_]);
      for (int i = 0; i < kVecsOfRow; ++i) {
        raise_reference(panel, i * kLanes, vec(E::kHeadroom));
        far_[count_] |= xsimd::any(far(panel, i));  // a sink may be
      }
      const std::int64_t plane = kRows * w_.d;
      const PlaneRows planes = with_element(p_.q_type, [&](auto type) {
        const auto* q = static_cast<const decltype(type)*>(p_.q);
        const auto row_of = [&](std::int64_t i) { return q + row_at(p_.q_stride, head_, panel.row[i]); };
        return split_rows<kPlanes, UsualFactor<kPlanes>>(row_of, p_.q_stride.d, panel.rows, p_.d, w_.d, w_.rows, plane,
                                                         true);
      });
      const bool usual_scale = __builtin_fabsf(p_.score.scale_log2) < 0x1p60f;
      redo_[count_] = usual_scale ? planes.unusual : all_rows(count_);
      for (int i = 0; i < kPlanes; ++i) tile_queries(planes, i * plane, w_.d, qt(count_) + i * plane * 2);
    }
  }
  float* partial(std::int64_t row) const {
    return item_.partial ? item_.partial + (row - item_.row_begin) * partial_floats(p_.dv) : nullptr;
  }
  char* qt(std::int64_t panel) const { return w_.qt + panel * w_.q_bytes(); }

  // Splits keys [first, last) of the range at `begin` into planes, and values into tiles of planes.
  void pack_range(std::int64_t begin, std::int64_t first, std::int64_t last) {
    for (std::int64_t key = first / kKeys * kKeys; key < last; key += kTileDepth) {
      const std::int64_t rows = min(kTileDepth, last - key), at = key - begin, plane = kTileDepth * w_.dv;
      std::uint32_t& unusual = w_.unusual[at / kTileDepth];
      const PlaneRows values = with_element(p_.kv_type, [&](auto type) {
        const auto *k = static_cast<const decltype(type)*>(p_.k), *v = static_cast<const decltype(type)*>(p_.v);
        // Keys before the first are nobody's to read (their pages may not be there): that one stands for them.
        const auto k_row = [&](std::int64_t i) { return k + head_.key_at(p_.k_stride, max(key + i, first)); };
        const auto v_row = [&](std::int64_t i) { return v + head_.key_at(p_.v_stride, max(key + i, first)); };
        const PlaneRows keys =
            split_rows<kPlanes, UsualFactor<kPlanes>>(k_row, p_.k_stride.d, rows, p_.d, w_.d, w_.k + at * w_.d,
                                                      w_.keys * w_.d, key >= first && are_lines(k_row(0), key));
        w_.k_tiles[at / kTileDepth] = {reinterpret_cast<const char*>(keys.row[0]), 2 * (keys.row[1] - keys.row[0])};
        unusual = keys.unusual;
        return split_rows<kPlanes, UsualValue<kPlanes>>(v_row, p_.v_stride.d, rows, p_.dv, w_.dv, w_.rows, plane, true);
      });
      for (int i = 0; i < kPlanes; ++i) tile_values(values, i * plane, w_.dv, w_.v + i * w_.v_plane() + at * w_.dv * 2);
      unusual |= values.unusual;
    }
    *w_.packed = {begin, first, last};
  }

  // To the vector kernel: rows that see a key without planes.
  void leave_unusual(std::int64_t begin, std::int64_t first, std::int64_t last) {
    for (std::int64_t key = first / kTileDepth * kTileDepth; key < last; key += kTileDepth) {
      const std::uint32_t unusual = w_.unusual[(key - begin) / kTileDepth];
      for (std::int64_t i = 0; unusual != 0 && i < kTileDepth; ++i)
        if (unusual >> i & 1) leave_rows_that_see(key + i);
    }
  }

  // Whether 32 keys from `key` on, whose rows begin at `row`, lie back to back in whole cache lines. (Of rows apart, as
  // in [b, s, h, d], a range would fall into few of the cache's sets.)
  bool are_lines(const void* row, std::int64_t key) const {
    return p_.k_stride.s == w_.d && reinterpret_cast<std::uintptr_t>(row) % 64 == 0 &&
           head_.in_one_piece(key, kTileDepth);
  }

  [[gnu::noinline, gnu::cold]] void leave_rows_that_see(std::int64_t key) {
    for (std::int64_t i = 0; i < count_; ++i)
      for (std::int64_t r = 0; r < panels_[i].rows; ++r) {
        const Row& row = panels_[i].row[r];
        if (key < row.first || key >= row.last) continue;
        if (is_masked(p_.score, place_of(head_, row, key))) continue;
        if (has_infinite_bias(row, key)) continue;
        redo_[i] |= std::uint32_t{1} << r;
      }
  }
  bool has_infinite_bias(const Row& row, std::int64_t key) const {
    const ScoreParams& s = p_.score;
    if (!s.bias) return false;
    return number_at(s.bias, s.bias_type, modifier_index(s.bias_stride, place_of(head_, row, key))) == -kInfinity;
  }
  std::uint32_t all_rows(std::int64_t i) const { return ~std::uint32_t{0} >> (kRows - panels_[i].rows); }
  bool left(std::int64_t i) const { return (redo_[i] & all_rows(i)) == all_rows(i); }

  // Of the panels in turn, the blocks that some row sees, in order.
  bool next(Visit& v, std::int64_t begin) const {
    std::int64_t i = v.panel;
    std::int64_t at = v.at + kKeys;
    for (; i < count_; ++i, at = 0) {
      if (left(i)) continue;
      const Panel& panel = panels_[i];
      const std::int64_t from = clamp(panel.first(0) - begin, 0, w_.keys) / kKeys * kKeys;
      const std::int64_t to = clamp(panel.last(kRows - 1) - begin, 0, w_.keys);
      at = max(at, from);
      if (at >= to) continue;
      const std::int64_t key = begin + at;
      v.panel = i, v.at = at;
      v.chunks = min(kKeys, round_up(to - at, kTileDepth)) / kTileDepth;
      v.partial =
          p_.score.mask || panel.first(kRows - 1) > key || panel.last(0) < key + v.chunks * kTileDepth || modified_;
      v.first = at == from, v.last = at + kKeys >= to;
      return true;
    }
    return false;
  }

  // Where the panel's O of this range is summed: it becomes the panel's own if that is the first.
  float* target(const Panel& panel) const { return panel.started ? w_.partial : panel.ot; }

  // One stretch of matrix products: O += V^T P^T of one visit, then S = K Q^T of another into `s` (either may be null),
  // with the exponentials of a third in between.
  [[gnu::noinline]] void multiply(Tiles& tiles, const Visit* pv, const char* weights, const Visit* qk, char* s,
                                  Exponentials<kPlanes>& e) {
    constexpr int n = products(kPlanes);
    const std::int64_t depth = w_.d / kTileDepth, columns = pv ? w_.dv / kChunk : 0;
    const std::int64_t chunks = columns + (qk ? qk->chunks : 0);
    const std::int64_t products_of_tiles = 4 * n * (columns * (pv ? pv->chunks : 0) + (qk ? qk->chunks : 0) * depth);
    // Spread evenly: `each` pairs of keys at a time, one time in kOne / rate products.
    constexpr std::int64_t kOne = 1 << 16;
    const std::int64_t pairs = (e.end - e.s) / (2 * kChunk);
    const std::int64_t each = (pairs + products_of_tiles - 1) / products_of_tiles;
    const std::int64_t rate = each ? pairs / each * kOne / products_of_tiles : 0;
    std::int64_t credit = 0;
    Exponentials<kPlanes> local = e;
    const auto beside = [&]() __attribute__((always_inline)) {
      if ((credit += rate) < kOne) return;
      credit -= kOne;
      std::int64_t left = each;
      do local.template one<false>();
      while (--left);
    };
    TileOperand a{}, b{};
    float *start = nullptr, *c = nullptr;
    std::int64_t steps = 0, a_step = 0;
    Pending pending = pending_;
    for (std::int64_t i = 0; i < chunks; ++i) {
      const bool values = i < columns;
      if (values && i == 0) {
        a = {w_.v + pv->at * w_.dv * 2, w_.v_offset, 64, kTileBytes};
        b = {weights, w_.p_offset, 2 * kRowBytes, 64};
        a_step = 2 * kTileBytes, steps = n * pv->chunks;
        c = target(panels_[pv->panel]), start = pv->first ? nullptr : c;
      } else if (!values) {
        const std::int64_t chunk = i - columns;
        const KeyTiles& keys = w_.k_tiles[qk->at / kTileDepth + chunk];
        a = {keys.row, w_.k_offset, keys.stride, kTileRows * keys.stride};
        b = {qt(qk->panel), w_.q_offset, 64, kTileBytes};
        steps = n * depth;
        c = reinterpret_cast<float*>(s) + chunk * kChunk * kChunk, start = nullptr;
      }
      multiply_chunk(tiles, a, b, steps, start, c, pending, beside);
      a.base += a_step, c += kChunk * kChunk;
      if (start) start = c;
    }
    pending_ = pending;
    e = local;
  }
  void flush(Tiles& tiles) { store_pending(tiles, pending_, w_.unused); }

  // A visit's exponents are s * scale_of() + reference_of().
  vec scale_of(const Visit& v, int i) const {
    return modified_ ? vec(1.f) : xsimd::select(far(panels_[v.panel], i), vec(1.f), scale_);
  }
  vec reference_of(const Visit& v, int i) const {
    const vec neg_m = load(panels_[v.panel].neg_m + i * kLanes);
    return modified_ ? vec(0.f) : xsimd::select(far(panels_[v.panel], i), vec(0.f), neg_m);
  }
  // Rows with a reference that fixed point cannot add, or that is rounded more than the product with the scale: it is
  // in their scores.
  static auto far(const Panel& panel, int i) { return xsimd::abs(load(panel.neg_m + i * kLanes)) > vec(4096.f); }
  bool needs_finish(const Visit& v) const { return v.partial || far_[v.panel]; }

  // Makes the scores of a visit final where they are not simply those of the product. Sets top[row]: -inf if it sees
  // none.
  [[gnu::noinline]] void finish_visit(const Visit& v, std::int64_t key, float* s) {
    const std::int64_t n = v.chunks * kTileDepth, end = clamp(head_.len_k - key, 0, n);
    const Panel& panel = panels_[v.panel];
    for (int i = 0; i < kVecsOfRow; ++i) {
      float* const at = s + i * kLanes;
      const auto each = [&](std::int64_t begin, std::int64_t stop, auto f) {
        for (float* x = at + begin * kChunk; x < at + stop * kChunk; x += kChunk) store(x, f(load(x)));
      };
      if (modified_) {
        store(w_.top + i * kLanes, minus_infinity());
        finish_scores<true>(head_, panel, i, key, 0, end, s, w_.top);
        each(0, end, [](vec x) { return xsimd::select(x == x, x, infinity()); });  // a NaN must saturate, not vanish
        each(end, n, [](vec) { return minus_infinity(); });
      } else {
        hide(panel.row + i * kLanes, key, n, end, at, w_.top + i * kLanes);
        if (!far_[v.panel]) continue;
        const auto is_far = far(panel, i);
        const vec neg_m = load(panel.neg_m + i * kLanes);
        each(0, n, [&](vec x) { return xsimd::select(is_far, x * scale_ + neg_m, x); });
      }
    }
  }

  // -inf for what one vector of rows does not see of n keys, of which `end` exist.
  void hide(const Row* row, std::int64_t key, std::int64_t n, std::int64_t end, float* s, float* top) const {
    alignas(64) float first[kLanes], last[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      first[j] = static_cast<float>(clamp(row[j].first - key, 0, n));
      last[j] = static_cast<float>(clamp(row[j].last - key, 0, n));
    }
    const vec from = load(first), to = load(last);
    const bool masked = p_.score.mask != nullptr;
    auto seen = masked ? from != from : from < to;
    const auto some = [&](std::int64_t begin, std::int64_t stop) {
      vec modifier[kLanes];
      for (std::int64_t j = begin; j < stop; ++j) {
        const vec at(static_cast<float>(j));
        auto visible = (at >= from) & (at < to);
        if (masked && j < end) {
          if (j % kLanes == 0) load_modifiers(head_, row, key + j, min(kLanes, end - j), modifier);
          visible = visible & (modifier[j % kLanes] == vec(0.f));
          seen = seen | visible;
        }
        store(s + j * kChunk, xsimd::select(visible, load(s + j * kChunk), minus_infinity()));
      }
    };
    const auto late = static_cast<std::int64_t>(first[kLanes - 1]), early = static_cast<std::int64_t>(last[0]);
    some(0, masked ? n : late);
    some(masked ? n : max(late, early), n);
    store(top, xsimd::select(seen, vec(0.f), minus_infinity()));
  }

  Exponentials<kPlanes> exponentials(const Visit& v, char* s) const {
    Exponentials<kPlanes> e;
    e.s = reinterpret_cast<float*>(s), e.end = e.s + v.chunks * kTileDepth * kChunk;
    for (int i = 0; i < kVecsOfRow; ++i) e.set(scale_of(v, i), i, reference_of(v, i));
    return e;
  }
  // Like must_move() of softmax.hpp, but by the block's sum of weights, of which there is one already.
  auto moves(const Visit& v, vec sum, int i) const {
    const std::int64_t lane = i * kLanes;
    const vec top = needs_finish(v) ? load(w_.top + lane) : vec(0.f);
    const vec l = load(panels_[v.panel].l + lane);
    const auto low = (l == vec(0.f)) & (sum < vec(E::kLeast)) & (top > minus_infinity());
    return (sum > vec(E::kMost)) | low;
  }

  // Some row's weights are too large or too small: counts the visit's scores again (its weights lie over them), moves
  // the reference of those rows and of no other, and exponentiates once more. A large reference is rounded, and may
  // have to move again.
  [[gnu::noinline, gnu::cold]] void recount(Tiles& tiles, const Visit& v, std::int64_t begin, char* s, E& e) {
    const Panel& panel = panels_[v.panel];
    auto* x = reinterpret_cast<float*>(s);
    E none{};
    vec broken[kVecsOfRow], may_move[kVecsOfRow];
    for (int i = 0; i < kVecsOfRow; ++i) may_move[i] = xsimd::select(moves(v, e.sum[i], i), vec(1.f), vec(0.f));
    bool moved = true;
    constexpr int kRounds = 4;
    for (int round = 0; moved && round <= kRounds; ++round) {
      flush(tiles);
      multiply(tiles, nullptr, nullptr, &v, s, none);
      flush(tiles);
      if (needs_finish(v)) finish_visit(v, begin + v.at, x);
      moved = false;
      for (int i = 0; i < kVecsOfRow; ++i) {
        vec top = minus_infinity();
        broken[i] = vec(0.f);
        for (std::int64_t j = 0; j < v.chunks * kTileDepth; ++j) {
          const vec y = fma(load(x + j * kChunk + i * kLanes), scale_of(v, i), reference_of(v, i));
          top = xsimd::max(top, y);
          broken[i] = xsimd::select(y < infinity(), broken[i], y - y);  // +inf and NaN give NaN
        }
        const auto low = (load(panel.l + i * kLanes) == vec(0.f)) & (top < vec(E::kLow));
        const auto finite = xsimd::abs(top) < infinity();
        const auto which = ((top > vec(E::kHigh)) | low) & finite & (may_move[i] != vec(0.f));
        const vec step = xsimd::select(which, xsimd::ceil(top) + vec(E::kHeadroom), vec(0.f));
        if (round == kRounds) {  // the reference is far, and too large for the step: the scores take it in place
          for (std::int64_t j = 0; j < v.chunks * kTileDepth; ++j) {
            float* const at = x + j * kChunk + i * kLanes;
            store(at, load(at) - step);
          }
          continue;
        }
        const vec factor = raise_reference(panel, i * kLanes, step);
        if (panel.started) rescale(panel.ot + i * kLanes, kRows, w_.dv, factor);
        if (panel.joined) rescale(panel.total + i * kLanes, kRows, w_.dv, factor);
        if (!v.first) rescale(target(panel) + i * kLanes, kRows, w_.dv, factor);
        moved |= xsimd::any(which);
        far_[v.panel] |= xsimd::any(far(panel, i));
      }
    }
    e = exponentials(v, s);
    while (e.s != e.end) e.template one<true>();
    for (int i = 0; i < kVecsOfRow; ++i) e.sum[i] = e.sum[i] + broken[i];  // the row is for the vector kernel
  }

  // All visits of a range. While the tiles work on two of them the vectors exponentiate a third.
  void sweep(Tiles& tiles, std::int64_t begin) {
    const FlushDenormals flush_denormals;
    Visit visits[3];  // the last, this and the next one, in turn
    Visit *last = nullptr, *now = visits, *then = visits + 1;
    now->panel = 0, now->at = -kKeys;
    if (!next(*now, begin)) return;
    E none{};
    pending_ = {w_.unused};
    multiply(tiles, nullptr, nullptr, now, w_.s[0], none);
    for (int at = 0; now; at ^= 1) {
      *then = *now;
      if (!next(*then, begin)) then = nullptr;
      if (needs_finish(*now) || now->chunks * kTileDepth < kKeys || (!last && !then)) flush(tiles);
      if (needs_finish(*now)) finish_visit(*now, begin + now->at, reinterpret_cast<float*>(w_.s[at]));
      E e = exponentials(*now, w_.s[at]);
      if (last || then) multiply(tiles, last, w_.s[at ^ 1], then, w_.s[at ^ 1], e);
      while (e.s != e.end) e.template one<false>();
      if (last && last->last) join_range(tiles, *last, !then);
      bool any = false;
      for (int i = 0; i < kVecsOfRow; ++i) any |= xsimd::any(moves(*now, e.sum[i], i));
      if (any) [[unlikely]]
        recount(tiles, *now, begin, w_.s[at], e);
      for (int i = 0; i < kVecsOfRow; ++i) add_to_sum(panels_[now->panel], i * kLanes, e.sum[i]);
      Visit* const free = last ? last : visits + 2;
      last = now, now = then, then = free;
      if (!now) {
        multiply(tiles, last, w_.s[at], nullptr, nullptr, none);
        join_range(tiles, *last, true);
      }
    }
  }

  // The panel's O of this range is complete.
  void join_range(Tiles& tiles, const Visit& v, bool pending) {
    if (pending) flush(tiles);
    Panel& panel = panels_[v.panel];
    for (std::int64_t i = 0; panel.started && i < w_.dv * kRows; i += kLanes)
      store(panel.ot + i, load(panel.ot + i) + load(w_.partial + i));
    panel.started = true;
  }

  void finish(std::int64_t i) {
    const Panel& panel = panels_[i];
    if (p_.score.sinks && head_.whole) redo_[i] |= drowned(panel);
    if (!left(i)) {
      const FlushDenormals flush;  // whole vectors of rows are narrowed by an instruction that does
      if (!store_panel(head_, panel)) [[unlikely]]
        redo_[i] |= not_finite(panel);
      store_lse(head_, panel);
    }
    const std::int64_t row = item_.row_begin + i * kRows;
    for (std::int64_t r = 0; r < panel.rows; ++r) {
      if (!(redo_[i] >> r & 1)) continue;
      std::int64_t end = r + 1;
      while (end < panel.rows && redo_[i] >> end & 1) ++end;
      vector_kernel().run(p_, {item_.b, item_.hk, row + r, row + end, item_.key_begin, item_.key_end, partial(row + r)},
                          w_.vector);
      r = end;
    }
  }
  // Rows whose keys weigh nothing beside the sink: their weights, relative to it, may be denormals.
  std::uint32_t drowned(const Panel& panel) const {
    std::uint32_t rows = 0;
    for (std::int64_t i = 0; i < panel.rows; ++i) {
      float neg_m = 0, sink = 0;
      start_row(head_, panel.row[i], neg_m, sink);
      sink *= __builtin_exp2f(panel.neg_m[i] - neg_m);
      const bool sees = panel.row[i].first < panel.row[i].last;
      if (sees && sink > 0 && panel.l[i] <= sink * (1 + 0x1p-21f)) rows |= 1u << i;
    }
    return rows;
  }
  std::uint32_t not_finite(const Panel& panel) const {
    std::uint32_t rows = 0;
    for (std::int64_t i = 0; i < kRows; ++i) {
      const float scale = panel.l[i] == 0 ? 0.f : 1 / panel.l[i];
      for (std::int64_t c = 0; c < p_.dv; ++c)
        if (!(panel.ot[c * kRows + i] * scale * 0.f == 0.f)) rows |= 1u << i;
    }
    return rows;
  }

  const AttentionParams& p_;
  const WorkItem& item_;
  Head head_;
  Carver carver_;
  Scratch<kPlanes> w_;
  // Scores are finished in the log2 domain. If not, a mask is -inf before the scale, and still is after it.
  bool modified_ =
      p_.score.softcap_log2 != 0 || p_.score.bias || p_.score.alibi || !(p_.score.scale_log2 >= __FLT_MIN__);
  vec scale_ = vec(p_.score.scale_log2);
  std::int64_t count_ = 0;
  Pending pending_{};
  Panel panels_[kMaxPanels];
  std::uint32_t redo_[kMaxPanels];  // a bit for each row that the vector kernel must do
  bool far_[kMaxPanels] = {};
};

template <int kPlanes>
void run(const AttentionParams& p, const WorkItem& item, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  Item<kPlanes>(p, item, scratch).run();
}

template <int kPlanes>
std::size_t scratch_bytes(const AttentionShape& shape) noexcept {
  Carver carver(nullptr);
  Scratch<kPlanes>(carver, shape);
  return carver.used();
}

template <int kPlanes>
constexpr AttentionKernel kernel(const char* arithmetic, DTypeSet dtypes, const char* opt_in, int min_rows = 0,
                                 int min_key_elements = 0) {
  return {.facts = {.operation = Operation::attention,
                    .phase = Phase::prefill,
                    .arithmetic = arithmetic,
                    .dtypes = dtypes,
                    .exact = kPlanes != 2 || !(dtypes & only(DType::f32)),
                    .opt_in = opt_in,
                    .block_q = kRows,
                    .block_k = kKeys},
          .max_rows = kMaxPanels * kRows,
          .items_per_worker = 4,
          .min_item_rows = 128,
          .min_rows = min_rows,
          .min_key_elements = min_key_elements,
          .kept_keys = range_keys<kPlanes>,
          .scratch_bytes = scratch_bytes<kPlanes>,
          .run = run<kPlanes>};
}

}  // namespace

#if defined(RAPT_HAVE_TILES)
// Below these AVX-512's kernel took 0.4 to 0.9 of the time, on 1 and on 16 threads of a Xeon; above them 0.9 to 3
// times.
constexpr int kMinKeyElements = 8192, kMinRowsOfF16 = 96;
extern constexpr AttentionKernel kTilesBf16 = kernel<1>("bf16", only(DType::bf16), nullptr, 0, kMinKeyElements);
constexpr DTypeSet kHalf = only(DType::bf16) | only(DType::f16);
extern constexpr AttentionKernel kTilesF16x3 = kernel<2>("f16x3", kHalf, nullptr, kMinRowsOfF16, kMinKeyElements);
// Beside a busy sibling thread the AVX-512 kernel was faster (docs/performance.md).
extern constexpr AttentionKernel kTilesF32x6 =
    kernel<3>("f32x6", kFloatTypes, "not faster than the vector kernel everywhere");
extern constexpr AttentionKernel kTilesF32x3 = kernel<2>("f32x3", kFloatTypes, "less exact than fp32");
#else
extern constexpr AttentionKernel kTilesBf16 = kernel<1>("bf16", only(DType::bf16), nullptr);
#endif

}  // namespace rapt::cpu::RAPT_ISA
