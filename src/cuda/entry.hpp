// What the CUDA backend's entries have in common: the GPUs of this machine, and how calls come to their streams.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/entry.hpp"

namespace rapt {

const Backend& cuda_backend();

namespace cuda {

struct GpuSupport {
  std::string unusable;   // why no GPU can be used; empty if one can
  std::string not_sm90a;  // why kernels of Hopper's own instructions cannot run; empty if every GPU has them
};

// Bytes of a part of a workspace, with room up to where the next part may begin: a multiple of 256, to which CUDA
// aligns memory.
inline std::size_t whole_lines(std::int64_t bytes) {
  return static_cast<std::size_t>(round_up(bytes, 256));
}

// An entry whose work is a few launches, which depend on the problem's sizes and the parameters alone.
class DeviceEntry : public Entry {
 public:
  DeviceEntry(std::string name, std::string isa, const KernelFacts& facts, const GpuSupport& support);

  std::string_view refuse(const Problem&, const Context::Impl&) const override { return {}; }
  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl&) const final;
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl&) const override {
    return workspace_bytes(largest);
  }
  void run(const EntryPlan& plan, const Call& call, const Context::Impl& context, const CallTasks*,
           std::byte* workspace) const final;

 private:
  virtual std::size_t workspace_bytes(const Problem&) const = 0;
  // Of a call whose plan has some: taking it costs as much as a launch.
  virtual bool needs_workspace(const Params&) const { return true; }
  virtual std::int64_t work_items(const Problem&) const = 0;  // tiles or rows
  // Which of the entry's kernels do it, for explain(); empty: there is one.
  virtual std::string kernels(const Problem&) const { return {}; }
  virtual cudaError_t launch(const Params& params, std::byte* workspace, cudaStream_t stream) const = 0;
};

// Adds the entries of an operation, in the order of preference, to the backend's. Defined for operations that run on
// GPUs.
using Entries = std::vector<std::unique_ptr<const Entry>>;
#define RAPT_OPERATION(name, Name, NAME) void add_##name(const GpuSupport& support, Entries& entries);
#include "rapt/operations.def"

}  // namespace cuda
}  // namespace rapt
