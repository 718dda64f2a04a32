// Attention on a GPU: the kernels that dispatch chooses among.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "cuda/entry.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/device_limits.hpp"
#include "operations/attention/cuda_choice.hpp"
#include "operations/attention/cuda_gathered.hpp"
#include "operations/attention/modifiers.hpp"

namespace rapt::cuda {
namespace {

// Whether a kernel takes queries of f8e4m3, over what keys.
enum class F8Queries { none, quantized_keys, any };

struct AttentionKernel {
  const char* name;
  const char* isa;
  KernelFacts facts;
  // Of a problem whose types and head dimensions are the facts': why the kernel will not take it; empty if it will.
  std::string_view (*refuse)(const AttentionParams&);
  // The same of what sizes do not say, scales of keys and values mostly; null: nothing.
  std::string_view (*refuse_problem)(const AttentionProblem&) = nullptr;
  F8Queries f8_queries = F8Queries::none;
  std::size_t (*workspace)(const AttentionParams&);
  std::int64_t (*work_items)(const AttentionParams&);
  cudaError_t (*run)(const AttentionParams&, void* workspace, cudaStream_t);
  // Which calls do without the workspace that plans ask for; null: none.
  bool (*needs_no_workspace)(const AttentionParams&) = nullptr;
  // Names the kernels that a problem gets, where there is a choice.
  std::string (*describe)(const AttentionShape&) = nullptr;
};

constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();

#ifdef RAPT_HAVE_SM90A
constexpr DTypeSet kQuantizedTypes = kCacheTypes & ~kFloatTypes;

// They are numbers of bf16.
constexpr F8Queries f8_queries_of(DType arithmetic) {
  return arithmetic == DType::bf16 ? F8Queries::quantized_keys : F8Queries::none;
}

// Of ragged sequences those with few rows are split, whatever the entry is for.
bool splits_can_be_counted(const AttentionParams& a) {
  return a.total_q < 0 || decode_items(a) < kMaxBlocks / 8;  // thread blocks of a split
}

cudaError_t run_decode(const AttentionParams& a, void* workspace, cudaStream_t stream) {
  const AttentionShape shape = shape_of(a);
  auto* const memory = static_cast<std::byte*>(workspace);
  switch (decode_kernel(shape)) {
    case DecodeKernel::decode:
      return launch_attention_decode(a, decode_config(shape), memory, stream);
    case DecodeKernel::m64:
      return launch_attention_decode_m64(a, decode_m64_config(shape), decode_config(shape), memory, stream);
    default:
      return launch_attention_decode_f32(a, memory, stream);
  }
}
// After the tiles of a ragged call, its sequences with few rows, which those leave out.
cudaError_t run_short_sequences(cudaError_t status, const AttentionParams& a, void* workspace, cudaStream_t stream) {
  return status != cudaSuccess || a.total_q < 0 ? status : run_decode(a, workspace, stream);
}
cudaError_t run_prefill(const AttentionParams& a, void* workspace, cudaStream_t stream) {
  const PrefillConfig config = prefill_config(shape_of(a), multiprocessors());
  return run_short_sequences(launch_attention_prefill(a, config, stream), a, workspace, stream);
}
std::string describe_prefill_here(const AttentionShape& shape) {
  return describe_prefill(shape, multiprocessors());
}

constexpr AttentionKernel decode(const char* name, const char* arithmetic, DType type) {
  return {.name = name,
          .isa = "sm90a",
          .facts = {.operation = Operation::attention,
                    .phase = Phase::decode,
                    .arithmetic = arithmetic,
                    .dtypes = set_of(type) | kQuantizedTypes,
                    .max_head_dim = kDecodeMaxHeadDim},
          .refuse = [](const AttentionParams& a) -> std::string_view {
            // Ragged ones on a device are known by their total, and no row's kernel may depend on other sequences.
            if (a.total_q >= 0) return "takes no ragged queries";
            if (a.sq * a.group > kDecodeMaxRows) return "takes up to 64 rows (query tokens times heads of a group)";
            if (is_quantized(a) && !quantized_groups_fit(a))
              return "takes scales of whole rows, or of multiples of 32 columns";
            return prefill_can_count(a) && decode_items(a) < kMaxBlocks ? "" : "takes fewer than 2^30 keys and splits";
          },
          .f8_queries = f8_queries_of(type),
          .workspace = decode_workspace,
          .work_items = decode_items,
          .run = run_decode,
          .needs_no_workspace = decode_writes_output_directly,
          .describe = describe_decode};
}
// Codes become elements of the queries' type. A key's scale multiplies its scores, and a value's its weights, which
// fp16 has no range for.
template <DType kType>
std::string_view refuse_prefill_problem(const AttentionProblem& p) {
  // Of ragged sequences, attention_decode does those with few rows.
  if (p.dropout != 0 && (p.ragged_q >= 0 || !has_positions(p))) return "takes dropout in dense sequences only";
  if ((set_of(p.kv_dtype) & kQuantizedTypes) == 0) return "";
  if (p.dropout != 0) return "takes no dropout over quantised keys";
  if (p.zeros || p.k_groups > 1 || p.v_groups > 1) return "takes scales of whole rows, without zeros";
  return kType == DType::f16 && p.v_groups > 0 ? "takes no scales of values, which fp16 may lack the range for" : "";
}
// Its blocks of rows and keys depend on the head dimension, so the facts have none.
template <DType kType>
constexpr AttentionKernel prefill(const char* name, const char* arithmetic) {
  return {.name = name,
          .isa = "sm90a",
          .facts = {.operation = Operation::attention,
                    .phase = Phase::prefill,
                    .arithmetic = arithmetic,
                    .dtypes = set_of(kType) | kQuantizedTypes,
                    .dropout = true,
                    .max_head_dim = kPrefillMaxHeadDim},
          .refuse = [](const AttentionParams& a) -> std::string_view {
            return prefill_can_count(a) && splits_can_be_counted(a)
                       ? ""
                       : "takes fewer than 2^30 rows and keys, and splits of few rows";
          },
          .refuse_problem = refuse_prefill_problem<kType>,
          .f8_queries = f8_queries_of(kType),
          .workspace = [](const AttentionParams& a) { return a.total_q < 0 ? 0 : decode_workspace(a); },
          .work_items = simt_tiles,
          .run = run_prefill,
          .needs_no_workspace = decode_writes_output_directly,
          .describe = describe_prefill_here};
}
std::string_view refuse_prefill_f8(const AttentionProblem& p) {
  if (p.d != p.dv || (p.d != kPrefillF8MinHeadDim && p.d != kPrefillF8MaxHeadDim))
    return "takes heads of 64 or 128 columns, of values as of keys";
  if (p.ragged_q >= 0 || p.kv_lengths || AttentionFeatures::of(p) != AttentionFeatures::strided)
    return "takes dense sequences of one length, which the host knows";
  if (has_modifiers(p) || p.sinks) return "takes scores without modifiers and sinks";
  if (p.window_left >= 0) return "takes no window to the left";
  const bool of_heads = p.k_groups + p.v_groups == 0 || p.head_scales;
  return p.zeros || p.k_groups > 1 || p.v_groups > 1 || !of_heads ? "takes scales of heads, without zeros" : "";
}
constexpr AttentionKernel kPrefillF8 = {
    .name = "attention_prefill.f8e4m3.cuda.sm90a",
    .isa = "sm90a",
    .facts = {.operation = Operation::attention,
              .phase = Phase::prefill,
              .arithmetic = "f8e4m3",
              .dtypes = set_of(DType::f8e4m3),
              .opt_in = "its weights are rounded to f8e4m3, which has bounds of its own",
              .min_head_dim = kPrefillF8MinHeadDim,
              .max_head_dim = kPrefillF8MaxHeadDim},
    .refuse = [](const AttentionParams& a) -> std::string_view {
      constexpr std::int64_t kLimit = std::int64_t{1} << 30;
      const bool can_count = prefill_can_count(a) && simt_tiles(a) < kLimit / std::max<std::int64_t>(a.group, 1) &&
                             a.b * a.hk * (a.sk + 127) / 128 < kLimit;
      return can_count ? "" : "takes fewer than 2^30 rows, keys, and blocks of these in all heads";
    },
    .refuse_problem = refuse_prefill_f8,
    .f8_queries = F8Queries::any,
    .workspace = prefill_f8_workspace,
    .work_items = simt_tiles,
    .run =
        [](const AttentionParams& a, void* workspace, cudaStream_t stream) {
          const auto status = launch_attention_prefill_f8(a, static_cast<std::byte*>(workspace), stream);
          return status ? *status : run_prefill(a, workspace, stream);
        },
    .describe =
        [](const AttentionShape& shape) {
          return "attention_prefill_f8; in bf16, where TMA cannot load rows or each query has a scale, by " +
                 describe_prefill_here(shape);
        }};
constexpr AttentionKernel latent(const char* name, const char* arithmetic, DType type) {
  return {.name = name,
          .isa = "sm90a",
          .facts = {.operation = Operation::attention,
                    .phase = Phase::all,
                    .arithmetic = arithmetic,
                    .dtypes = set_of(type),
                    .block_q = kLatentRows,
                    .block_k = kLatentKeys,
                    .max_head_dim = kLatentMaxHeadDim,
                    .max_value_head_dim = kLatentMaxValueHeadDim},
          .refuse = [](const AttentionParams& a) -> std::string_view {
            if (a.total_q >= 0) return "takes no ragged queries";
            return prefill_can_count(a) && latent_items(a) < kMaxBlocks ? "" : "takes fewer than 2^30 keys and splits";
          },
          .workspace = latent_workspace,
          .work_items = latent_items,
          .run =
              [](const AttentionParams& a, void* workspace, cudaStream_t stream) {
                return launch_attention_latent(a, static_cast<std::byte*>(workspace), stream);
              }};
}
#endif

constexpr AttentionKernel kKernels[] = {
#ifdef RAPT_HAVE_SM90A
    decode("attention_decode.bf16.cuda.sm90a", "bf16", DType::bf16),
    decode("attention_decode.f16.cuda.sm90a", "f16", DType::f16),
    decode("attention_decode.f32.cuda.sm90a", "f32", DType::f32),
    prefill<DType::bf16>("attention_prefill.bf16.cuda.sm90a", "bf16"),
    prefill<DType::f16>("attention_prefill.f16.cuda.sm90a", "f16"),
    kPrefillF8,
    latent("attention_latent.bf16.cuda.sm90a", "bf16", DType::bf16),
    latent("attention_latent.f16.cuda.sm90a", "f16", DType::f16),
    {.name = "attention_prefill.f32.cuda.sm90a",
     .isa = "sm90a",
     .facts = {.operation = Operation::attention,
               .phase = Phase::prefill,
               .arithmetic = "f16x3",
               .dtypes = set_of(DType::f32),
               .min_head_dim = kPrefillF32MinHeadDim,
               .max_head_dim = kPrefillMaxHeadDim},
     .refuse = [](const AttentionParams& a) -> std::string_view {
       return prefill_f32_can_count(a) && splits_can_be_counted(a)
                  ? ""
                  : "takes fewer than 2^28 rows and keys, and splits of few rows";
     },
     .refuse_problem = [](const AttentionProblem& p) -> std::string_view {
       return has_positions(p) ? "" : "takes keys of sequences: of lists it would copy every key of every token";
     },
     .workspace = prefill_f32_workspace,
     .work_items = simt_tiles,
     .run =
         [](const AttentionParams& a, void* workspace, cudaStream_t stream) {
           const auto status = launch_attention_prefill_f32(a, static_cast<std::byte*>(workspace), stream);
           return run_short_sequences(status, a, workspace, stream);
         },
     .describe =
         [](const AttentionShape& shape) {
           return std::string(shape.ragged_q ? "attention_prefill_f32, sequences of few rows by attention_decode_f32"
                                             : "attention_prefill_f32");
         }},
#endif
    {.name = "attention_simt.f32.cuda.q64k64",
     .isa = "cuda",
     .facts = {.operation = Operation::attention,
               .phase = Phase::prefill,
               .arithmetic = "f32",
               .dtypes = kCacheTypes,
               .key_tail = true,
               .block_q = kSimtRows,
               .block_k = kSimtKeys,
               .max_value_head_dim = kSimtMaxValueHeadDim},
     .refuse = [](const AttentionParams& a) -> std::string_view {
       return simt_tiles(a) > kMaxBlocks ? "more tiles than a grid has blocks" : "";
     },
     .f8_queries = F8Queries::any,
     .workspace = [](const AttentionParams&) -> std::size_t { return 0; },
     .work_items = simt_tiles,
     .run = [](const AttentionParams& a, void*, cudaStream_t stream) { return launch_attention_simt(a, stream); }},
    {.name = "attention_naive.f32.cuda",
     .isa = "cuda",
     .facts = {.operation = Operation::attention,
               .phase = Phase::naive,
               .arithmetic = "f32",
               .dtypes = kCacheTypes,
               .key_tail = true},
     .refuse = [](const AttentionParams& a) -> std::string_view {
       const double scores = static_cast<double>(naive_rows(a)) * static_cast<double>(a.sk);
       return naive_rows(a) > kMaxBlocks || scores > 0x1p34 ? "its S x S matrix would be past 64 GiB" : "";
     },
     .f8_queries = F8Queries::any,
     .workspace = naive_workspace,
     .work_items = naive_rows,
     .run = [](const AttentionParams& a, void* workspace,
               cudaStream_t stream) { return launch_attention_naive(a, static_cast<float*>(workspace), stream); }},
};

// All that plans need.
AttentionParams sizes_of(const Problem& problem) {
  AttentionParams params{};
  fill_sizes(std::get<AttentionProblem>(problem), params);
  return params;
}

class AttentionEntry final : public DeviceEntry {
 public:
  AttentionEntry(const AttentionKernel& kernel, const GpuSupport& support)
      : DeviceEntry(kernel.name, kernel.isa, kernel.facts, support), kernel_(kernel) {}

