// attention_forward: out = softmax(score(q k^T)) v, fp32, online softmax, no S x S matrix.
//
//   for each block of kBlockK keys that some row sees         K and V blocks: 4 kBlockK (d + dv) bytes from L2
//     for each panel of `width` query rows                    Q^T, O^T: 4 width (d + dv) bytes from L2
//       S^T = K Q^T - m       2 kBlockK width d FLOPs         S^T stays in L1: 4 kBlockK width bytes
//       finish the scores of partial blocks (masks, bias, ...); move m where a lane must
//       P^T = 2^S^T, l += sum
//       O^T += V^T P^T        2 kBlockK width dv FLOPs
//
// Blocks start at multiples of kBlockK from the sequence's first key and sums run in key order, so that a row's bits do
// not depend on how rows are grouped into panels and items. A masked key adds an exact 0.
#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/epilogue.hpp"
#include "cpu/tile/mma.hpp"
#include "cpu/tile/pack.hpp"
#include "cpu/tile/scratch.hpp"
#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kBlockK = 192;  // 128 loses 1 %, 256 gains nothing
constexpr std::int64_t kWidth = kVecs * kLanes;
constexpr std::int64_t kMaxPanels = 16;  // of an item

// Rows of packed K and V blocks: one line more than needed, so that V's column strips spread over the L1 sets.
std::int64_t packed_stride(std::int64_t n) {
  return round_up(n, 16) + 16;
}

struct Scratch {
  Row* row;
  float *qt, *ot, *minus_m, *l;  // all panels, back to back
  float *s, *top, *sum, *part;   // one panel and block: scores, their maxima and sums, and O^T of the block
  float *k, *v, *zero;

  Scratch(Carver& carver, const ForwardShape& shape) {
    const std::int64_t lanes = round_up(shape.rows, kLanes);
    row = carver.take<Row>(lanes);
    qt = carver.take<float>(lanes * shape.d);
    ot = carver.take<float>(lanes * shape.dv);
    minus_m = carver.take<float>(lanes);
    l = carver.take<float>(lanes);
    s = carver.take<float>(kBlockK * kWidth);
    top = carver.take<float>(kWidth);
    sum = carver.take<float>(kWidth);
    part = carver.take<float>(kWidth * shape.dv);
    k = carver.take<float>(kBlockK * packed_stride(shape.d));
    v = carver.take<float>(kBlockK * packed_stride(shape.dv));
    zero = carver.take<float>(kWidth);
  }
};

// A block of K or V: rows of contiguous elements, in place or packed.
struct Block {
  const float* data;
  std::int64_t stride;
};

// Keys [begin, end) of a block that the panel's vectors [vec, vecs) have to look at. Unmasked: every row sees them all.
struct Segment {
  std::int64_t begin, end, vec;
  bool masked;
};

// Cuts keys [k0, k0 + n) at the edges of what the panel's rows see. After the last key of a vector's rows that vector
// drops out: a causal diagonal wastes kLanes queries a panel, not `width`. (The first keys of a window are not cut.)
int cut(const Panel& panel, std::int64_t k0, std::int64_t n, bool all_masked, Segment (&segment)[kVecs + 2]) {
  const std::int64_t tile = rows_of_tile(kVecs);
  const std::int64_t begin = clamp(panel.first_min - k0, 0, n), end = clamp(panel.last_max - k0, 0, n);
  if (begin >= end) return 0;
  std::int64_t full_begin = begin, full_end = end;
  if (!all_masked) {
    full_begin = clamp(panel.first_max - k0, begin, end);
    full_end = clamp(panel.last_min - k0, full_begin, end);
    if (full_end < end) full_end = full_begin + (full_end - full_begin) / tile * tile;  // the rest joins the edge
  }
  int count = 0;
  if (full_begin > begin) segment[count++] = {begin, full_begin, 0, true};
  if (full_end > full_begin) segment[count++] = {full_begin, full_end, 0, all_masked};
  std::int64_t at = full_end;
  for (std::int64_t v = 0; v < panel.vecs && at < end; ++v) {
    const std::int64_t last = v + 1 < panel.vecs ? panel.last_of(v) - k0 : end;
    const std::int64_t to = least(at + round_up(most(last - at, 0), tile), end);
    if (to > at) segment[count++] = {at, to, v, true};
    at = to;
  }
  return count;
}

// Calls f(integral_constant<int, vecs>).
template <class F>
[[gnu::always_inline]] inline void with_vecs(std::int64_t vecs, F f) {
  static_assert(kVecs == 2 || kVecs == 3);
  if constexpr (kVecs == 3)
    if (vecs == 3) return f(std::integral_constant<int, 3>());
  if (vecs == 2) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 1>());
}

