// append_kv on a GPU.
#include "cuda/entry.hpp"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {
namespace {

class AppendKvEntry final : public DeviceEntry {
 public:
  explicit AppendKvEntry(const GpuSupport& support)
      : DeviceEntry(entry_name(kAppendKvFacts, "cuda"), "cuda", kAppendKvFacts, support) {}

 private:
  std::size_t workspace_bytes(const Problem&) const override { return 0; }
  std::int64_t work_items(const Problem& problem) const override {
    const auto& p = std::get<AppendKvProblem>(problem);
    return (p.ragged >= 0 ? p.ragged : p.b * p.n) * p.hk;
  }
  cudaError_t launch(const Params& params, std::byte*, cudaStream_t stream) const override {
    return launch_append_kv(std::get<AppendKvParams>(params), stream);
  }
};

}  // namespace

void add_append_kv(const GpuSupport& support, Entries& entries) {
  entries.push_back(std::make_unique<AppendKvEntry>(support));
}

}  // namespace rapt::cuda
