// select_topk on a GPU: a thread block for a row, or for a part of one.
#include "cuda/entry.hpp"
#include "cuda/kernels/select_topk.hpp"

namespace rapt::cuda {
namespace {

class SelectTopkEntry final : public DeviceEntry {
 public:
  explicit SelectTopkEntry(const GpuSupport& support)
      : DeviceEntry(entry_name(kSelectTopkFacts, "cuda"), "cuda", kSelectTopkFacts, support) {}

 private:
  std::size_t workspace_bytes(const Problem& problem) const override {
    const auto& p = std::get<SelectTopkProblem>(problem);
    SelectTopkParams sizes{};
    sizes.b = sizes.h = 1, sizes.s = p.rows, sizes.sk = p.sk, sizes.n = p.n;
    return select_topk_workspace(sizes);
  }
  bool needs_workspace(const Params& params) const override {
    return select_topk_needs_workspace(std::get<SelectTopkParams>(params));
  }
  std::int64_t work_items(const Problem& problem) const override { return std::get<SelectTopkProblem>(problem).rows; }
  cudaError_t launch(const Params& params, std::byte* workspace, cudaStream_t stream) const override {
    return launch_select_topk(std::get<SelectTopkParams>(params), workspace, stream);
  }
};

}  // namespace

void add_select_topk(const GpuSupport& support, Entries& entries) {
  entries.push_back(std::make_unique<SelectTopkEntry>(support));
}

}  // namespace rapt::cuda