// V of a block with its non-finite elements replaced by 0 in `w.v`; the elements themselves are added to the output of
// the rows that see them (any positive weight gives the same inf or NaN). Scores must be final and not yet
// exponentiated.
[[gnu::noinline, gnu::cold]] void add_non_finite(const Head& head, const Panel& panel, std::int64_t k0,
                                                 std::int64_t begin, std::int64_t end, const Scratch& w) {
  const std::int64_t dv = head.p.dv, stride = packed_stride(dv);
  const float* v = head.values() + k0 * head.p.v_stride.s;
  for (std::int64_t j = begin; j < end; ++j)
    for (std::int64_t c = 0; c < dv; ++c) {
      const float x = v[j * head.p.v_stride.s + c * head.p.v_stride.d];
      const bool finite = x - x == 0.f;
      w.v[j * stride + c] = finite ? x : 0.f;
      if (finite) continue;
      for (std::int64_t i = 0; i < panel.width; ++i) {
        const bool in_range = k0 + j >= panel.row[i].first && k0 + j < panel.row[i].last;
        if (in_range && w.s[j * panel.width + i] != -__builtin_inff()) panel.ot[c * panel.width + i] += x;
      }
    }
}

// One panel against one block of n keys at k0.
void visit(const Head& head, Panel& panel, std::int64_t k0, std::int64_t n, Block kb, Block vb, bool careful,
           const Scratch& w) {
  const std::int64_t d = head.p.d, dv = head.p.dv, width = panel.width;
  const bool terms = has_terms(head.p.score);
  Segment segments[kVecs + 2];
  const int count = cut(panel, k0, n, terms, segments);
  if (count == 0) return;
  const std::int64_t begin = segments[0].begin, end = segments[count - 1].end;

  bool visible = false;
  for (std::int64_t i = 0; i < width; i += kLanes) store(w.top + i, minus_infinity()), store(w.sum + i, vec(0.f));
  for (int i = 0; i < count; ++i) {
    const Segment& g = segments[i];
    const std::int64_t lane = g.vec * kLanes;
    float* s = w.s + g.begin * width;
    // Masked scores must not raise the maximum: the tile's own goes to waste there.
    float* top = g.masked ? w.part : w.top + lane;
    const float* init = head.p.score.softcap_log2 != 0 ? w.zero : panel.minus_m + lane;
    with_vecs(panel.vecs - g.vec, [&](auto v) {
      tiles<Product::scores, v>(kb.data + g.begin * kb.stride, kb.stride, g.end - g.begin, panel.qt + lane, d, width,
                                init, 0, top, 0, s + lane);
    });
    if (!g.masked) continue;
    for (std::int64_t v = g.vec; v < panel.vecs; ++v)
      visible |= (terms ? finish_scores<true> : finish_scores<false>)(head, panel, v, k0, g.begin, g.end, w.s, w.top);
  }
  if (terms && !visible) return;
  if (any_must_move(panel, w.top)) [[unlikely]] {
    // Lanes of segments a vector has dropped out of hold garbage; restating it is harmless.
    move_reference(panel, dv, w.top, w.s + begin * width, end - begin);
  }
  if (careful) {
    if (!panel.started)
      for (std::int64_t i = 0; i < dv * width; i += kLanes) store(panel.ot + i, vec(0.f));
    panel.started = true;
    add_non_finite(head, panel, k0, begin, end, w);
    vb = {w.v, packed_stride(dv)};
  }

  for (int i = 0; i < count; ++i) {
    const Segment& g = segments[i];
    const std::int64_t lane = g.vec * kLanes;
    with_vecs(panel.vecs - g.vec,
              [&](auto v) { exponentiate<v>(w.s + g.begin * width + lane, g.end - g.begin, width, w.sum + lane); });
  }
  for (std::int64_t i = 0; i < width; i += kLanes) store(panel.l + i, load(panel.l + i) + load(w.sum + i));

  // O += V^T P. With several segments the block's sum goes through memory, so that its bits do not depend on the cuts.
  for (int i = 0; i < count; ++i) {
    const Segment& g = segments[i];
    const std::int64_t lane = g.vec * kLanes;
    const bool first = i == 0, alone = count == 1;
    float* out = (alone ? panel.ot : w.part) + lane;
    float* extra = alone && panel.started ? panel.ot + lane : w.zero;
    const float* init = first ? w.zero : w.part + lane;
    with_vecs(panel.vecs - g.vec, [&](auto v) {
      tiles<Product::output, v>(vb.data + g.begin * vb.stride, vb.stride, dv, w.s + g.begin * width + lane,
                                g.end - g.begin, width, init, first ? 0 : width, extra, extra == w.zero ? 0 : width,
                                out);
    });
  }
  if (count > 1) {
    const std::int64_t from = segments[0].vec * kLanes;  // vectors before it saw nothing of this block
    for (std::int64_t c = 0; c < dv; ++c)
      for (std::int64_t i = 0; i < width; i += kLanes) {
        float* o = panel.ot + c * width + i;
        const vec part = i < from ? vec(0.f) : load(w.part + c * width + i);
        store(o, panel.started ? load(o) + part : part);
      }
  }
  panel.started = true;
}

