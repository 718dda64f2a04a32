#include "cuda/fake_cuda.hpp"

#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

std::size_t merge_states_workspace(std::int64_t) {
  return 0;
}
cudaError_t launch_merge_states(const MergeStatesParams&, std::byte*, cudaStream_t) {
  return testing::launched();
}

}  // namespace rapt::cuda
