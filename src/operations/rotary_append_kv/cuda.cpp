// rotary_append_kv on a GPU.
#include "cuda/entry.hpp"
#include "cuda/kernels/kernels.hpp"

namespace rapt::cuda {
namespace {

class RotaryAppendKvEntry final : public DeviceEntry {
 public:
  explicit RotaryAppendKvEntry(const GpuSupport& support)
      : DeviceEntry(entry_name(kRotaryAppendKvFacts, "cuda"), "cuda", kRotaryAppendKvFacts, support) {}

 private:
  std::size_t workspace_bytes(const Problem&) const override { return 0; }
  std::int64_t work_items(const Problem& problem) const override {
    const auto& p = std::get<RotaryAppendKvProblem>(problem);
    return (p.ragged >= 0 ? p.ragged : p.b * p.n) * (p.hq + p.hk);
  }
  cudaError_t launch(const Params& params, std::byte*, cudaStream_t stream) const override {
    return launch_rotary_append_kv(std::get<RotaryAppendKvParams>(params), stream);
  }
};

}  // namespace

void add_rotary_append_kv(const GpuSupport& support, Entries& entries) {
  entries.push_back(std::make_unique<RotaryAppendKvEntry>(support));
}

}  // namespace rapt::cuda
