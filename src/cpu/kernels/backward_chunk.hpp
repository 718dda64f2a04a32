// The part of attention_backward that every gradient needs: P and dS of a chunk of rows and a block of keys.
#pragma once

#include "cpu/kernels/backward_pool.hpp"
#include "cpu/kernels/backward_rows.hpp"
#include "cpu/tile/cut.hpp"
#include "cpu/tile/dropout.hpp"
#include "cpu/tile/key_block.hpp"
#include "cpu/tile/mma.hpp"
#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {

constexpr std::int64_t kBlockK = kBackwardKeys;
constexpr std::int64_t kWidth = kVecs * kLanes;
// P and dS of a chunk and a block of keys stay in L2. Sums of dK and dV are of so many rows before they are rounded
// again.
constexpr std::int64_t kChunkPanels = 96 / kWidth, kChunkRows = kChunkPanels * kWidth;
// A panel of the chunk. Its S^T, then P^T, lies at s, [kBlockK][width], and dP^T, then dS^T, at ds.
struct GradPanel : Panel {
  std::int64_t lane = 0;    // of the chunk, its first
  float* dout_t = nullptr;  // [dv][width]
  float *s = nullptr, *ds = nullptr;
  float* cap = nullptr;        // [kBlockK][width] the softcap's derivative; null: none wanted
  float* neg_delta = nullptr;  // [width]
  float* dslope = nullptr;     // [width] sum of dS times the distance, for dalibi
  Cut cut{};                   // of the block at hand
  bool visible = false;        // a row sees one of its keys
};

// Panels of `rows` rows, whose lanes follow each other in the scratch that `of_panel` hands out. Returns how many.
template <class OfPanel>
std::int64_t make_panels(std::int64_t rows, GradPanel* panels, OfPanel of_panel) {
  std::int64_t count = 0, lane = 0;
  for (std::int64_t r = 0; r < rows; ++count) {
    GradPanel& panel = panels[count];
    const std::int64_t vecs_left = (rows - r + kLanes - 1) / kLanes;
    panel.vecs = vecs_left == kVecs + 1 && kVecs > 2 ? 2 : min(vecs_left, kVecs);  // 2 + 2, not 3 + 1
    panel.width = panel.vecs * kLanes;
    panel.rows = min(panel.width, rows - r);
    panel.lane = lane;
    of_panel(panel, r);
    for (std::int64_t i = panel.rows; i < panel.width; ++i) panel.row[i] = panel.row[panel.rows - 1];
    r += panel.rows, lane += panel.width;
  }
  return count;
}

// dO . O of kLanes rows.
inline vec deltas(const AttentionBackwardParams& p, const Head& head, const Row* row) {
  vec sum[kLanes];
  with_float_type(p.dout_type, [&](auto dout_element) {
    with_float_type(p.out_type, [&](auto out_element) {
      for (int i = 0; i < kLanes; ++i) {
        const auto* dout = static_cast<const decltype(dout_element)*>(p.dout) + row_at(p.dout_stride, head, row[i]);
        const auto* out = static_cast<const decltype(out_element)*>(p.out) + row_at(p.out_stride, head, row[i]);
        sum[i] = vec(0.f);
        for (std::int64_t c = 0; c < p.dv; c += kLanes) {
          const std::int64_t n = min(kLanes, p.dv - c);
          sum[i] = fma(load_strided(dout + c * p.dout_stride.d, p.dout_stride.d, n),
                       load_strided(out + c * p.out_stride.d, p.out_stride.d, n), sum[i]);
        }
      }
    });
  });
  transpose(sum);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
  return sum[0];
}

// Whether mask and bias leave the row one of the keys that it could see.
inline bool sees_a_key(const Head& head, const Row& row) {
  const ScoreParams& s = head.p.score;
  for (std::int64_t j = row.first; j < row.last; ++j) {
    const ScorePlace at = place_of(head, row, j);
    const bool hidden =
        is_masked(s, at) || (s.bias && number_at(s.bias, s.bias_type, modifier_index(s.bias_stride, at)) == -kInfinity);
    if (!hidden) return true;
  }
  return false;
}

