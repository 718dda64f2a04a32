// attention_latent's two math warpgroups: scores and online softmax of every other key block, and P V of all blocks in
// one half of the values' columns.
#pragma once

#include <type_traits>

#include "cuda/hopper/fragment.cuh"
#include "cuda/kernels/latent_config.cuh"

namespace rapt::cuda {

// A math warpgroup: `half` of O's columns in registers, and the key blocks that it owns.
template <class T, bool kByTma>
struct LatentSoftmax {
  static constexpr int kScores = kKeys / 2, kOut = kLatentMaxValueHeadDim / 4;
  // Weights are 2^kShift times as large as in the formula: fp16 has a short range below 1.
  static constexpr float kShift = std::is_same_v<T, __half> ? 7 : 0;

  const LatentParams& params;
  const SplitBlock& block;
  const LatentShare& share;
  const LatentRing<kByTma>& ring;
  LatentShared& shared;
  const std::uint32_t q, p;  // addresses of Q and P in shared memory
  const int half, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16, column = lane % 4 * 2;
  const int valid;       // keys of the first block taken, the last ones, up to the last that a row sees
  int all_from, all_to;  // keys [all_from, all_to) are seen by all rows of the warp
  float o[kOut] = {};
  float row_max[2] = {-kInfinity, -kInfinity},
        row_sum[2] = {};  // row_sum: over the lane's columns of the warpgroup's own blocks

  __device__ LatentSoftmax(const LatentParams& params, const SplitBlock& block, const LatentShare& share,
                           const LatentRing<kByTma>& ring, LatentShared& shared, std::uint32_t q, std::uint32_t p,
                           int half)
      : params(params),
        block(block),
        share(share),
        ring(ring),
        shared(shared),
        q(q),
        p(p),
        half(half),
        valid(min(share.end - share.key_of(0), kKeys)) {
    all_from = __reduce_max_sync(~0u, shared.rows.from[warp_row + lane % 16]);
    all_to = __reduce_min_sync(~0u, shared.rows.to[warp_row + lane % 16]);
  }
  __device__ int row(int h) const { return warp_row + lane / 4 + 8 * h; }
  __device__ int keys_at(int i) const { return params.separate_values ? 2 * i : i; }
  __device__ int values_at(int i) const { return params.separate_values ? 2 * i + 1 : i; }

