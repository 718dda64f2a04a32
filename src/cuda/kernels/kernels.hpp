// The kernels' launches. All return at once, having queued work on `stream`, and say whether that failed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <optional>

#include "cuda/hopper/decode_limits.hpp"
#include "cuda/kernels/backward_config.hpp"
#include "cuda/kernels/decode_config.hpp"
#include "cuda/kernels/prefill_config.hpp"
#include "operations/append_kv/params.hpp"
#include "operations/attention/params.hpp"
#include "operations/attention_backward/params.hpp"
#include "operations/delta_rule/params.hpp"
#include "operations/merge_states/params.hpp"
#include "operations/rotary_append_kv/params.hpp"

namespace rapt::cuda {

// Whether keys and values are codes.
inline bool is_quantized(const AttentionParams& params) {
  return (set_of(params.kv_type) & kFloatTypes) == 0;
}

// attention_simt: fp32 arithmetic on ordinary cores, online softmax in tiles of 64 rows by 64 keys, of any types.
inline constexpr std::int64_t kSimtRows = 64, kSimtKeys = 64, kSimtMaxValueHeadDim = 576;
// Tiles of a call, some of them empty if it is ragged: what a grid must hold.
std::int64_t simt_tiles(const AttentionParams& params);
// With `fallback_rows`, in device memory, only the rows of each tile whose bits are set.
cudaError_t launch_attention_simt(const AttentionParams& params, cudaStream_t stream,
                                  const std::uint64_t* fallback_rows = nullptr);

// attention_prefill: q, k and v of one 16-bit type on Hopper's tensor cores (sm_90a), or quantized k and v without
// zeros whose rows have one scale at most (of fp16 queries none in v). Its fallback rows are those with NaN, Inf or
// huge scores. It leaves out the sequences of a ragged call that have up to kDecodeMaxRows rows: decoding does those.
inline constexpr std::int64_t kPrefillMaxHeadDim = 256;
bool prefill_can_count(const AttentionParams& params);  // whether 32 bits are enough for rows and keys
cudaError_t launch_attention_prefill(const AttentionParams& params, const PrefillConfig& config, cudaStream_t stream);

// attention_prefill_f8: q, k and v of f8e4m3 on the same, multiplied as they are, with weights of f8e4m3. Dense
// sequences, heads of 64 or 128 columns, scales of heads or none without zeros, no window to the left, no modifiers,
// no sinks. Its fallback rows, by arithmetic of fp32, are those that see NaN, whose results are not finite, or whose
// scores' scale or shift fp16 has no number for. Nothing is launched, and the result is empty, where TMA cannot load
// the call's rows or queries have a scale for each row.
inline constexpr std::int64_t kPrefillF8MinHeadDim = 64, kPrefillF8MaxHeadDim = 128;
std::size_t prefill_f8_workspace(const AttentionParams& params);  // bytes, at a multiple of 16: v transposed
std::optional<cudaError_t> launch_attention_prefill_f8(const AttentionParams& params, std::byte* workspace,
                                                       cudaStream_t stream);

// attention_prefill_f32: q, k and v in fp32 on the same: three products of fp16 components. Its fallback rows, which
// attention_simt computes, are those that these do not carry as exactly as fp32. Of heads of a column or two, mostly
// padding here, relative errors of 1.3e-6 were seen.
inline constexpr std::int64_t kPrefillF32MinHeadDim = 16;
bool prefill_f32_can_count(const AttentionParams& params);
std::size_t prefill_f32_workspace(const AttentionParams& params);  // bytes, at a multiple of 64
cudaError_t launch_attention_prefill_f32(const AttentionParams& params, std::byte* workspace, cudaStream_t stream);

// attention_decode: few rows (query tokens times heads of a group) of each sequence and kv head, with the keys split
// among thread blocks; of quantized keys and values with scales of whole rows or of multiples of 32 columns, and of
// 16-bit types for up to kFewRows rows. attention_decode_m64: of 16-bit types for more rows; of a ragged call, whose
// rows the host does not know, it launches attention_decode with `few_rows`, too. attention_decode_f32: in fp32, by
// the ordinary cores. (All on sm_90a.)
std::int64_t decode_items(const AttentionParams& params);           // splits of sequences as long as can be
std::size_t decode_workspace(const AttentionParams& params);        // bytes, at a multiple of 16
bool decode_writes_output_directly(const AttentionParams& params);  // whether the kernels need no workspace
bool quantized_groups_fit(const AttentionParams& params);
cudaError_t launch_attention_decode(const AttentionParams& params, const DecodeConfig& config, std::byte* workspace,
                                    cudaStream_t stream);
cudaError_t launch_attention_decode_m64(const AttentionParams& params, const PrefillConfig& config,
                                        const DecodeConfig& few_rows, std::byte* workspace, cudaStream_t stream);
cudaError_t launch_attention_decode_f32(const AttentionParams& params, std::byte* workspace, cudaStream_t stream);

// attention_latent: heads of up to 576 columns whose values may be columns of their keys, as in latent attention, in
// 16-bit types; rows as many as there are.
inline constexpr std::int64_t kLatentRows = 64, kLatentKeys = 64;
inline constexpr std::int64_t kLatentMaxHeadDim = 576, kLatentMaxValueHeadDim = 512;
std::int64_t latent_items(const AttentionParams& params);     // thread blocks
std::size_t latent_workspace(const AttentionParams& params);  // bytes, at a multiple of 16
cudaError_t launch_attention_latent(const AttentionParams& params, std::byte* workspace, cudaStream_t stream);

// attention_naive: scores, softmax and values one after another, with the S x S matrix in `workspace`, behind
// what finishes each row.
std::int64_t naive_rows(const AttentionParams& params);
std::size_t naive_workspace(const AttentionParams& params);
cudaError_t launch_attention_naive(const AttentionParams& params, float* workspace, cudaStream_t stream);

// attention_backward: q, k, v and dout of one 16-bit type on Hopper's tensor cores (sm_90a), of dense and ragged
// sequences, and no gradients of biases and slopes. attention_backward_naive: everything but gathered keys, pair by
// pair, in sums of fp64; what has no finite gradients in tiles is computed by it again.
inline constexpr std::int64_t kBackwardMaxHeadDim = 128;
inline constexpr KernelFacts kAttentionBackwardNaiveFacts = {.operation = Operation::attention_backward,
                                                             .phase = Phase::naive,
                                                             .arithmetic = "f32",
                                                             .dtypes = kFloatTypes,
                                                             .dropout = true,
                                                             // Sums of fp64 fit every GPU's shared memory.
                                                             .max_head_dim = 2048,
                                                             .max_value_head_dim = 2048};
std::size_t attention_backward_workspace(const AttentionParams& params);  // bytes, at a multiple of 8, without dS
std::int64_t attention_backward_items(const AttentionParams& params);     // tiles of 64 rows or keys
// `sharers`: thread blocks that divide the rows among them. `workspace` begins with kept.bytes().
cudaError_t launch_attention_backward(const AttentionBackwardParams& params, const DsSlots& kept, int sharers,
                                      std::byte* workspace, cudaStream_t stream);
cudaError_t launch_attention_backward_naive(const AttentionBackwardParams& params, std::byte* workspace,
                                            cudaStream_t stream);

inline constexpr KernelFacts kAppendKvFacts = {
    .operation = Operation::append_kv, .phase = Phase::all, .arithmetic = "f64", .dtypes = kCacheTypes};
cudaError_t launch_append_kv(const AppendKvParams& params, cudaStream_t stream);

inline constexpr KernelFacts kRotaryAppendKvFacts = {
    .operation = Operation::rotary_append_kv, .phase = Phase::all, .arithmetic = "f32", .dtypes = kCacheTypes};
cudaError_t launch_rotary_append_kv(const RotaryAppendKvParams& params, cudaStream_t stream);

// delta_rule: token by token, all that the operation takes. delta_rule_prefill: 16 tokens at a time by products on
// tensor cores, of q, k and v in bf16 and one query head of each state. delta_rule_decode: one token of each sequence,
// of states that can_copy_states() takes; the same bits. (On sm_90a.)
inline constexpr KernelFacts kDeltaRuleFacts = {.operation = Operation::delta_rule,
                                                .phase = Phase::all,
                                                .arithmetic = "f32",
                                                .dtypes = kFloatTypes,
                                                .max_head_dim = 256,
                                                .max_value_head_dim = 256};
inline constexpr KernelFacts kDeltaRuleDecodeFacts = {.operation = Operation::delta_rule,
                                                      .phase = Phase::decode,
                                                      .arithmetic = "f32",
                                                      .dtypes = kFloatTypes,
                                                      .max_head_dim = 128,
                                                      .max_value_head_dim = 128};
inline constexpr KernelFacts kDeltaRulePrefillFacts = {.operation = Operation::delta_rule,
                                                       .phase = Phase::prefill,
                                                       .arithmetic = "bf16",
                                                       .dtypes = set_of(DType::bf16),
                                                       .max_head_dim = 128,
                                                       .max_value_head_dim = 128};
cudaError_t launch_delta_rule(const DeltaRuleParams& params, cudaStream_t stream);
std::size_t delta_rule_prefill_workspace(std::int64_t states, std::int64_t d, std::int64_t dv);  // bytes
cudaError_t launch_delta_rule_prefill(const DeltaRuleParams& params, std::byte* workspace, cudaStream_t stream);
cudaError_t launch_delta_rule_decode(const DeltaRuleParams& params, cudaStream_t stream);

// A few states are parameters of the kernel, more are written to the workspace by launches before it.
inline constexpr KernelFacts kMergeStatesFacts = {
    .operation = Operation::merge_states, .phase = Phase::all, .arithmetic = "f32", .dtypes = kFloatTypes};
std::size_t merge_states_workspace(std::int64_t count);  // bytes, at a multiple of 8
cudaError_t launch_merge_states(const MergeStatesParams& params, std::byte* workspace, cudaStream_t stream);

}  // namespace rapt::cuda
