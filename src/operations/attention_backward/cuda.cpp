// attention_backward on a GPU: the kernels that dispatch chooses among.
#include <limits>

#include "cuda/entry.hpp"
#include "cuda/kernels/kernels.hpp"
#include "operations/attention/modifiers.hpp"
#include "operations/attention_backward/cuda_choice.hpp"

namespace rapt::cuda {
namespace {

// All that plans need.
AttentionParams sizes_of(const Problem& problem) {
  AttentionParams params{};
  fill_sizes(std::get<AttentionBackwardProblem>(problem), params);
  return params;
}

class AttentionBackwardEntry : public DeviceEntry {
 public:
  using DeviceEntry::DeviceEntry;

  std::string_view refuse(const Problem& problem, const Context::Impl&) const override {
    const auto& p = std::get<AttentionBackwardProblem>(problem);
    if (!has_positions(p)) return "takes keys of sequences, and no lists for each token";
    constexpr std::int64_t kMaxTiles = std::numeric_limits<std::int32_t>::max() / 128;
    if (attention_backward_items(sizes_of(problem)) > kMaxTiles) return "more rows or keys than a grid has blocks";
    return refuse_scores(p);
  }

 private:
  virtual std::string_view refuse_scores(const AttentionBackwardProblem& p) const = 0;

  std::size_t workspace_bytes(const Problem& problem) const override {
    return attention_backward_workspace(sizes_of(problem));
  }
  std::int64_t work_items(const Problem& problem) const override { return attention_backward_items(sizes_of(problem)); }
};

#ifdef RAPT_HAVE_SM90A
class TilesEntry final : public AttentionBackwardEntry {
 public:
  TilesEntry(const char* arithmetic, DType type, const GpuSupport& support)
      : AttentionBackwardEntry(std::string("attention_backward.") + arithmetic + ".cuda.sm90a", "sm90a",
                               {.operation = Operation::attention_backward,
                                .phase = Phase::all,
                                .arithmetic = arithmetic,
                                .dtypes = set_of(type),
                                .dropout = true,
                                .max_head_dim = kBackwardMaxHeadDim,
                                .max_value_head_dim = kBackwardMaxHeadDim},
                               support) {}

 private:
  std::string_view refuse_scores(const AttentionBackwardProblem& p) const override {
    if (p.hq == 0) return "has no query heads";
    return p.dbias || p.dalibi ? "computes no gradients of biases and slopes" : "";
  }
  std::size_t workspace_bytes(const Problem& problem) const override { return bytes_of(problem, false); }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl&) const override {
    return bytes_of(largest, true);
  }
  static std::size_t bytes_of(const Problem& problem, bool largest) {
    using P = AttentionBackwardProblem;
    const AttentionParams params = sizes_of(problem);
    const auto grads = std::get<P>(problem).grads;
    const bool all = (grads & P::kDq) && (grads & (P::kDk | P::kDv));
    const std::int64_t ds = !all ? 0 : largest ? max_ds_bytes(params) : ds_slots(params).bytes();
    return static_cast<std::size_t>(ds) + attention_backward_workspace(params);
  }
  std::string kernels(const Problem&) const override {
    return "attention_backward; rows and keys without finite gradients there by attention_backward_naive";
  }
  cudaError_t launch(const Params& params, std::byte* workspace, cudaStream_t stream) const override {
    const auto& p = std::get<AttentionBackwardParams>(params);
    const bool all = p.grad_q && (p.grad_k || p.grad_v);
    return launch_attention_backward(p, all ? ds_slots(p) : DsSlots(), key_sharers(p), workspace, stream);
  }
};
#endif

class NaiveEntry final : public AttentionBackwardEntry {
 public:
  explicit NaiveEntry(const GpuSupport& support)
      : AttentionBackwardEntry("attention_backward_naive.f32.cuda", "cuda", kAttentionBackwardNaiveFacts, support) {}

 private:
  std::string_view refuse_scores(const AttentionBackwardProblem&) const override { return ""; }
  cudaError_t launch(const Params& params, std::byte* workspace, cudaStream_t stream) const override {
    return launch_attention_backward_naive(std::get<AttentionBackwardParams>(params), workspace, stream);
  }
};

}  // namespace

void add_attention_backward(const GpuSupport& support, Entries& entries) {
#ifdef RAPT_HAVE_SM90A
  entries.push_back(std::make_unique<TilesEntry>("bf16", DType::bf16, support));
  entries.push_back(std::make_unique<TilesEntry>("f16", DType::f16, support));
#endif
  entries.push_back(std::make_unique<NaiveEntry>(support));
}

}  // namespace rapt::cuda
