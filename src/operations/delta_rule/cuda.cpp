// delta_rule on a GPU: a thread block for a state, or for some of its columns.
#include "cuda/entry.hpp"
#include "cuda/kernels/kernels.hpp"
#include "operations/delta_rule/cuda_choice.hpp"

namespace rapt::cuda {
namespace {

class DeltaRuleEntry : public DeviceEntry {
 public:
  explicit DeltaRuleEntry(const GpuSupport& support)
      : DeviceEntry(entry_name(kDeltaRuleFacts, "cuda"), "cuda", kDeltaRuleFacts, support) {}

 protected:
  using DeviceEntry::DeviceEntry;

  std::size_t workspace_bytes(const Problem&) const override { return 0; }
  std::int64_t work_items(const Problem& problem) const override {
    const auto& p = std::get<DeltaRuleProblem>(problem);
    return p.b * p.state_heads();
  }
  cudaError_t launch(const Params& params, std::byte*, cudaStream_t stream) const override {
    return launch_delta_rule(std::get<DeltaRuleParams>(params), stream);
  }
};

#ifdef RAPT_HAVE_SM90A
class DeltaRulePrefillEntry final : public DeltaRuleEntry {
 public:
  explicit DeltaRulePrefillEntry(const GpuSupport& support)
      : DeltaRuleEntry(entry_name(kDeltaRulePrefillFacts, "cuda.sm90a"), "sm90a", kDeltaRulePrefillFacts, support) {}

  std::string_view refuse(const Problem& problem, const Context::Impl&) const override {
    const auto& p = std::get<DeltaRuleProblem>(problem);
    if (p.steps > 0) return "keeps no state for each token";
    return p.hq > p.state_heads() ? "for one query head of each state at most" : "";
  }

 private:
  std::size_t workspace_bytes(const Problem& problem) const override {
    const auto& p = std::get<DeltaRuleProblem>(problem);
    return delta_rule_prefill_workspace(p.b * p.state_heads(), p.d, p.dv);
  }
  bool needs_workspace(const Params& params) const override {
    return can_multiply_chunks(std::get<DeltaRuleParams>(params));
  }
  std::string kernels(const Problem&) const override {
    return "delta_rule_prefill, or delta_rule if q, k or v is not bf16";
  }
  cudaError_t launch(const Params& params, std::byte* workspace, cudaStream_t stream) const override {
    const auto& p = std::get<DeltaRuleParams>(params);
    if (!can_multiply_chunks(p)) return launch_delta_rule(p, stream);
    return launch_delta_rule_prefill(p, workspace, stream);
  }
};

class DeltaRuleDecodeEntry final : public DeltaRuleEntry {
 public:
  explicit DeltaRuleDecodeEntry(const GpuSupport& support)
      : DeltaRuleEntry(entry_name(kDeltaRuleDecodeFacts, "cuda.sm90a"), "sm90a", kDeltaRuleDecodeFacts, support) {}

  std::string_view refuse(const Problem& problem, const Context::Impl&) const override {
    const auto& p = std::get<DeltaRuleProblem>(problem);
    if (p.t != 1) return "for one token a sequence";
    if (p.steps > 0) return "keeps no state for each token";
    if (!p.state) return "for states in memory";
    if (p.hq > p.state_heads()) return "for one query head of each state at most";
    return p.d % 4 != 0 || p.dv % 4 != 0 ? "takes heads of multiples of 4 columns" : "";
  }

 private:
  std::string kernels(const Problem&) const override {
    return "delta_rule_decode, or delta_rule if states do not lie in one piece each";
  }
  cudaError_t launch(const Params& params, std::byte*, cudaStream_t stream) const override {
    const auto& p = std::get<DeltaRuleParams>(params);
    return can_copy_states(p) ? launch_delta_rule_decode(p, stream) : launch_delta_rule(p, stream);
  }
};
#endif

}  // namespace

void add_delta_rule(const GpuSupport& support, Entries& entries) {
#ifdef RAPT_HAVE_SM90A
  entries.push_back(std::make_unique<DeltaRuleDecodeEntry>(support));
  entries.push_back(std::make_unique<DeltaRulePrefillEntry>(support));
#endif
  entries.push_back(std::make_unique<DeltaRuleEntry>(support));
}

}  // namespace rapt::cuda
