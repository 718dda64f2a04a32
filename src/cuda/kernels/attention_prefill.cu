// attention_prefill: attention of 16-bit types over keys of the same type or quantized keys, on Hopper's tensor cores.
//
// The entries attention_prefill.bf16 and attention_prefill.f16 call it with the kernel that
// operations/attention/cuda_choice.cpp chose. A call does 2 b hq sq sk (d + dv) flops, half of that if causal. It reads
// q and writes out once, and reads K and V once from memory and once from L2 for each tile of query rows.
#include <cuda_runtime.h>

#include <array>

#include "cuda/kernels/prefill_kernel.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

// Every kernel that operations/attention/cuda_choice.cpp may choose for an element type and scores without modifiers.
constexpr auto kernels_of(DType element) {
  std::array<PrefillConfig, 30> kernels{};
  std::size_t count = 0;
  const auto add = [&](PrefillConfig config) { config.element = element, kernels[count++] = config; };
  for (const int size : {64, 128, 192, 256}) {
    const int block_k = size > 128 ? 64 : 128;
    for (const bool quantized : {false, true})
      add({.head_dim = size, .columns = size, .block_k = block_k, .quantized = quantized});
  }
  for (const int columns : {48, 64}) {
    add({.head_dim = 64, .columns = columns, .tma = true});
    for (const int block_k : {80, 128})
      add({.head_dim = 64,
           .columns = columns,
           .block_k = block_k,
           .tma = true,
           .dense = true,
           .warp_specialized = false});
    for (const bool dense : {false, true})
      add({.head_dim = 64, .columns = columns, .math_warpgroups = 3, .tma = true, .dense = dense});
  }
  for (const bool dense : {false, true}) {
    for (const int groups : {1, 3})
      add({.head_dim = 96, .columns = 80, .block_k = 96, .math_warpgroups = groups, .tma = true, .dense = dense});
    for (const int columns : {80, 96}) add({.head_dim = 96, .columns = columns, .tma = true, .dense = dense});
    add({.head_dim = 128, .columns = 128, .tma = true, .dense = dense});
  }
  for (const int size : {192, 256}) add({.head_dim = size, .columns = size, .block_k = 64, .tma = true});
  return kernels;
}
constexpr auto kBf16Kernels = kernels_of(DType::bf16), kF16Kernels = kernels_of(DType::f16);

// Whether rows of codes are whole times 16 bytes, and 32 bits count these.
bool codes_come_in_sixteens(const AttentionParams& p, const void* data, const Strides& s, std::int64_t size) {
  const std::int64_t entries = p.page_size > 0 && !p.ring ? p.page_count : p.b;
  const std::int64_t rows = p.page_size > 0 ? p.page_size : std::max(p.sk, p.total_k);
  return is_vector(data, s, 1) && (p.kv_type == DType::i4x2 ? size / 2 : size) % 16 == 0 &&
         entries * s.b + p.hk * s.h + rows * s.s < std::int64_t{15} << 32;
}

void describe_codes(PrefillParams& params) {
  const AttentionParams& p = params.p;
  params.kv_vector =
      codes_come_in_sixteens(p, p.k, p.k_stride, p.d) && codes_come_in_sixteens(p, p.v, p.v_stride, p.dv);
  params.code_offset = p.kv_type == DType::i8 ? Codes<DType::i8>::kOffset : Codes<DType::i4x2>::kOffset;
}

}  // namespace

bool prefill_can_count(const AttentionParams& p) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;  // of what is counted in 32 bits
  return std::max(p.sk, p.total_k) < kLimit && std::max(p.sq, p.total_q) < kLimit / at_least_1(p.group) &&
         simt_tiles(p) < kLimit && p.b < kLimit && p.hk < kLimit;
}

// Of a ragged call, sequences with few rows are left out: a launch of attention_decode does those.
cudaError_t launch_attention_prefill(const AttentionParams& p, const PrefillConfig& config, cudaStream_t stream) {
  PrefillParams params = params_of(p);
  if (config.quantized) describe_codes(params);
  if (config.modified) return launch_prefill_modified(params, config, stream);
  if (config.element == DType::f16)
    return launch_one_of<kF16Kernels>(config, [&](auto i) { return launch_prefill<kF16Kernels[i]>(params, stream); });
  return launch_one_of<kBf16Kernels>(config, [&](auto i) { return launch_prefill<kBf16Kernels[i]>(params, stream); });
}

}  // namespace rapt::cuda