// neg_m = -lse, which weights are relative to, and neg_delta of n rows, a multiple of kLanes. Returns a bit for each
// row that attends to one value: its neg_delta lacks dO . O, and dP must lack the same: the caller computes it from dO
// = 0.
inline std::uint64_t prepare_rows(const AttentionBackwardParams& p, const Head& head, const Row* row, std::int64_t n,
                                  float* neg_m, float* neg_delta) {
  std::uint64_t without_dp = 0;
  for (std::int64_t r = 0; r < n; r += kLanes) store(neg_delta + r, vec(0.f) - deltas(p, head, row + r));
  for (std::int64_t r = 0; r < n; ++r) {
    const float lse = p.lse[row_at(p.lse_stride, head, row[r])];
    // A row that sees no key has weights of 0; of one that saw +inf they are NaN, as the forward's.
    neg_m[r] = lse == -kInfinity  ? -kInfinity
               : lse == kInfinity ? __builtin_nanf("")
                                  : static_cast<float>(-(static_cast<double>(lse) * rapt::kLog2e +
                                                         static_cast<double>(alibi_shift_log2(head, row[r]))));
    // A sink gets nothing but dlse from a row without keys, even if its dout is not finite.
    const bool is_finite = abs_of(neg_delta[r]) < kInfinity;
    if (p.grad_sinks && !is_finite && !sees_a_key(head, row[r])) neg_delta[r] = 0;
    if (is_finite && attends_one_value(p, head, row[r])) neg_delta[r] = 0, without_dp |= std::uint64_t{1} << r;
    if (p.dlse) neg_delta[r] += p.dlse[row_at(p.dlse_stride, head, row[r])];
  }
  return without_dp;
}

// Q^T, dO^T and what else a panel needs of its rows.
inline void prepare_panel(const AttentionBackwardParams& p, const Head& head, GradPanel& panel) {
  with_float_type(p.q_type, [&](auto e) {
    pack_rows(static_cast<const decltype(e)*>(p.q), p.q_stride, p.d, head, panel, panel.qt);
  });
  with_float_type(p.dout_type, [&](auto e) {
    pack_rows(static_cast<const decltype(e)*>(p.dout), p.dout_stride, p.dv, head, panel, panel.dout_t);
  });
  static_assert(kWidth <= 64);
  std::uint64_t without_dp = prepare_rows(p, head, panel.row, panel.width, panel.neg_m, panel.neg_delta);
  for (; without_dp != 0; without_dp &= without_dp - 1)
    for (std::int64_t c = 0; c < p.dv; ++c) panel.dout_t[c * panel.width + __builtin_ctzll(without_dp)] = 0;
}

// Gathered keys lie anywhere.
inline bool must_pack_value_rows(const AttentionBackwardParams& p) {
  return p.kv_type != DType::f32 || p.v_stride.d != 1 || p.tokens > 0;
}
inline bool must_pack_keys_twice(const AttentionBackwardParams& p) {  // read as rows and as columns
  const Strides& s = p.k_stride;
  return must_pack_keys(p) || (s.s >= 512 && s.s != p.d) || p.tokens > 0;
}

// No weight is above 1, but the exponent of one near it may be off by the roundings of its score and of lse, by
// hundreds where these are 1e9.
[[gnu::always_inline]] inline vec at_most_0(vec exponent) {
  return xsimd::min(vec(0.f), exponent);  // in this order NaN stays
}

// P^T over the exponents at s, and dS^T over dP^T at ds. Masked: hidden keys have a score
// of -inf, whatever lse and dP are.
template <int kV, int kW, bool kMasked>
[[gnu::noinline]] void differentiate(float* s, float* ds, std::int64_t begin, std::int64_t end, ToExponents e,
                                     const float* neg_delta) {
  const vec scale(e.scale);
  vec add[kV], minus[kV];
#pragma GCC unroll 4
  for (int v = 0; v < kV; ++v) add[v] = load(e.add + v * kLanes), minus[v] = load(neg_delta + v * kLanes);
#pragma GCC unroll 2
  for (std::int64_t j = begin; j < end; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) {
      const std::int64_t at = (j * kW + v) * kLanes;
      const vec x = load(s + at);
      vec p = exp2(at_most_0(fma(x, scale, add[v])));
      vec d = p * (load(ds + at) + minus[v]);
      if constexpr (kMasked) {
        const auto hidden = x == minus_infinity();
        p = xsimd::select(hidden, vec(0.f), p), d = xsimd::select(hidden, vec(0.f), d);
      }
      store(s + at, p);
      store(ds + at, d);
    }
}

