#include "cuda/fake_cuda.hpp"

#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {

cudaError_t launch_delta_rule(const DeltaRuleParams&, cudaStream_t) {
  return testing::launched();
}
std::size_t delta_rule_prefill_workspace(std::int64_t states, std::int64_t, std::int64_t) {
  return states > 66 ? 1 << 20 : 0;
}
cudaError_t launch_delta_rule_prefill(const DeltaRuleParams&, std::byte*, cudaStream_t) {
  return testing::launched();
}
cudaError_t launch_delta_rule_decode(const DeltaRuleParams&, cudaStream_t) {
  return testing::launched();
}

}  // namespace rapt::cuda
