// Gathered keys on a GPU: kernels get them as pages of one row, and each token as a sequence.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

#include "operations/attention/params.hpp"

namespace rapt::cuda {

// Whether there are few enough entries of lists for these functions.
bool lists_can_be_counted(const AttentionParams& params);

// Bytes of the workspace for lists without gaps, and for lse in the order of tokens, a multiple of 256; 0: keys are not
// gathered.
std::size_t lists_workspace(const AttentionParams& params);

// Runs a call over gathered keys: `run` gets parameters that lead to pages, once for all tokens if their rows, and the
// keys of batch entries, are equally far apart; else once for each batch entry. Lists are in `workspace`.
cudaError_t run_over_lists(const AttentionParams& params, std::byte* workspace, cudaStream_t stream,
                           const std::function<cudaError_t(const AttentionParams&)>& run);

}  // namespace rapt::cuda
