// What all kernels of attention_backward need of a row, computed once: its lse, and delta = dout . out - dlse.
#pragma once

#include "cuda/kernels/backward_config.hpp"
#include "cuda/tile/score.cuh"
#include "operations/attention_backward/params.hpp"

namespace rapt::cuda {

using BackwardTiling = QueryHeadTiling<kBackwardTile>;
using BackwardBlocking = Blocking<kBackwardTile>;

// What a tile's rows need. dS = P (dP * dp_factor - delta), P = 2^(score - lse_log2). dp_factor is 1; it is 0 for a row
// of one value, whose dP is dout . out: delta is -dlse alone there. Rows past the last one have weights of 0. With
// dropout, P is the weight of a kept key, 1 / (1 - p) times the one before it, delta is divided by as much, and dP of a
// dropped key is 0.
struct RowsOfTile {
  float lse_log2[kBackwardTile];  // without the shift of ALiBi; inf: the row has weights of 0
  float minus_delta[kBackwardTile], dp_factor[kBackwardTile];
  float has_one_value, unused[3];  // has_one_value: 1 if some dp_factor is 0
};

// log2 of dropout's factor of kept weights; 0 if there is none.
__device__ inline float kept_log2(const ScoreParams& s) {
  return s.dropout.given && s.dropout.scale != 0 ? log2f(s.dropout.scale) : 0;
}

// Thread blocks that have left all their dS of a kv head in memory, and that have read all of theirs for dq.
struct DsProgress {
  int written, read;
};

// In a call's workspace.
struct BackwardRows {
  RowsOfTile* tiles;                     // numbered by BackwardTiling
  std::uint64_t *row_masks, *key_masks;  // of each tile of rows and of keys: those whose gradients are not finite
  float *sink_share, *slope_share;       // each row's, of the gradients of its head's sink and slope, by row_number()
  DsProgress* progress;                  // of each kv head
};

__host__ __device__ inline std::int64_t row_tiles(const AttentionParams& p) {
  return BackwardTiling::heads(p) * BackwardTiling::tiles(p);
}
__host__ __device__ inline std::int64_t key_tiles(const AttentionParams& p) {
  return BackwardBlocking::heads(p) * BackwardBlocking::blocks(p);
}

__device__ inline std::int64_t row_number(const Head& head, std::int64_t q_head, std::int64_t token) {
  return BackwardTiling::number(head.p, head.b, q_head, token) * kBackwardTile + token % kBackwardTile;
}

BackwardRows backward_rows(const AttentionParams& p, std::byte* workspace);
// Fills in all but the shares of slopes, with empty masks and no progress. Without rows, the masks of keys only.
cudaError_t launch_backward_rows(const AttentionBackwardParams& p, const BackwardRows& rows, cudaStream_t stream);
// dq, dk and dv of the rows and keys in the masks, pair by pair.
cudaError_t launch_backward_marked(const AttentionBackwardParams& p, const BackwardRows& rows, cudaStream_t stream);
// The gradients of sinks and slopes.
cudaError_t launch_backward_heads(const AttentionBackwardParams& p, const BackwardRows& rows, cudaStream_t stream);

}  // namespace rapt::cuda
