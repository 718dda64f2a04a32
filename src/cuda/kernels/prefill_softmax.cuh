// attention_prefill's online softmax: scores to weights, row statistics and results of a warpgroup's 64 rows, in
// registers.
#pragma once

#include "cuda/hopper/fragment.cuh"
#include "cuda/kernels/prefill_load.cuh"
#include "cuda/kernels/prefill_modifiers.cuh"
#include "cuda/tile/fallback_rows.cuh"

namespace rapt::cuda {

// The largest move of a shift at once: its factor on O and row_sum is no denormal number. A row whose weights add up to
// kMaxRowSum or more falls back, since 1 / row_sum would be denormal.
constexpr int kMaxShiftMove = 120;
constexpr float kMaxRowSum = 0x1p120f;

// S = Q K^T of a warpgroup's rows and a block of keys, and O += P V. Both are asynchronous: wgmma_wait() ends them.
template <class C>
__device__ __forceinline__ void multiply_keys(float (&s)[C::kKeys / 2], std::uint32_t q_matrix,
                                              std::uint32_t k_matrix) {
  constexpr int kSteps = C::kPanel / 16;  // of 16 columns in a panel
#pragma unroll
  for (int i = 0; i < C::kColumns / 16; ++i) {
    const int panel = i / kSteps * (C::kRowBytes / 16), step = i % kSteps * 2;
    wgmma_abt<typename C::Element, C::kRowBytes>(s, q_matrix + panel * C::kRows + step,
                                                 k_matrix + panel * C::kKeys + step, i > 0);
  }
  wgmma_commit();
}
template <class C>
__device__ __forceinline__ void multiply_values(float (&o)[C::kColumns / 2], const std::uint32_t* weights,
                                                std::uint32_t v_matrix) {
#pragma unroll
  for (int i = 0; i < C::kKeys / 16; ++i)
    wgmma_ab<typename C::Element, C::kRowBytes>(o, weights + 4 * i, v_matrix + i * C::kRowBytes, 1);
  wgmma_commit();
}

// A math warpgroup's state: weights, O and statistics of its rows.
template <class C>
struct OnlineSoftmax : SoftmaxState<C> {
  using SoftmaxState<C>::kScores, SoftmaxState<C>::kOut, SoftmaxState<C>::lane, SoftmaxState<C>::warp_row,
      SoftmaxState<C>::column;
  using SoftmaxState<C>::row, SoftmaxState<C>::o, SoftmaxState<C>::row_max, SoftmaxState<C>::row_sum,
      SoftmaxState<C>::rescale;

  const PrefillParams& params;
  std::uint32_t weights[kScores / 2] = {};  // of the block before the one in s, as operand A
  [[maybe_unused]] std::uint32_t dropped;   // a bit for each score in s: its weight is dropped
  [[maybe_unused]] float row_factor[2];     // each row's factor on scores, where kScalesRows
  int all_from, all_to;  // keys [all_from, all_to) are seen by all of the warp's rows, counted from the tile's first

  __device__ OnlineSoftmax(const PrefillParams& params) : params(params) {}

  __device__ void begin(const TileOf<C>& tile) {
    SoftmaxState<C>::begin(params, tile);
    if constexpr (kPredictsShift) predicted_shift[0] = predicted_shift[1] = kNoPrediction;
    if constexpr (kScalesRows)
      for (int h = 0; h < 2; ++h) row_factor[h] = params.outer * tile.of(params, row(h)).scale;
    const KeyRange32 all = tile.seen_by_all(warp_row);
    all_from = all.first, all_to = all.last;
  }

