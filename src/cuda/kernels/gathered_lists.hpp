// gathered_lists: the lists of gathered keys as other kernels read them.
#pragma once

#include <cuda_runtime_api.h>

#include "operations/attention/params.hpp"

namespace rapt::cuda {

// Lists without gaps, in device memory: of each token [n] rows of k, of which the first `lengths[token]` count.
struct GatheredLists {
  void* rows;  // i32 or i64, as the call's lists
  std::int32_t* lengths;
  std::int64_t rows_apart;  // added to a row for each batch entry before the token's
};

// Copies the lists of `params` to `lists`. An entry past k's last row becomes that row.
cudaError_t launch_gathered_lists(const AttentionParams& params, const GatheredLists& lists, cudaStream_t stream);

// Copies lse [token][head] to where the call wants it.
cudaError_t launch_scatter_lse(const AttentionParams& params, const float* lse, cudaStream_t stream);

}  // namespace rapt::cuda
