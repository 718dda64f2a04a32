// The launches of index_scores. All return at once, having queued work on `stream`, and say whether that failed.
#pragma once

#include <cuda_runtime_api.h>

#include "operations/index_scores/params.hpp"

namespace rapt::cuda {

// Queries [token_begin, token_end) of sequences [b_begin, b_end): all of a call, or a portion.
struct IndexQueries {
  std::int64_t b_begin, b_end, token_begin, token_end;

  RAPT_HOST_DEVICE std::int64_t sequences() const { return b_end - b_begin; }
  RAPT_HOST_DEVICE std::int64_t tokens() const { return token_end - token_begin; }
};

// Both kernels write the scores of the queries to params.scores, and no indices.
//
// index_scores: fp32 on ordinary cores, of any types. index_scores_tiles: q in bf16, and k in bf16 or in codes of 8
// bits, which bf16 holds exactly, on Hopper's tensor cores (sm_90a).
inline constexpr KernelFacts kIndexScoresFacts = {.operation = Operation::index_scores,
                                                  .phase = Phase::all,
                                                  .arithmetic = "f32",
                                                  .dtypes = kCacheTypes & ~set_of(DType::i4x2)};
cudaError_t launch_index_scores(const IndexScoresParams& params, const IndexQueries& queries, cudaStream_t stream);

inline constexpr std::int64_t kIndexTilesMaxHeads = 128, kIndexTilesMaxSize = std::int64_t{1} << 30;
inline constexpr KernelFacts kIndexScoresTilesFacts = {.operation = Operation::index_scores,
                                                       .phase = Phase::all,
                                                       .arithmetic = "bf16",
                                                       .dtypes = set_of(DType::bf16) | set_of(DType::i8) | kFp8Types,
                                                       .max_head_dim = 128};
cudaError_t launch_index_scores_tiles(const IndexScoresParams& params, const IndexQueries& queries,
                                      cudaStream_t stream);

}  // namespace rapt::cuda
