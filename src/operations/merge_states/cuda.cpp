// merge_states on a GPU: a warp for each row.
#include "cuda/entry.hpp"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {
namespace {

class MergeStatesEntry final : public DeviceEntry {
 public:
  explicit MergeStatesEntry(const GpuSupport& support)
      : DeviceEntry(entry_name(kMergeStatesFacts, "cuda"), "cuda", kMergeStatesFacts, support) {}

 private:
  std::size_t workspace_bytes(const Problem& problem) const override {
    return merge_states_workspace(std::get<MergeStatesProblem>(problem).count);
  }
  std::int64_t work_items(const Problem& problem) const override { return std::get<MergeStatesProblem>(problem).rows; }
  cudaError_t launch(const Params& params, std::byte* workspace, cudaStream_t stream) const override {
    return launch_merge_states(std::get<MergeStatesParams>(params), workspace, stream);
  }
};

}  // namespace

void add_merge_states(const GpuSupport& support, Entries& entries) {
  entries.push_back(std::make_unique<MergeStatesEntry>(support));
}

}  // namespace rapt::cuda
