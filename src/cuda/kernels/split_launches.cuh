// Launches that the kernels with split keys share.
#pragma once

#include "cuda/hopper/splits.cuh"
#include "cuda/kernels/decode_config.hpp"

namespace rapt::cuda {

// Launches attention_decode for these sequences, then attention_combine unless it `writes_output` or combines rows
// itself.
cudaError_t launch_decode_part(const AttentionParams& p, const DecodeConfig& config, const PartialResults& partials,
                               bool writes_output, bool overlap_previous, cudaStream_t stream);

// Launches attention_combine for these sequences. It starts while the launch before ends.
cudaError_t launch_attention_combine(const AttentionParams& p, const PartialResults& partials, cudaStream_t stream);

}  // namespace rapt::cuda
