#include "cuda/fake_cuda.hpp"

#include "cuda/kernels/index_scores.hpp"

namespace rapt::cuda {

cudaError_t launch_index_scores(const IndexScoresParams&, const IndexQueries&, cudaStream_t) {
  return testing::launched();
}
cudaError_t launch_index_scores_tiles(const IndexScoresParams&, const IndexQueries&, cudaStream_t) {
  return testing::launched();
}

}  // namespace rapt::cuda
