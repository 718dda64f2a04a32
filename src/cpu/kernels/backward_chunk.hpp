// P and dS of a chunk of rows and a block of keys: the part of attention_backward that every gradient needs.
#pragma once

#include "cpu/kernels/backward_pool.hpp"
#include "cpu/kernels/backward_rows.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/causal_segments.hpp"
#include "cpu/tile/decode_products.hpp"
#include "cpu/tile/dropout.hpp"
#include "cpu/tile/key_block.hpp"
#include "cpu/tile/mma.hpp"
#include "cpu/tile/softmax.hpp"

namespace rapt::cpu::RAPT_ISA {

constexpr std::int64_t kBlockK = kBackwardKeys;
constexpr std::int64_t kWidth = kVecs * kLanes;
// The chunk size: P and dS of a chunk and a block of keys stay in L2, and dK and dV are summed over so many rows
// before they are rounded again.
constexpr std::int64_t kChunkQueryBlocks = 96 / kWidth, kChunkRows = kChunkQueryBlocks * kWidth;
// Up to so many rows of a query block, lanes along d and dv compute scores, dP and dQ faster than lanes along rows,
// most of which would be empty. (Not measured with four lanes.)
constexpr std::int64_t kFewRows = kLanes >= 8 ? kLanes / 4 : 0;

// Scratch of few rows.
struct FewRows {
  float *q, *dout;        // in tiles, as DotsTile has them
  float* row;             // of q or dout
  const std::byte** key;  // [kBlockK] the block's rows of K or V
  float* dots;            // [kBlockK, and those that a tile computes past the last][rows, rounded up]
  float* sums;            // of dQ over a block of keys