// Scores, final as to_exponents() has them, and dP of the block's keys that the panel looks at. Returns whether it sees
// any.
template <int kW>
bool score(const Head& head, GradPanel& panel, std::int64_t k0, std::int64_t n, Block kb, Block vb, float* discarded) {
  const ScoreParams& score = head.p.score;
  const bool modified = needs_finish(score);
  Cut& c = panel.cut = cut(panel, k0, n, modified);
  bool visible = !modified && c.count > 0;
  for (int i = 0; i < c.count; ++i) {
    const Segment& g = c.segment[i];
    const std::int64_t lane = g.vec * kLanes, at = g.begin * panel.width + lane;
    with_vecs<kW>(kW - g.vec, [&](auto vecs) {
      tiles<vecs>(
          ScoresTile<kW>{kb.data + g.begin * kb.stride, kb.stride, head.p.d, panel.qt + lane, panel.s + at, discarded},
          g.end - g.begin);
      tiles<vecs>(ScoresTile<kW>{vb.data + g.begin * vb.stride, vb.stride, head.p.dv, panel.dout_t + lane,
                                 panel.ds + at, discarded},
                  g.end - g.begin);
    });
    if (!g.masked) continue;
    for (std::int64_t v = g.vec; v < kW; ++v)
      visible |= (modified ? finish_scores<true> : finish_scores<false>)(head, panel, v, k0, g.begin, g.end, panel.s,
                                                                         discarded, panel.cap);
  }
  return visible;
}

// P^T and dS^T of one vector of rows over its scores and dP, with dropout: both P and dP are what is left of them, but
// P within dS is whole.
[[gnu::noinline]] inline void differentiate_with_dropout(const Head& head, const GradPanel& panel, std::int64_t v,
                                                         std::int64_t k0, ToExponents e) {
  const std::int64_t lane = v * kLanes;
  const vec scale(e.scale), add = load(e.add + lane), minus = load(panel.neg_delta + lane);
  for_each_drawn_key(
      head, panel.row + lane, k0, panel.cut.begin,
      panel.cut.end[v], [&](std::int64_t j, AfterDropout after) __attribute__((always_inline)) {
        float *const s = panel.s + j * panel.width + lane, *const ds = panel.ds + j * panel.width + lane;
        const vec x = load(s), p = exp2(at_most_0(fma(x, scale, add)));
        const vec d = p * (after(load(ds)) + minus);
        const auto hidden = x == minus_infinity();
        store(s, xsimd::select(hidden, vec(0.f), after(p)));
        store(ds, xsimd::select(hidden, vec(0.f), d));
      });
}

// P^T and dS^T over them, once scores are final.
template <int kW>
void differentiate(const Head& head, const GradPanel& panel, std::int64_t k0, const float* zero) {
  const ToExponents e = to_exponents(head.p.score, panel, zero);
  if (head.p.score.dropout.given) {
    for (std::int64_t v = 0; v < kW; ++v) differentiate_with_dropout(head, panel, v, k0, e);
    return;
  }
  for (int i = 0; i < panel.cut.count; ++i) {
    const Segment& g = panel.cut.segment[i];
    const std::int64_t lane = g.vec * kLanes;
    with_vecs<kW>(kW - g.vec, [&](auto vecs) {
      (g.masked ? differentiate<vecs, kW, true>
                : differentiate<vecs, kW, false>)(panel.s + lane, panel.ds + lane, g.begin, g.end,
                                                  {e.scale, e.add + lane}, panel.neg_delta + lane);
    });
  }
}

// dslope += what dS of keys [begin, end) of the block, as bias and slopes get it, gives the slopes of one vector of
// rows.
inline void add_to_slopes(const Head& head, const Panel& panel, std::int64_t v, std::int64_t k0, std::int64_t begin,
                          std::int64_t end, const float* ds, float* dslope) {
  const std::int64_t lane = v * kLanes;
  alignas(64) float position[kLanes];
  for (int i = 0; i < kLanes; ++i) position[i] = static_cast<float>(panel.row[lane + i].token + head.offset - k0);
  vec key(static_cast<float>(begin)), sum(0.f);
  for (std::int64_t j = begin; j < end; ++j, key = key + vec(1.f)) {
    const vec d = load(ds + j * panel.width + lane);
    sum = sum - xsimd::select(d == vec(0.f), vec(0.f), d * xsimd::abs(load(position) - key));
  }
  store(dslope + lane, load(dslope + lane) + sum);
}

// dQ^T of a panel, at ot, times the scale -> dq.
inline void store_rows(const Gradient& to, const Head& head, const Panel& panel, std::int64_t n, float scale) {
  with_float_type(to.type, [&](auto element) {
    auto* const base = static_cast<decltype(element)*>(to.data);
    for (std::int64_t lane = 0; lane < panel.width; lane += kLanes)
      for (std::int64_t c0 = 0; c0 < n; c0 += kLanes) {
        const std::int64_t count = min(kLanes, n - c0);
        vec r[kLanes];
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j)
          r[j] = fma(load(panel.ot + min(c0 + j, n - 1) * panel.width + lane), vec(scale), vec(0.f));
        transpose(r);
        for (std::int64_t i = 0; i < min(kLanes, panel.rows - lane); ++i)
          store_strided(base + row_at(to.stride, head, panel.row[lane + i]) + c0 * to.stride.d, to.stride.d, count,
                        r[i]);
      }
  });
}