  std::string_view refuse(const Problem& problem, const Context::Impl&) const override {
    const auto& attention = std::get<AttentionProblem>(problem);
    if (attention.q_dtype == DType::f8e4m3 && kernel_.f8_queries != F8Queries::any) {
      if (kernel_.f8_queries == F8Queries::none) return "takes no f8e4m3 queries";
      if (set_of(attention.kv_dtype) & kFloatTypes) return "takes f8e4m3 queries over quantised keys only";
    }
    const std::string_view reason = kernel_.refuse_problem ? kernel_.refuse_problem(attention) : "";
    if (!reason.empty()) return reason;
    const AttentionParams sizes = sizes_of(problem);
    if (!lists_can_be_counted(sizes)) return "takes fewer than 2^31 keys of a token, and 2^48 of all";
    return kernel_.refuse(sizes);
  }

 private:
  std::size_t workspace_bytes(const Problem& problem) const override {
    const AttentionParams sizes = sizes_of(problem);
    return lists_workspace(sizes) + kernel_.workspace(sizes);
  }
  // Fewer tokens may have splits, and with them partial results.
  std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl&) const override {
    auto few_lists = std::get<AttentionProblem>(largest);
    if (!has_positions(few_lists)) few_lists.sq = std::min(few_lists.sq, kManyListTokens - 1);
    return std::max(workspace_bytes(largest), workspace_bytes(few_lists));
  }
  std::int64_t work_items(const Problem& problem) const override { return kernel_.work_items(sizes_of(problem)); }
  std::string kernels(const Problem& problem) const override {
    return kernel_.describe ? kernel_.describe(shape_of(std::get<AttentionProblem>(problem))) : std::string();
  }
  bool needs_workspace(const Params& params) const override {
    const auto& p = std::get<AttentionParams>(params);
    return p.tokens > 0 || kernel_.needs_no_workspace == nullptr || !kernel_.needs_no_workspace(p);
  }
  cudaError_t launch(const Params& params, std::byte* workspace, cudaStream_t stream) const override {
    const auto& p = std::get<AttentionParams>(params);
    if (p.tokens == 0) return kernel_.run(p, workspace, stream);
    return run_over_lists(p, workspace, stream,
                          [&, rest = workspace + lists_workspace(p)](const AttentionParams& part) {
                            return kernel_.run(part, rest, stream);
                          });
  }

  const AttentionKernel& kernel_;
};

}  // namespace

void add_attention(const GpuSupport& support, Entries& entries) {
  for (const AttentionKernel& kernel : kKernels) entries.push_back(std::make_unique<AttentionEntry>(kernel, support));
}

}  // namespace rapt::cuda
