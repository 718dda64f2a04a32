#include "cuda/entry.hpp"

#include <optional>

#include "cuda/device.hpp"
#include "cuda/nvtx.hpp"

namespace rapt::cuda {
namespace {

struct DevicePlan final : EntryPlan {
  std::string kernels;
  std::string note() const override {
    return std::to_string(work_items) + " tiles or rows of work" + (kernels.empty() ? "" : ", by " + kernels);
  }
};

}  // namespace

DeviceEntry::DeviceEntry(std::string named, std::string of_isa, const KernelFacts& of_kernel,
                         const GpuSupport& support) {
  facts = of_kernel;
  name = std::move(named), isa = std::move(of_isa);
  if (facts.opt_in) opt_in = std::string("only if forced: ") + facts.opt_in;
  unusable = support.unusable.empty() && isa == "sm90a" ? support.not_sm90a : support.unusable;
}

std::unique_ptr<EntryPlan> DeviceEntry::plan(const Problem& problem, const Context::Impl&) const {
  auto plan = std::make_unique<DevicePlan>();
  plan->workspace_bytes = workspace_bytes(problem);
  plan->work_items = work_items(problem);
  plan->kernels = kernels(problem);
  return plan;
}

void DeviceEntry::run(const EntryPlan& plan, const Call& call, const Context::Impl& context, const CallTasks*,
                      std::byte* workspace) const {
  const NvtxRange range([&] { return name + " " + to_string(call.problem); });
  const DeviceGuard guard(call.device.index);
  const auto stream = static_cast<cudaStream_t>(context.options.stream);
  std::optional<StreamMemory> borrowed;
  if (workspace == nullptr && plan.workspace_bytes > 0 && needs_workspace(call.params))
    borrowed.emplace(plan.workspace_bytes, call.device.index, stream);
  check_cuda(launch(call.params, borrowed ? static_cast<std::byte*>(borrowed->data()) : workspace, stream),
             "starting a kernel");
}

}  // namespace rapt::cuda
