// Attention on a GPU: the kernels that dispatch chooses among, and their launches in the context's stream.
#include <cuda_runtime_api.h>

#include <limits>
#include <optional>

#include "cuda/device.hpp"
#include "cuda/entry.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/nvtx.hpp"

namespace rapt::cuda {
namespace {

struct AttentionKernel {
  const char* name;
  const char* isa;
  KernelFacts facts;
  // Of a problem whose types and head sizes are the facts': why the kernel will not take it; empty if it will.
  std::string_view (*refuse)(const AttentionParams&);
  std::size_t (*workspace)(const AttentionParams&);
  std::int64_t (*work_items)(const AttentionParams&);
  cudaError_t (*run)(const AttentionParams&, void* workspace, cudaStream_t);
};

constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();

#ifdef RAPT_HAVE_SM90A
constexpr AttentionKernel decode(const char* name, const char* arithmetic, DType type) {
  return {.name = name,
          .isa = "sm90a",
          .facts = {.operation = Operation::attention,
                    .phase = Phase::decode,
                    .arithmetic = arithmetic,
                    .dtypes = only(type),
                    .max_head_size = kDecodeMaxHeadSize},
          .refuse = [](const AttentionParams& a) -> std::string_view {
            // Ragged ones on a device are known by their total, and no row's kernel may depend on other sequences.
            if (a.total_q >= 0) return "takes no ragged queries";
            if (a.sq * a.group > kDecodeMaxRows) return "takes up to 64 rows (query tokens times heads of a group)";
            return wgmma_can_count(a) && decode_items(a) < kMaxBlocks ? "" : "takes fewer than 2^30 keys and splits";
          },
          .workspace = decode_workspace,
          .work_items = decode_items,
          .run =
              [](const AttentionParams& a, void* workspace, cudaStream_t stream) {
                const auto run = a.q_type == DType::f32 ? attention_decode_f32 : attention_wgmma_split;
                return run(a, static_cast<std::byte*>(workspace), stream);
              }};
}
// Its blocks of rows and keys depend on the head size, so the facts have none.
constexpr AttentionKernel wgmma(const char* name, const char* arithmetic, DType type) {
  return {.name = name,
          .isa = "sm90a",
          .facts = {.operation = Operation::attention,
                    .phase = Phase::prefill,
                    .arithmetic = arithmetic,
                    .dtypes = only(type),
                    .max_head_size = kWgmmaMaxHeadSize},
          .refuse = [](const AttentionParams& a) -> std::string_view {
            return wgmma_can_count(a) ? "" : "takes fewer than 2^30 rows and keys";
          },
          .workspace = wgmma_workspace,
          .work_items = simt_tiles,
          .run = [](const AttentionParams& a, void* workspace,
                    cudaStream_t stream) { return attention_wgmma(a, static_cast<std::byte*>(workspace), stream); }};
}
#endif

constexpr AttentionKernel kKernels[] = {
#ifdef RAPT_HAVE_SM90A
    decode("attention_decode.bf16.cuda.sm90a", "bf16", DType::bf16),
    decode("attention_decode.f16.cuda.sm90a", "f16", DType::f16),
    decode("attention_decode.f32.cuda.sm90a", "f32", DType::f32),
    wgmma("attention_wgmma.bf16.cuda.sm90a", "bf16", DType::bf16),
    wgmma("attention_wgmma.f16.cuda.sm90a", "f16", DType::f16),
    {.name = "attention_wgmma.f32.cuda.sm90a",
     .isa = "sm90a",
     .facts = {.operation = Operation::attention,
               .phase = Phase::prefill,
               .arithmetic = "f16x3",
               .dtypes = only(DType::f32),
               .min_head_size = kWgmmaF32MinHeadSize,
               .max_head_size = kWgmmaMaxHeadSize},
     .refuse = [](const AttentionParams& a) -> std::string_view {
       return wgmma_f32_can_count(a) ? "" : "takes fewer than 2^28 rows and keys";
     },
     .workspace = wgmma_f32_workspace,
     .work_items = simt_tiles,
     .run = [](const AttentionParams& a, void* workspace,
               cudaStream_t stream) { return attention_wgmma_f32(a, static_cast<std::byte*>(workspace), stream); }},
#endif
    {.name = "attention_simt.f32.cuda.q64k64",
     .isa = "cuda",
     .facts = {.operation = Operation::attention,
               .phase = Phase::prefill,
               .arithmetic = "f32",
               .dtypes = kFloatTypes,
               .block_q = kSimtRows,
               .block_k = kSimtKeys,
               .max_value_head_size = kSimtMaxValueHeadSize},
     .refuse = [](const AttentionParams& a) -> std::string_view {
       return simt_tiles(a) > kMaxBlocks ? "more tiles than a grid has blocks" : "";
     },
     .workspace = [](const AttentionParams&) -> std::size_t { return 0; },
     .work_items = simt_tiles,
     .run = [](const AttentionParams& a, void*, cudaStream_t stream) { return attention_simt(a, stream); }},
    {.name = "attention_naive.f32.cuda",
     .isa = "cuda",
     .facts = {.operation = Operation::attention, .phase = Phase::naive, .arithmetic = "f32", .dtypes = kFloatTypes},
     .refuse = [](const AttentionParams& a) -> std::string_view {
       const double scores = static_cast<double>(naive_rows(a)) * static_cast<double>(a.sk);
       return naive_rows(a) > kMaxBlocks || scores > 0x1p34 ? "its S x S matrix would be past 64 GiB" : "";
     },
     .workspace = naive_workspace,
     .work_items = naive_rows,
     .run = [](const AttentionParams& a, void* workspace,
               cudaStream_t stream) { return attention_naive(a, static_cast<float*>(workspace), stream); }},
};

// All that plans need.
AttentionParams sizes_of(const Problem& problem) {
  AttentionParams params{};
  fill_sizes(std::get<AttentionProblem>(problem), params);
  return params;
}

struct CudaPlan final : EntryPlan {
  std::string note() const override { return std::to_string(work_items) + " tiles or rows of work"; }
};

class AttentionEntry final : public Entry {
 public:
  AttentionEntry(const AttentionKernel& kernel, const Machine& machine) : kernel_(kernel) {
    facts = kernel.facts;
    name = kernel.name;
    isa = kernel.isa;
    unusable = machine.unusable.empty() && isa == "sm90a" ? machine.not_sm90a : machine.unusable;
  }