// What each row of a panel adds to the gradients of its head's sink and slope.
inline void store_row_sums(const AttentionBackwardParams& p, const Head& head, const Panel& panel,
                           const float* neg_delta, const float* dslope, const BackwardItem& item) {
  for (std::int64_t i = 0; i < panel.rows; ++i) {
    const Row& row = panel.row[i];
    const std::int64_t at = row_sum_at(p, item.b, head, row);
    if (item.sink_sums) {
      const double weight = sink_weight(p, head, row);
      item.sink_sums[at] = weight == 0 ? 0.f : static_cast<float>(weight) * neg_delta[i];
    }
    if (item.slope_sums) item.slope_sums[at] = dslope[i];
  }
}

// What both kernels' items are.
struct Keys {
  std::int64_t begin, end;  // of the item, that are there
};
inline Keys keys_of(const Head& head, const BackwardItem& item) {
  return {min(item.key_begin, head.len_k), min(item.key_end, head.len_k)};
}
inline BackwardShape shape_of(const AttentionBackwardParams& p, const BackwardItem& item) {
  return {p.d, p.dv, p.score.softcap_log2 != 0, item.key_end - item.key_begin};
}
inline WorkItem all_rows(const BackwardItem& item) {
  return {item.b, item.hk, 0, 0, 0, INT64_MAX, nullptr};
}

// 32 x 32 sums of dK or dV.
struct KeySums {
  const float* data;
  std::int64_t stride;  // floats from key to key
};
// Sums of dK or dV, times the scale, -> the gradient; those of keys that are not there are 0. `sums_of(j, c)` is where
// those of 32 keys from the item's key j on lie, 32 columns from c on, j and c multiples of 32.
template <class SumsOf>
void store_keys(const Gradient& to, const Head& head, const BackwardItem& item, std::int64_t n, float scale,
                SumsOf sums_of) {
  const Keys keys = keys_of(head, item);
  with_float_type(to.type, [&](auto element) {
    auto* const base = static_cast<decltype(element)*>(to.data);
    const std::int64_t end = max(keys.end, item.clear_end), inner = to.stride.d;
    for (std::int64_t j0 = keys.begin; j0 < end; j0 += 32)
      for (std::int64_t c0 = 0; c0 < n; c0 += 32) {
        const KeySums sums = sums_of(j0 - keys.begin, c0);
        for (std::int64_t i = 0; i < min(32, end - j0); ++i) {
          auto* const row = base + head.key_at(to.stride, j0 + i) + c0 * inner;
          const bool is_there = j0 + i < keys.end;
          for (std::int64_t c = 0; c < min(32, n - c0); c += kLanes) {
            const vec x = is_there ? fma(load(sums.data + i * sums.stride + c), vec(scale), vec(0.f)) : vec(0.f);
            store_strided(row + c * inner, inner, min(kLanes, n - c0 - c), x);
          }
        }
      }
  });
}

// Gathered keys: adds dK and dV of the item's keys to the sums of their rows. `of_k` and `of_v` say where they lie, as
// the `sums_of` of store_keys().
template <class SumsOfK, class SumsOfV>
void add_to_pool(const AttentionBackwardParams& p, const Head& head, const BackwardItem& item, SumsOfK of_k,
                 SumsOfV of_v) {
  const Keys keys = keys_of(head, item);
  for (std::int64_t j = 0; j < keys.end - keys.begin; ++j) {
    const std::int64_t row = listed_row(p, head.b, head.k_first, keys.begin + j);
    const bool first = begin_pool_sum(*item.pool, row);
    const auto add = [&](std::int64_t n, float* to, auto sums_of) {
      for (std::int64_t c = 0; c < n; c += 32) {
        const KeySums sums = sums_of(j / 32 * 32, c);
        add_floats(sums.data + j % 32 * sums.stride, min(32, n - c), first, to + c);
      }
    };
    if (p.grad_k) add(p.d, item.pool->row(row), of_k);
    if (p.grad_v) add(p.dv, item.pool->row(row) + item.pool->dv_at, of_v);
  }
}

}  // namespace rapt::cpu::RAPT_ISA