  FewRows() = default;
  FewRows(BumpAllocator& allocator, std::int64_t d, std::int64_t dv)
      : q(allocator.take<float>(kRowsOfTile * round_up(d, kLanes))),
        dout(allocator.take<float>(kRowsOfTile * round_up(dv, kLanes))),
        row(allocator.take<float>(round_up(max(d, dv), kLanes))),
        key(allocator.take<const std::byte*>(kBlockK)),
        dots(allocator.take<float>((kBlockK + kMaxKeysOfTile) * kRowsOfTile + kLanes)),
        sums(allocator.take<float>(kRowsOfTile * round_up(d, kLanes))) {}
};

// A query block of the chunk. Its S^T, then P^T, lies at s, [kBlockK][width], and dP^T, then dS^T, at ds.
struct GradQueryBlock : QueryBlock {
  std::int64_t lane = 0;    // its first lane within the chunk
  float* dout_t = nullptr;  // [dv][width]
  float *s = nullptr, *ds = nullptr;
  float* derivative = nullptr;   // [kBlockK][width] of the scores; null: all are 1
  float* neg_delta = nullptr;    // [width]
  float* dslope = nullptr;       // [width] sum of dS times the distance, for dalibi
  BlockSegments segments{};      // of the current block of keys
  bool visible = false;          // some row sees one of the block's keys
  const FewRows* few = nullptr;  // set if the block has few rows and its rows are in tiles there
};

// Cuts `rows` rows into query blocks, whose lanes are consecutive in scratch. `set_up(q_block, first_row)` sets each
// block's pointers. Returns the number of blocks.
template <class SetUp>
std::int64_t make_query_blocks(std::int64_t rows, GradQueryBlock* q_blocks, SetUp set_up) {
  std::int64_t count = 0, lane = 0;
  for (std::int64_t r = 0; r < rows; ++count) {
    GradQueryBlock& q_block = q_blocks[count];
    const std::int64_t vecs_left = (rows - r + kLanes - 1) / kLanes;
    q_block.vecs = vecs_left == kVecs + 1 && kVecs > 2 ? 2 : min(vecs_left, kVecs);  // 2 + 2, not 3 + 1
    q_block.width = q_block.vecs * kLanes;
    q_block.rows = min(q_block.width, rows - r);
    q_block.lane = lane;
    set_up(q_block, r);
    for (std::int64_t i = q_block.rows; i < q_block.width; ++i) q_block.row[i] = q_block.row[q_block.rows - 1];
    r += q_block.rows, lane += q_block.width;
  }
  return count;
}

// rowsum(dO * O) of kLanes rows.
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
          sum[i] = fma(load_repeated(dout + c * p.dout_stride.d, p.dout_stride.d, n),
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

// Whether mask and bias leave the row at least one of the keys in its range.
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

// Computes neg_m = -lse, so that weights are probabilities, and neg_delta, of n rows, a multiple of kLanes. Returns a
// bit for each row that attends to one value: its neg_delta lacks dO . O, and dP must lack the same, so the caller
// computes dP from dO = 0.
inline std::uint64_t prepare_rows(const AttentionBackwardParams& p, const Head& head, const Row* row, std::int64_t n,
                                  float* neg_m, float* neg_delta) {
  std::uint64_t without_dp = 0;
  for (std::int64_t r = 0; r < n; r += kLanes) store(neg_delta + r, vec(0.f) - deltas(p, head, row + r));
  for (std::int64_t r = 0; r < n; ++r) {
    const float lse = p.lse[row_at(p.lse_stride, head, row[r])];
    // A row that sees no key has weights of 0. The weights of a row that saw +inf are NaN, as in the forward.
    neg_m[r] = lse == -kInfinity  ? -kInfinity
               : lse == kInfinity ? __builtin_nanf("")
                                  : static_cast<float>(-(static_cast<double>(lse) * rapt::kLog2e +
                                                         static_cast<double>(alibi_shift_log2(head, row[r]))));
    // A row that sees no key contributes only dlse to its sink's gradient, even if its dout is not finite.
    const bool is_finite = abs_of(neg_delta[r]) < kInfinity;
    if (p.grad_sinks && !is_finite && !sees_a_key(head, row[r])) neg_delta[r] = 0;
    if (is_finite && attends_one_value(p, head, row[r])) neg_delta[r] = 0, without_dp |= std::uint64_t{1} << r;
    if (p.dlse) neg_delta[r] += p.dlse[row_at(p.dlse_stride, head, row[r])];
  }
  return without_dp;
}

// Packs Q^T and dO^T of a query block, and prepares its rows.
inline void prepare_query_block(const AttentionBackwardParams& p, const Head& head, GradQueryBlock& q_block) {
  with_float_type(p.q_type, [&](auto e) {
    pack_rows(static_cast<const decltype(e)*>(p.q), p.q_stride, p.d, head, q_block, q_block.qt);
  });
  with_float_type(p.dout_type, [&](auto e) {
    pack_rows(static_cast<const decltype(e)*>(p.dout), p.dout_stride, p.dv, head, q_block, q_block.dout_t);
  });
  static_assert(kWidth <= 64);
  std::uint64_t without_dp = prepare_rows(p, head, q_block.row, q_block.width, q_block.neg_m, q_block.neg_delta);
  for (; without_dp != 0; without_dp &= without_dp - 1)
    for (std::int64_t c = 0; c < p.dv; ++c) q_block.dout_t[c * q_block.width + __builtin_ctzll(without_dp)] = 0;
}

// Puts Q and dO of a query block of few rows into tiles.
inline void put_few_rows(const AttentionBackwardParams& p, GradQueryBlock& q_block, const FewRows& few) {
  const auto put = [&](const float* transposed, std::int64_t n, float* tiles) {
    with_row_tiles(q_block.rows, [&](auto tile_rows, std::int64_t r0) {
      for (std::int64_t i = 0; i < tile_rows; ++i) {
        for (std::int64_t c = 0; c < n; ++c) few.row[c] = transposed[c * q_block.width + r0 + i];
        put_query(few.row, n, tile_rows, tiles + r0 * round_up(n, kLanes) + i * kLanes);
      }
    });
  };
  put(q_block.qt, p.d, few.q);
  put(q_block.dout_t, p.dv, few.dout);
  q_block.few = &few;
}

inline void find_keys(const FewRows& few, KvBlock kv, std::int64_t begin, std::int64_t end) {
  for (std::int64_t j = begin; j < end; ++j) few.key[j] = reinterpret_cast<const std::byte*>(kv.data + j * kv.stride);
}
// dst[key][lane] = x . k, for keys [begin, end) of the block and rows x in `tiles`. Lanes of no row get numbers that
// are not used.
inline void multiply_few(const GradQueryBlock& q_block, const float* tiles, std::int64_t n, KvBlock kv,
                         std::int64_t begin, std::int64_t end, float* dst) {
  const FewRows& few = *q_block.few;
  const std::int64_t stride = q_block.rows <= 2 ? q_block.rows : kRowsOfTile;
  find_keys(few, kv, begin, end);
  store_any(few.dots + end * stride, vec(0.f));  // where lanes of no row may read more than the products write
  Prefetcher none;
  kProducts<AsStored<float>>.dots(q_block.rows, tiles, round_up(n, kLanes), n, few.key, {}, begin, end, few.dots,
                                  stride, none);
  for (std::int64_t j = begin; j < end; ++j) store(dst + j * kLanes, load_any(few.dots + j * stride));
}
// dQ^T += K^T dS^T for these keys.
inline void add_few_to_rows(const GradQueryBlock& q_block, std::int64_t n, KvBlock kb, std::int64_t begin,
                            std::int64_t end) {
  const FewRows& few = *q_block.few;
  const std::int64_t stride = round_up(n, kLanes);
  find_keys(few, kb, begin, end);
  fill(few.sums, (q_block.rows <= 2 ? q_block.rows : kRowsOfTile) * stride, 0);
  Prefetcher none;
  kProducts<AsStored<float>>.add(q_block.rows, q_block.ds, kLanes, few.key, {}, n, begin, end, few.sums, stride, none);
  for (std::int64_t c = 0; c < n; ++c) {
    const std::int64_t at = c < n / kLanes * kLanes ? c : c + stride - n;  // the last vector overlaps the one before
    for (std::int64_t r = 0; r < q_block.rows; ++r) q_block.ot[c * kLanes + r] += few.sums[r * stride + at];
  }
}

// Gathered keys are scattered in memory, so they are always packed.
inline bool must_pack_value_rows(const AttentionBackwardParams& p) {
  return p.kv_type != DType::f32 || p.v_stride.d != 1 || p.tokens > 0;
}
inline bool must_pack_keys_twice(const AttentionBackwardParams& p) {  // read as rows and as columns
  const Strides& s = p.k_stride;
  return must_pack_keys(p) || (s.s >= 512 && s.s != p.d) || p.tokens > 0;
}

// Clamps an exponent to 0. No weight is above 1, but the exponent of a weight near 1 has the rounding errors of its
// score and of lse, hundreds where these are 1e9.
[[gnu::always_inline]] inline vec at_most_0(vec exponent) {
  return xsimd::min(vec(0.f), exponent);  // in this order NaN stays
}

// Writes P^T over the exponents at s, and dS^T over dP^T at ds. kMasked: hidden keys have a score of -inf, and get 0
// whatever lse and dP are.
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

// Computes scores, final in the form that to_exponents() describes, and dP, of the block's keys that the query block
// reads. Returns whether it sees any.
template <int kW>
bool score(const Head& head, GradQueryBlock& q_block, std::int64_t k0, std::int64_t n, KvBlock kb, KvBlock vb,
           float* discarded) {
  const ScoreParams& score = head.p.score;
  const bool modified = needs_finish(score);
  BlockSegments& c = q_block.segments = find_segments(q_block, k0, n, modified);
  bool visible = !modified && c.count > 0;
  for (int i = 0; i < c.count; ++i) {
    const Segment& g = c.segment[i];
    const std::int64_t lane = g.vec * kLanes, at = g.begin * q_block.width + lane;
    if (q_block.few) {
      multiply_few(q_block, q_block.few->q, head.p.d, kb, g.begin, g.end, q_block.s);
      multiply_few(q_block, q_block.few->dout, head.p.dv, vb, g.begin, g.end, q_block.ds);
    } else {
      with_vecs<kW>(kW - g.vec, [&](auto vecs) {
        tiles<vecs>(ScoresTile<kW>{kb.data + g.begin * kb.stride, kb.stride, head.p.d, q_block.qt + lane,
                                   q_block.s + at, discarded},
                    g.end - g.begin);
        tiles<vecs>(ScoresTile<kW>{vb.data + g.begin * vb.stride, vb.stride, head.p.dv, q_block.dout_t + lane,
                                   q_block.ds + at, discarded},
                    g.end - g.begin);
      });
    }
    if (!g.masked) continue;
    for (std::int64_t v = g.vec; v < kW; ++v)
      visible |= (modified ? finish_scores<true> : finish_scores<false>)(head, q_block, v, k0, g.begin, g.end,
                                                                         q_block.s, discarded, q_block.derivative);
  }
  return visible;
}

// P^T and dS^T of one vector of rows, written over scores and dP, with dropout: it applies to P and to dP, but P
// within dS is not dropped.
[[gnu::noinline]] inline void differentiate_with_dropout(const Head& head, const GradQueryBlock& q_block,
                                                         std::int64_t v, std::int64_t k0, ToExponents e) {
  const std::int64_t lane = v * kLanes;
  const vec scale(e.scale), add = load(e.add + lane), minus = load(q_block.neg_delta + lane);
  for_each_drawn_key(
      head, q_block.row + lane, k0, q_block.segments.begin,
      q_block.segments.end[v], [&](std::int64_t j, AfterDropout after) __attribute__((always_inline)) {
        float *const s = q_block.s + j * q_block.width + lane, *const ds = q_block.ds + j * q_block.width + lane;
        const vec x = load(s), p = exp2(at_most_0(fma(x, scale, add)));
        const vec d = p * (after(load(ds)) + minus);
        const auto hidden = x == minus_infinity();
        store(s, xsimd::select(hidden, vec(0.f), after(p)));
        store(ds, xsimd::select(hidden, vec(0.f), d));
      });
}

// Writes P^T and dS^T over final scores and dP.
template <int kW>
void differentiate(const Head& head, const GradQueryBlock& q_block, std::int64_t k0, const float* zero) {
  const ToExponents e = to_exponents(head.p.score, q_block, zero);
  if (head.p.score.dropout.given) {
    for (std::int64_t v = 0; v < kW; ++v) differentiate_with_dropout(head, q_block, v, k0, e);
    return;
  }
  for (int i = 0; i < q_block.segments.count; ++i) {
    const Segment& g = q_block.segments.segment[i];
    const std::int64_t lane = g.vec * kLanes;
    with_vecs<kW>(kW - g.vec, [&](auto vecs) {
      (g.masked ? differentiate<vecs, kW, true>
                : differentiate<vecs, kW, false>)(q_block.s + lane, q_block.ds + lane, g.begin, g.end,
                                                  {e.scale, e.add + lane}, q_block.neg_delta + lane);
    });
  }
}

// Adds to dslope the contribution of keys [begin, end) of the block to the slopes' gradient, for one vector of rows.
// `ds` is dS before the score's derivative.
inline void add_to_slopes(const Head& head, const QueryBlock& q_block, std::int64_t v, std::int64_t k0,
                          std::int64_t begin, std::int64_t end, const float* ds, float* dslope) {
  const std::int64_t lane = v * kLanes;
  alignas(64) float position[kLanes];
  for (int i = 0; i < kLanes; ++i) position[i] = static_cast<float>(q_block.row[lane + i].token + head.offset - k0);
  vec key(static_cast<float>(begin)), sum(0.f);
  for (std::int64_t j = begin; j < end; ++j, key = key + vec(1.f)) {
    const vec d = load(ds + j * q_block.width + lane);
    sum = sum - xsimd::select(d == vec(0.f), vec(0.f), d * xsimd::abs(load(position) - key));
  }
  store(dslope + lane, load(dslope + lane) + sum);
}

// dQ^T of a query block, at ot, times the scale -> dq.
inline void store_rows(const Gradient& to, const Head& head, const QueryBlock& q_block, std::int64_t n, float scale) {
  with_float_type(to.type, [&](auto element) {
    auto* const base = static_cast<decltype(element)*>(to.data);
    for (std::int64_t lane = 0; lane < q_block.width; lane += kLanes)
      for (std::int64_t c0 = 0; c0 < n; c0 += kLanes) {
        const std::int64_t count = min(kLanes, n - c0);
        vec r[kLanes];
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j)
          r[j] = fma(load(q_block.ot + min(c0 + j, n - 1) * q_block.width + lane), vec(scale), vec(0.f));
        if (to.stride.s == 1 && to.stride.d != 1 && head.p.group == 1) {  // columns are contiguous
          auto* const first = base + row_at(to.stride, head, q_block.row[lane]);
          for (std::int64_t j = 0; j < count; ++j)
            store_strided(first + (c0 + j) * to.stride.d, 1, min(kLanes, q_block.rows - lane), r[j]);
          continue;
        }
        transpose(r);
        for (std::int64_t i = 0; i < min(kLanes, q_block.rows - lane); ++i)
          store_strided(base + row_at(to.stride, head, q_block.row[lane + i]) + c0 * to.stride.d, to.stride.d, count,
                        r[i]);
      }
  });
}

// Stores each row's share of the gradients of its head's sink and slope.
inline void store_row_sums(const AttentionBackwardParams& p, const Head& head, const QueryBlock& q_block,
                           const float* neg_delta, const float* dslope, const BackwardItem& item) {
  for (std::int64_t i = 0; i < q_block.rows; ++i) {
    const Row& row = q_block.row[i];
    const std::int64_t at = row_sum_at(p, item.b, head, row);
    if (item.sink_sums) {
      const double weight = sink_weight(p, head, row);
      item.sink_sums[at] = weight == 0 ? 0.f : static_cast<float>(weight) * neg_delta[i];
    }
    if (item.slope_sums) item.slope_sums[at] = dslope[i];
  }
}

// Work items of both kernels.
struct ItemKeys {
  std::int64_t begin, end;  // the existing keys of the work item
};
inline ItemKeys keys_of(const Head& head, const BackwardItem& item) {
  return {min(item.key_begin, head.len_k), min(item.key_end, head.len_k)};
}
inline BackwardShape shape_of(const AttentionBackwardParams& p, const BackwardItem& item) {
  return {p.d, p.dv, changes_derivative(p.score), item.key_end - item.key_begin};
}
inline WorkItem all_rows(const BackwardItem& item) {
  return {item.b, item.hk, 0, 0, 0, INT64_MAX, nullptr};
}

// The sums of dK or dV for 32 keys and 32 columns.
struct KeySums {
  const float* data;
  std::int64_t stride;  // floats from key to key
};
// store_keys() where the gradient's columns are contiguous in memory, and its rows are not.
template <class T, class SumsOf>
[[gnu::noinline]] void store_columns(const Gradient& to, const Head& head, const BackwardItem& item, std::int64_t n,
                                     float scale, const SumsOf& sums_of, T* base) {
  const ItemKeys keys = keys_of(head, item);
  base += head.key_at(to.stride, keys.begin);
  const std::int64_t count = keys.end - keys.begin, end = max(item.clear_end - keys.begin, count);
  for (std::int64_t j = 0; j < count; j += kLanes)
    for (std::int64_t c0 = 0; c0 < n; c0 += kLanes) {
      const KeySums sums = sums_of(j / 32 * 32, c0 / 32 * 32);
      const float* const from = sums.data + j % 32 * sums.stride + c0 % 32;
      vec columns[kLanes];
      for (std::int64_t i = 0; i < kLanes; ++i) columns[i] = fma(load(from + i * sums.stride), vec(scale), vec(0.f));
      transpose(columns);
      for (std::int64_t c = 0; c < min(kLanes, n - c0); ++c)
        store_strided(base + j + (c0 + c) * to.stride.d, 1, min(kLanes, count - j), columns[c]);
    }
  for (std::int64_t c = 0; c < n; ++c)
    for (std::int64_t j = count; j < end; j += kLanes)
      store_strided(base + j + c * to.stride.d, 1, min(kLanes, end - j), vec(0.f));
}
// Stores sums of dK or dV, times the scale, as the gradient; keys that do not exist get 0. sums_of(j, c) returns the
// sums of 32 keys from the work item's key j on and 32 columns from c on; both are multiples of 32.
template <class SumsOf>
void store_keys(const Gradient& to, const Head& head, const BackwardItem& item, std::int64_t n, float scale,
                SumsOf sums_of) {
  const ItemKeys keys = keys_of(head, item);
  with_float_type(to.type, [&](auto element) {
    auto* const base = static_cast<decltype(element)*>(to.data);
    const std::int64_t end = max(keys.end, item.clear_end), inner = to.stride.d;
    const std::int64_t whole = inner == 1 ? n / kLanes * kLanes : 0;
    const auto store_row = [&](std::int64_t j, auto gradient) __attribute__((always_inline)) {
      auto* const row = base + head.key_at(to.stride, j);
      for (std::int64_t c = 0; c < whole; c += kLanes) store_any(row + c, gradient(c));
      for (std::int64_t c = whole; c < n; c += kLanes)
        store_strided(row + c * inner, inner, min(kLanes, n - c), gradient(c));
    };
    if (to.stride.s == 1 && inner != 1 && head.p.page_size == 0)  // columns are contiguous
      return store_columns(to, head, item, n, scale, sums_of, base);
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      const std::int64_t i = (j - keys.begin) % 32, j0 = j - keys.begin - i;
      store_row(
          j, [&](std::int64_t c) __attribute__((always_inline)) {
            const KeySums sums = sums_of(j0, c / 32 * 32);
            return fma(load(sums.data + i * sums.stride + c % 32), vec(scale), vec(0.f));
          });
    }
    for (std::int64_t j = keys.end; j < end; ++j)
      store_row(
          j, [](std::int64_t) __attribute__((always_inline)) { return vec(0.f); });
  });
}

// Gathered keys: adds dK and dV of the work item's keys to the sums of their pool rows. `of_k` and `of_v` are like
// `sums_of` of store_keys().
template <class SumsOfK, class SumsOfV>
void add_to_pool(const AttentionBackwardParams& p, const Head& head, const BackwardItem& item, SumsOfK of_k,
                 SumsOfV of_v) {
  const ItemKeys keys = keys_of(head, item);
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