  // Issues S = Q K^T of block i.
  __device__ __forceinline__ void multiply_keys(int i, float (&s)[kScores]) {
    const int n = keys_at(i);
    const std::uint32_t q_matrix = matrix_at(q), k_matrix = matrix_at(ring.slot(n));
    if (params.separate_values && i > 0) {
      // The other warpgroup's keys come to this place in between, and both warpgroups free it. This one waits for them
      // first, or it would free the place for the keys before them.
      ring.wait_full_half(n - 2, 0), ring.wait_full_half(n - 2, 1);
      release_keys(i - 1);
    }
    pin(s);
#pragma unroll
    for (int step = 0; step < 4 * kPanels; ++step) {
      if (step % 8 == 0 && step / 8 < kParts) {
        ring.wait_full(n, step / 8);
        wgmma_fence();
      }
      const int at = step / 4 * (kPanelBytes / 16) + step % 4 * 2;
      wgmma_abt<T>(s, q_matrix + at, k_matrix + at, step > 0);
    }
    wgmma_commit();
  }
  // The matrix of the warpgroup's half of the values of block i. Past the last key TMA may have loaded anything, and
  // the places of weights of 0 must not hold NaN.
  __device__ __forceinline__ std::uint32_t values_of(int i) {
    const int n = values_at(i);
    const std::uint32_t values = ring.slot(n) + half * (kLeftPanels * kPanelBytes);
    ring.wait_full_half(n, half);
    if (i == 0 && kByTma && valid < kKeys) {
      zero_rows<kLeftPanels * 64, kKeys>(values, valid);
      named_sync(kGroupBarrier + half, 128);
    }
    return matrix_at(values, kPanelBytes);
  }
  // Moves the rows' shifts to new_max, and rescales O and row_sum. In most blocks no row of the warp moves.
  __device__ __forceinline__ void rescale(const float (&new_max)[2]) {
    const float factor[2] = {rescale_factor(row_max[0], new_max[0]), rescale_factor(row_max[1], new_max[1])};
    const bool moves = new_max[0] != row_max[0] || new_max[1] != row_max[1];
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[h] *= new_max[h] != row_max[h] ? factor[h] : 1, row_max[h] = new_max[h];
    if (!__any_sync(~0u, moves)) return;
    wgmma_wait<0>();  // products of scores may be running
#pragma unroll
    for (int n = 0; n < kOut; ++n) o[n] *= factor[n / 2 % 2];
  }
  // Issues O += P V of block i, whose weights the other warpgroup has left in shared memory.
  __device__ __forceinline__ void add_remote_values(int i) {
    named_sync(kWeightsBarrier + half, kMathThreads);
    const float new_max[2] = {shared.row_max[row(0)], shared.row_max[row(1)]};
    rescale(new_max);
    const std::uint32_t weights = matrix_at(p), values = values_of(i);
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) wgmma_ab<T>(o, weights + 2 * step, values + step * 128, 1);
    wgmma_commit();
  }
  // Turns scores of the warpgroup's own block into weights relative to new_max, to which rescale() is yet to move O and
  // row_sum.
  __device__ __forceinline__ void softmax(int i, float (&s)[kScores], float (&new_max)[2]) {
    const AttentionParams& a = params.p;
    const int key = share.key_of(i);
#pragma unroll
    for (float& x : s) x *= a.score.scale_log2;
    if (params.modified || key < all_from || key + kKeys > all_to) {
      for_each_four(s, [&](int j, float(&four)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int r = row(e / 2), at = key + j + column + e % 2;
          if (at < shared.rows.from[r] || at >= shared.rows.to[r]) four[e] = -kInfinity;
          else if (params.modified) four[e] = shared.rows.finish(block.head, r, block.first_key + at, four[e]);
        }
      });
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      new_max[h] = next_row_max(row_max[h], over_row(max_of_row<kScores>(s, h), Max()), kRescaleThreshold);
      const float neg_m = kShift - shift_of(new_max[h]);
#pragma unroll
      for (int n = 2 * h; n < kScores; n += 4)
        s[n] = exp2_approx(s[n] + neg_m), s[n + 1] = exp2_approx(s[n + 1] + neg_m);
    }
  }
  // Leaves weights and shifts in shared memory for the other warpgroup, and issues O += P V of the own block.
  __device__ __forceinline__ void add_local_values(int i, const float (&s)[kScores], const float (&new_max)[2]) {
    std::uint32_t weights[kScores / 2];
#pragma unroll
    for (int n = 0; n < kScores; n += 2) weights[n / 2] = pack<T>(s[n], s[n + 1]);
    const std::uint32_t to = p + (warp_row + lane % 16) * 128;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      store_matrices(to + ((2 * step + lane / 16) ^ lane % 8) * 16, weights[4 * step], weights[4 * step + 1],
                     weights[4 * step + 2], weights[4 * step + 3]);
    if (lane % 4 == 0) shared.row_max[row(0)] = new_max[0], shared.row_max[row(1)] = new_max[1];
    fence_async_proxy();
    named_arrive(kWeightsBarrier + (half ^ 1), kMathThreads);
    rescale(new_max);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[2] = {};
#pragma unroll
      for (int n = 2 * h; n < kScores; n += 4) sum[n / 4 % 2] += s[n] + s[n + 1];
      row_sum[h] += sum[0] + sum[1];
    }
    const std::uint32_t values = values_of(i);
    pin(o);
    pin(weights);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) wgmma_ab<T>(o, weights + 4 * step, values + step * 128, 1);
    wgmma_commit();
  }
  // Waits for O += P V of block i.
  __device__ __forceinline__ void finish_values(int i) {
    wgmma_wait<0>();
    pin(o);
    ring.release(values_at(i), half);
  }
  // Frees keys that are not values. (Keys that are values are freed as values.)
  __device__ __forceinline__ void release_keys(int i) {
    if (!params.separate_values) return;
    ring.release(keys_at(i), 0);
    ring.release(keys_at(i), 1);
  }

  // The warpgroup of the first of two blocks adds the other's values before it waits for its next keys, which are still
  // to come; the warpgroup of the second multiplies its keys before it waits for the other's weights. So the tensor
  // cores have work during softmax, and places are freed early.
  __device__ void attend() {
    if (share.blocks == 0) return;
    float s[kScores], new_max[2];
    if (share.warpgroup_of(0) == half) {
#pragma unroll 1
      for (int i = 0; i < share.blocks; i += 2) {
        multiply_keys(i, s);
        wgmma_wait<0>();
        pin(s);
        release_keys(i);
        softmax(i, s, new_max);
        add_local_values(i, s, new_max);
        finish_values(i);
        if (i + 1 < share.blocks) {
          add_remote_values(i + 1);
          finish_values(i + 1);
        }
      }
      return;
    }
    int i = 1;
#pragma unroll 1
    for (; i < share.blocks; i += 2) {
      multiply_keys(i, s);
      add_remote_values(i - 1);
      wgmma_wait<1>();
      pin(s);
      release_keys(i);
      softmax(i, s, new_max);
      finish_values(i - 1);
      add_local_values(i, s, new_max);
      finish_values(i);
    }
    if (i - 1 < share.blocks) {
      add_remote_values(i - 1);
      finish_values(i - 1);
    }
  }

  // Leaves O, row_max and row_sum in shared memory, for the cluster.
  __device__ void store_for_cluster(std::uint32_t out, LatentResults& results) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row(h);
      if (half == 0 && lane % 4 == 0)
        results.row_sum[r] = shared.row_sum[0][r] + shared.row_sum[1][r], results.row_max[r] = row_max[h] - kShift;
#pragma unroll
      for (int n = 0; n < kOut / 4; ++n)
        store8(out + r * kOutPitch + (half * 256 + 8 * n + column) * 4, o[4 * n + 2 * h], o[4 * n + 2 * h + 1]);
    }
  }
};

}  // namespace rapt::cuda