  std::string_view refuse(const Problem& problem, const Context::Impl&) const override {
    if (std::get<AttentionProblem>(problem).gathered) return "takes no gathered keys";
    return kernel_.refuse(sizes_of(problem));
  }

  std::unique_ptr<EntryPlan> plan(const Problem& problem, const Context::Impl&) const override {
    const AttentionParams sizes = sizes_of(problem);
    auto plan = std::make_unique<CudaPlan>();
    plan->workspace_bytes = kernel_.workspace(sizes);
    plan->work_items = kernel_.work_items(sizes);
    return plan;
  }
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl&) const override {
    return kernel_.workspace(sizes_of(largest));
  }

  void run(const EntryPlan& plan, const Call& call, const Context::Impl& context, const CallTasks*,
           std::byte* workspace) const override {
    const NvtxRange range([&] { return name + " " + to_string(call.problem); });
    const DeviceGuard guard(call.device.index);
    const auto stream = static_cast<cudaStream_t>(context.options.stream);
    std::optional<StreamMemory> own;
    if (workspace == nullptr && plan.workspace_bytes > 0) own.emplace(plan.workspace_bytes, call.device.index, stream);
    check_cuda(kernel_.run(std::get<AttentionParams>(call.params), own ? own->data() : workspace, stream),
               "starting a kernel");
  }

 private:
  const AttentionKernel& kernel_;
};

}  // namespace

void add_attention(const Machine& machine, Entries& entries) {
  for (const AttentionKernel& kernel : kKernels) entries.push_back(std::make_unique<AttentionEntry>(kernel, machine));
}

}  // namespace rapt::cuda