  // Turns scores of keys [key, key + kKeys), counted from the tile's first, into weights. Calls `await_values` halfway
  // through the exponentials: it waits for P V of the previous block, whose weights are then overwritten. `scales`: a
  // quantized block's scales of keys, then of values. A value's scale multiplies its weight.
  template <class AwaitValues>
  __device__ void softmax(float (&s)[kScores], const TileOf<C>& tile, int key, [[maybe_unused]] std::uint32_t scales,
                          AwaitValues await_values) {
    if constexpr (C::kQuantized) {
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        const float2 two = load8(scales + 4 * (2 * i + column));
        s[i] *= two.x, s[i + 1] *= two.y, s[i + 2] *= two.x, s[i + 3] *= two.y;
      }
    }
    if constexpr (C::kModified) {
      const float inner[2] = {inner_of(tile.of(params, row(0))), inner_of(tile.of(params, row(1)))};
      const BlockModifiers<C> modifiers(params, tile, row(0), key + column);
      modifiers.finish(s, inner);
      if (params.p.score.dropout.given) dropped = modifiers.dropped();
      if (key < all_from || key + C::kKeys > all_to) mask_scores<kScores>(s, tile, key);
    } else if (key < all_from || key + C::kKeys > all_to) {
      if constexpr (kSkipsMaskedHalf) {
        if (__reduce_max_sync(~0u, tile.of(params, warp_row + lane % 16).last) <= key + C::kKeys / 2) {
          mask_scores<kScores / 2>(s, tile, key);
          return exponentiate<kScores / 2>(s, key, scales, await_values);
        }
      }
      mask_scores<kScores>(s, tile, key);
      // A block before the row's first key must not move its shift: other tiles of the same rows may lack it. (Within
      // mask_scores(), ptxas makes the additions wait for the values.)
      if constexpr (kPredictsShift) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (key + C::kKeys <= tile.of(params, row(h)).first) predicted_shift[h] = -kInfinity;
      }
    }
    exponentiate<kScores>(s, key, scales, await_values);
  }

  __device__ void rescale_values() {
    // The factor is exactly 1 in most blocks.
    if (!__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] *= rescale[i / 2 % 2];
  }

  // Stores a split's partial results: O, row_max and row_sum.
  __device__ void store_partials(const TileOf<C>& tile) {
    const AttentionParams& p = params.p;
    const Head head(p, tile.b, tile.hk);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (tile.of(params, row(h)).out < 0) continue;
      float* const to = params.partials.at(head, tile.row + row(h), tile.split);
#pragma unroll
      for (int i = 2 * h; i < kOut; i += 4)
        store_pair(to + column + 2 * (i - 2 * h), 1, static_cast<int>(p.dv) - column - 2 * (i - 2 * h), o[i], o[i + 1]);
      if (lane % 4 == 0)
        to[PartialResults::stats_offset(p)] = row_max[h] - C::kShift,
        to[PartialResults::stats_offset(p) + 1] = row_sum[h];
    }
  }

  // The warp's fallback rows, a bit each, found from O before it is normalised.
  __device__ unsigned fallback_rows(const TileOf<C>& tile, float shift) {
    float nan_or_0[2][2] = {};
#pragma unroll
    for (int i = 0; i < kOut; i += 2) {
      float& part = nan_or_0[i / 2 % 2][i / 4 % 2];
      part = fmaf(o[i], 0, fmaf(o[i + 1], 0, part));
    }
    bool falls_back[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = row_max[h] - shift;
      const bool trusted = nan_or_0[h][0] + nan_or_0[h][1] == 0 && row_sum[h] < kMaxRowSum &&
                           (top == -kInfinity || fabsf(top) < kHugeScore);
      falls_back[h] = must_fall_back[h] || !trusted;
    }
    if (!__any_sync(~0u, falls_back[0] || falls_back[1])) return 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) falls_back[h] = falls_back[h] && tile.of(params, row(h)).out >= 0;
    return rows_of_warp(falls_back);
  }

  // Reduces row sums over lanes, stores lse, and works out what O is to be multiplied by. O need not be complete yet.
  __device__ void finish(const TileOf<C>& tile) {
    const AttentionParams& p = params.p;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_sum[h] = over_row(row_sum[h], Sum());
      must_fall_back[h] = false;
      if constexpr (C::kSplit) {
        if (C::kModified || !params.writes_output) continue;
        // The same bits as attention_combine makes of the partial results of a single split.
        const auto& r = tile.of(params, row(h));
        const FinalizedRow f = finalize_row(row_max[h] - C::kShift, row_sum[h], -kInfinity, r.alibi_shift);
        if (p.lse && r.lse >= 0 && lane % 4 == 0) p.lse[r.lse] = f.lse;
        output_scale[h] =
            f.sum == 0 ? 0.f : f.root_scale / f.sum;  // root_scale is 1, or NaN where row_max is not finite
      } else {
        if (p.score.sinks) {
          const auto& r = tile.of(params, row(h));
          const float sink = exp2_approx(tile.sink(params, row(h)) - shift_of(row_max[h]) + C::kShift);
          must_fall_back[h] =
              r.first < r.last && sink > 0 && row_sum[h] <= fmaf(sink, kMinKeyWeight<typename C::Element>, sink);
        }
        if (p.lse) [[unlikely]] {
          const auto& r = tile.of(params, row(h));
          if (r.lse >= 0 && lane % 4 == 0) p.lse[r.lse] = lse_of(row_max[h] - C::kShift, row_sum[h], r.alibi_shift);
        }
        output_scale[h] = row_sum[h] == 0 ? 0.f : __fdividef(1, row_sum[h]);
        if (C::kModified && p.score.dropout.given) output_scale[h] *= p.score.dropout.scale;
      }
    }
  }
  // Normalises and stores O; fallback rows become NaN, which no other row is. `q_row`: the place of the warp's rows of
  // Q in shared memory. Returns whether there are fallback rows.
  __device__ bool store(const TileOf<C>& tile, std::uint32_t q_row) {
    if (C::kSplit && (C::kModified || !params.writes_output)) {
      store_partials(tile);
      return false;
    }
    const unsigned fallback = fallback_rows(tile, C::kSplit ? C::kShift : 0.f);
    if (fallback != 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (fallback >> (lane / 4 + 8 * h) & 1) output_scale[h] = not_a_number();
    }
#pragma unroll
    for (int i = 0; i < kOut; ++i)  // attention_combine adds to 0, so its results are never -0
      o[i] = C::kSplit ? fmaf(o[i], output_scale[i / 2 % 2], 0.f) : o[i] * output_scale[i / 2 % 2];
    if (C::kDense || (C::kStoresByTma && params.out_by_tma)) {
      store_rows_to_shared<C>(q_row, o);
      if (!C::kStoresByProducer && lane == 0) store_by_tma<C>(params, tile, warp_row, q_row);
    } else if constexpr (!C::kDense) {
      store_rows(params, tile, warp_row, o);
    }
    return fallback != 0;
  }

 private:
  // Quantized calls may have a scale for each query: a factor on the row's scores, before modifiers.
  static constexpr bool kScalesRows = C::kQuantized && !C::kModified;
  template <class RowInfo>
  __device__ float inner_of(const RowInfo& r) const {
    if constexpr (C::kQuantized) return params.inner * r.scale;
    else return params.inner;
  }

  // In heads of 64 columns exponentials take as long as products. Where no row of the warp sees the second half of a
  // block, only the first half is computed, with the same bits.
  static constexpr bool kSkipsMaskedHalf =
      C::kSize == 64 && C::kKeys == 128 && !C::kSplit && !C::kModified && !C::kQuantized;
  // In bf16 the next block's shift is predicted from the row sum of the block before, so that exponentials wait for no
  // reduction. Weights may then exceed 2^kRescaleThreshold by as much as scores rise from one block to the next; rows
  // whose weights add up to 2^kMaxShiftMove fall back. Not with modifiers: a large finite bias, used as a mask, makes
  // scores rise by any amount.
  static constexpr bool kPredictsShift = kSkipsMaskedHalf && std::is_same_v<typename C::Element, __nv_bfloat16>;
  static constexpr int kRescaleSumLog2 =
      15;  // the shift moves where a block's weights add up to 2^(kRescaleSumLog2 + 1)
  static constexpr float kNoPrediction = kInfinity;
  // The next block's shift. -inf: unchanged. kNoPrediction: the block's own maximum, since the row has had no weights
  // yet.
  float predicted_shift[2];
  float output_scale[2];   // 1 / row_sum, or what else O is multiplied by
  bool must_fall_back[2];  // fallback rows, although their numbers are finite

  // Sets scores of hidden keys to -inf, among the first kCount. Without branches: with one, ptxas moves exponentials
  // that should run beside products behind the wait for values.
  template <int kCount>
  __device__ void mask_scores(float (&s)[kScores], const TileOf<C>& tile, int key) const {
    static_assert(kCount <= 64, "a bit to each score of a row");
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto& r = tile.of(params, row(h));
      // Bit i: the lane's i-th score of the row, of key + column + i / 2 * 8 + i % 2, is below `end`.
      const auto bits_below = [&](int end) {
        const int keys = min(max(end - key - column, 0), 2 * kScores), count = keys / 8 * 2 + min(keys % 8, 2);
        return count < 32 ? (1u << count) - 1 : ~0u;
      };
      const std::uint32_t seen = bits_below(r.last) & ~bits_below(r.first);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i)
        if ((seen >> i & 1) == 0) s[i / 2 * 4 + 2 * h + i % 2] = -kInfinity;
    }
  }

  // P = 2^(S - shift) for the first kCount scores; the other weights become 0. Adds to row_sum and moves the shift.
  template <int kCount, class AwaitValues>
  __device__ void exponentiate(float (&s)[kScores], [[maybe_unused]] int key, [[maybe_unused]] std::uint32_t scales,
                               AwaitValues await_values) {
    const float outer = params.outer;
    const auto factor = [&](int h) { return kScalesRows ? row_factor[h] : outer; };
    const auto top = [&](int h) { return over_row(max_of_row<kCount>(s, h), Max()) * factor(h); };
    float to[2], neg_m[2];
    if constexpr (kPredictsShift) {
      to[0] = predicted_shift[0], to[1] = predicted_shift[1];
      if (__any_sync(~0u, to[0] == kNoPrediction || to[1] == kNoPrediction)) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (const float first = top(h); to[h] == kNoPrediction) to[h] = first;
      }
    } else {
      to[0] = top(0), to[1] = top(1);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) neg_m[h] = this->update_shift(h, to[h]);
    float sum[4] = {};
    const auto add = [&](int i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[n] += s[i + n];
    };
    const auto pack_four = [&](int i) {
      if constexpr (C::kQuantized) {
        const float2 two = load8(scales + 4 * (C::kKeys + 2 * i + column));
        s[i] *= two.x, s[i + 1] *= two.y, s[i + 2] *= two.x, s[i + 3] *= two.y;
      }
#pragma unroll
      for (int n = i; n < i + 4; n += 2) weights[n / 2] = pack<typename C::Element>(s[n], s[n + 1]);
    };
    // Weights are packed kLater scores later: after await_values() where the previous weights are still in use.
    constexpr int kHalf = kCount / 2, kLater = C::kModified ? kCount : C::kWarpSpecialized ? kHalf : 4;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      if (i == kHalf) await_values();
