// The launch of select_topk's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "operations/select_topk/params.hpp"

namespace rapt::cuda {

inline constexpr KernelFacts kSelectTopkFacts = {
    .operation = Operation::select_topk, .phase = Phase::all, .arithmetic = "f32", .dtypes = set_of(DType::f32)};

// Bytes, at a multiple of 16. Fewer rows of fewer scores need no more; pointers and strides do not count.
std::size_t select_topk_workspace(const SelectTopkParams& params);
bool select_topk_needs_workspace(const SelectTopkParams& params);  // else it is not used
// Returns at once, having queued work on `stream`, and says whether that failed.
cudaError_t launch_select_topk(const SelectTopkParams& params, std::byte* workspace, cudaStream_t stream);

}  // namespace rapt::cuda
