// The kernels' launches. All return at once, having queued work on `stream`; errors stay for cudaGetLastError().
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/params.hpp"

namespace rapt::cuda {

// attention_simt: fp32 arithmetic on any GPU, online softmax in tiles of 64 rows by 64 keys.
inline constexpr std::int64_t kSimtRows = 64, kSimtKeys = 64, kSimtMaxValueSize = 576;
// Tiles of a call, some of them empty if it is ragged: what a grid must hold.
std::int64_t simt_tiles(const AttentionParams& params);
void attention_simt(const AttentionParams& params, cudaStream_t stream);

// attention_naive: scores, softmax and values one after another, with the S x S matrix in `scores`.
std::int64_t naive_rows(const AttentionParams& params);
void attention_naive(const AttentionParams& params, float* scores, cudaStream_t stream);

}  // namespace rapt::cuda