#pragma unroll
      for (int n = i; n < i + 4; ++n) s[n] = exp2_approx(fmaf(s[n], factor(n / 2 % 2), neg_m[n / 2 % 2]));
      if (i > 0) add(i - 4);
      if (i >= kLater) pack_four(i - kLater);
      pin(sum);  // or the compiler separates exponentials from additions
    }
    add(kCount - 4);
    if constexpr (C::kModified) {  // the sums are of all weights
      if (params.p.score.dropout.given) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          if (dropped >> i & 1) s[i] = 0;
      }
    }
#pragma unroll
    for (int i = kCount - kLater; i < kCount; i += 4) pack_four(i);
#pragma unroll
    for (int i = kCount; i < kScores; i += 2) weights[i / 2] = 0;
    const float of_block[2] = {sum[0] + sum[1], sum[2] + sum[3]};
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[h] = fmaf(row_sum[h], rescale[h], of_block[h]);
    if constexpr (kPredictsShift) {
      if (key == 0) return;  // the tile's last block: there is no next shift to predict
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = over_row(of_block[h], Sum());
        const int exponent = min((__float_as_int(sum) >> 23) - 127, kMaxShiftMove);
        if (sum > 0)
          predicted_shift[h] = exponent > kRescaleSumLog2 ? row_max[h] + static_cast<float>(exponent) : -kInfinity;
      }
    }
  }
};