// Starts over: no key seen, the sink as the only mass.
void reset(const Head& head, Panel& panel) {
  const ScoreParams& score = head.p.score;
  for (std::int64_t i = 0; i < panel.width; ++i) {
    const float sink = score.sinks ? score.sinks[panel.row[i].q_head * score.sinks_stride] * kLog2e : -__builtin_inff();
    const bool none = sink == -__builtin_inff();
    const float m = none ? 0.f : __builtin_ceilf(sink);
    panel.minus_m[i] = -m;
    panel.l[i] = none ? 0.f : __builtin_exp2f(sink - m);
  }
  panel.started = false;
}

// Row strides at which a block's rows fall into few cache sets: 61 % of peak in place, packed within 2 points.
bool must_pack(const Strides& s, std::int64_t n) {
  return s.d != 1 || (s.s >= 512 && s.s != n);
}

// All panels share one sweep over the keys that any of them sees.
void sweep(const Head& head, Panel* panels, std::int64_t count, bool careful, const Scratch& w) {
  const ForwardParams& p = head.p;
  std::int64_t first = head.len_k, last = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    first = least(first, panels[i].first_min);
    last = most(last, panels[i].last_max);
  }
  const bool pack_k = must_pack(p.k_stride, p.d), pack_v = must_pack(p.v_stride, p.dv) && !careful;
  for (std::int64_t k0 = first / kBlockK * kBlockK; k0 < last; k0 += kBlockK) {
    const std::int64_t n = least(kBlockK, last - k0);
    Block kb{head.keys() + k0 * p.k_stride.s, p.k_stride.s}, vb{head.values() + k0 * p.v_stride.s, p.v_stride.s};
    if (pack_k) {
      pack_rows(kb.data, kb.stride, p.k_stride.d, n, p.d, w.k, packed_stride(p.d));
      kb = {w.k, packed_stride(p.d)};
    }
    if (pack_v) {
      pack_rows(vb.data, vb.stride, p.v_stride.d, n, p.dv, w.v, packed_stride(p.dv));
      vb = {w.v, packed_stride(p.dv)};
    }
    for (std::int64_t i = 0; i < count; ++i) visit(head, panels[i], k0, n, kb, vb, careful, w);
  }
}

void run(const ForwardParams& p, const WorkItem& item, std::byte* scratch) noexcept {
  const Head head(p, item);
  const std::int64_t row_end = least(item.row_end, head.len_q * p.group);
  Carver carver(scratch);
  const Scratch w(carver, {p.sq, p.sk, p.d, p.dv, item.row_end - item.row_begin});
  for (std::int64_t i = 0; i < kWidth; i += kLanes) store(w.zero + i, vec(0.f));

  Panel panels[kMaxPanels];
  std::int64_t count = 0;
  for (std::int64_t r = item.row_begin, lanes = 0; r < row_end; ++count) {
    Panel& panel = panels[count];
    const std::int64_t left = (row_end - r + kLanes - 1) / kLanes;
    panel.vecs = left == kVecs + 1 && kVecs > 2 ? 2 : least(left, kVecs);  // 2 + 2, not 3 + 1
    panel.width = panel.vecs * kLanes;
    panel.rows = least(panel.width, row_end - r);
    panel.row = w.row + lanes;
    panel.qt = w.qt + lanes * p.d;
    panel.ot = w.ot + lanes * p.dv;
    panel.minus_m = w.minus_m + lanes;
    panel.l = w.l + lanes;
    panel.first_min = panel.last_min = head.len_k;
    panel.first_max = panel.last_max = 0;
    for (std::int64_t i = 0; i < panel.width; ++i) {
      const Row row = panel.row[i] = row_of(head, r + least(i, panel.rows - 1));
      panel.last_min = least(panel.last_min, row.last);
      if (row.first == row.last) continue;  // sees nothing
      panel.first_min = least(panel.first_min, row.first);
      panel.first_max = most(panel.first_max, row.first);
      panel.last_max = most(panel.last_max, row.last);
    }
    pack_queries(head, panel, p.score.scale_log2);
    reset(head, panel);
    r += panel.rows;
    lanes += panel.width;
  }
  sweep(head, panels, count, false, w);
  for (std::int64_t i = 0; i < count; ++i) {
    if (!store_output(head, panels[i])) [[unlikely]] {
      reset(head, panels[i]);
      sweep(head, &panels[i], 1, true, w);
      store_output(head, panels[i]);
    }
    store_lse(head, panels[i]);
  }
}

std::size_t scratch_bytes(const ForwardShape& shape) noexcept {
  Carver carver(nullptr);
  Scratch(carver, shape);
  return carver.used();
}

}  // namespace

const ForwardKernel kAttentionForward = {"attention_forward", kWidth, kBlockK, kMaxPanels* kWidth, scratch_bytes, run};

}  // namespace rapt::cpu::RAPT_ISA