// Recomputes the warp's fallback rows, in those of the thread block's tiles t for which bit t % 32 of `tiles` is set.
// Called once, after all tiles: a call within the loop over tiles took registers from it.
template <class C>
__device__ __noinline__ void recompute_fallback_rows(const PrefillParams& params, const SequenceList& list,
                                                     unsigned tiles) {
  const AttentionParams& p = params.p;
  const int lane = threadIdx.x % 32, warp_row = first_row_of_warp<C>();
  TileScheduler<C> scheduler{params, list};
  TileExtent tile;
  KeyBounds32 keys;
#pragma unroll 1
  for (unsigned t = 0; scheduler.next(tile, keys); ++t) {
    if ((tiles >> t % 32 & 1) == 0) continue;
    const int row = tile.row + warp_row + lane % 16;
    bool falls_back = row < tile.rows;
    if (falls_back) {
      const Head head(p, tile.b, tile.hk);
      falls_back = isnan(load(p.out, p.out_type, row_at(p.out_stride, head, row_of(head, row))));
    }
    if (const unsigned rows = __ballot_sync(~0u, falls_back) & 0xffff; rows != 0)
      recompute_rows<std::conditional_t<C::kQuantized, void, typename C::Element>, (C::kSize + 63) / 64 * 64,
                     C::kModified>(p, tile.b, tile.hk, tile.row + warp_row, rows);
  }
}

}  // namespace rapt::cuda
