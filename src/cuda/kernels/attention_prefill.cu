// attention_prefill: which tiles and blocks of keys a call gets, of 16-bit types and of quantised keys and values.
#include <cuda_runtime.h>

#include "cuda/kernels/prefill_kernel.cuh"

namespace rapt::cuda {
namespace {

// What follows chooses tiles and blocks of keys. No bit depends on the number of warpgroups but through values that are
// not finite and hidden, which count for a tile: so it may depend on the sequences' sizes alone, or where no key is
// hidden on the batch. Bits do depend on the blocks of keys, but for sequences of one block: these depend on the head
// size, the mask's right end and whether scores have modifiers alone, for rows to have the same bits in every layout.

// Whether tiles of 64 rows are better than of 192, in heads of 65 to 80 columns: where the last of three warpgroups
// would have little to do, or tiles share no keys.
bool prefers_short_tiles(const AttentionParams& p, int keys_of_block) {
  return are_alike(p) && (p.sq * p.group <= 5 * kGroupRows || p.sk <= keys_of_block);
}

// Rows that the busiest multiprocessor does of dense sequences.
template <class C>
std::int64_t busiest_rows(const AttentionParams& p) {
  return ceil_div(C::Tiles::heads(p) * C::Tiles::tiles(p), std::int64_t{multiprocessors()}) * C::kRows;
}

// Whether heads of up to 64 columns are better by `Serial`, attention_prefill_unspecialized, than by `Overlapped`. The
// longer keys are, the more exponentials beside products count for, and the less what comes before and after them; but
// tiles of 128 rows are better where those of 192 leave much of the last one empty, or multiprocessors without one.
// (Where the mask ends before the last key, half of the keys are not seen.)
template <class Serial, class Overlapped>
bool prefers_unspecialized(const AttentionParams& p) {
  constexpr std::int64_t kMiddling = 512, kLong = 2048, kLongCausal = 8192, kFewTileRows = 1024;
  if (p.score.right != kOpen) return p.sk <= kLongCausal || p.sq * p.group <= kFewTileRows;
  if (p.sk > kLong) return p.sq * p.group <= kFewTileRows;
  // By the batch only where no row has a hidden key.
  if (p.sk <= kMiddling || p.score.left != kOpen) return true;
  // A row takes `Serial` about a tenth longer.
  return 8 * busiest_rows<Overlapped>(p) >= 9 * busiest_rows<Serial>(p);
}

template <class T, int kColumns, class Other>
cudaError_t launch_up_to_64(PrefillParams& params, cudaStream_t stream) {
  constexpr int kFewKeys = 80;  // as many as a caption has in image models, and some
  using Overlapped = Config<T, 64, true, false, false, 3, kColumns>;
  const AttentionParams& p = params.p;
  if (!are_alike(p) || !prefers_unspecialized<UnspecializedConfig<T, kColumns, 128>, Overlapped>(p))
    return launch_plain<Overlapped, Other>(params, stream);
  cudaError_t status;
  if (p.sk > 64 && p.sk <= kFewKeys ? launch_dense<UnspecializedConfig<T, kColumns, kFewKeys>>(params, stream, status)
                                    : launch_dense<UnspecializedConfig<T, kColumns, 128>>(params, stream, status))
    return status;
  return launch_queued<Config<T, 64, true, false, false, 2, kColumns>, Other>(params, stream);
}

template <class T, class Other>
cudaError_t launch_up_to_128(PrefillParams& params, cudaStream_t stream) {
  const AttentionParams& p = params.p;
  const std::int64_t columns = std::max(p.d, p.dv);
  if (columns <= 80 && p.score.right == kOpen) {
    using Threads = Config<T, 128, false, false, false, 2, 128, 96>;
    return prefers_short_tiles(p, 96)
               ? launch_plain<Config<T, 96, true, false, false, 1, 80, 96>, Threads>(params, stream)
               : launch_plain<Config<T, 96, true, false, false, 3, 80, 96>, Threads>(params, stream);
  }
  // Half a panel's row at a time is only faster where rows are whole sectors of L2.
  if (columns <= 96 && p.d % 16 == 0 && p.dv % 16 == 0)
    return columns <= 80 ? launch_plain<Config<T, 96, true, false, false, 2, 80>, Other>(params, stream)
                         : launch_plain<Config<T, 96, true, false, false, 2, 96>, Other>(params, stream);
  return launch_plain<Config<T, 128, true, false, false, 2>, Other>(params, stream);
}

template <class T, int kSize>
cudaError_t launch_size(PrefillParams& params, cudaStream_t stream) {
  constexpr int kKeys = kSize > 128 ? 64 : 128;
  const bool modified = is_modified(params.p);
  if (is_quantised(params.p))
    return modified ? launch<Config<T, kSize, false, true, false, 2, kSize, kKeys, true>>(params, stream)
                    : launch<Config<T, kSize, false, false, false, 2, kSize, kKeys, true>>(params, stream);
  if (modified) return launch<Config<T, kSize, false, true, false, 2>>(params, stream);
  using Other = Config<T, kSize, false, false, false, 2>;
  if constexpr (kSize == 64)
    return std::max(params.p.d, params.p.dv) <= 48 ? launch_up_to_64<T, 48, Other>(params, stream)
                                                   : launch_up_to_64<T, 64, Other>(params, stream);
  else if constexpr (kSize == 128) return launch_up_to_128<T, Other>(params, stream);
  else return launch_queued<Config<T, kSize, true, false, false, 2>, Other>(params, stream);
}

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

std::size_t prefill_workspace(const AttentionParams& p) {
  return p.total_q < 0 ? 0 : decode_workspace(p);
}

// Of ragged sequences, those that have few rows get their keys split, as they do where they are dense; two launches,
// each of which leaves out what the other does, side by side (quantised: one after the other).
cudaError_t launch_attention_prefill(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  PrefillParams params = params_of(p);
  if (is_quantised(p)) describe_codes(params);
  const cudaError_t status = with_head_size(p, [&](auto size) {
    return p.q_type == DType::f16 ? launch_size<__half, size>(params, stream)
                                  : launch_size<__nv_bfloat16, size>(params, stream);
  });
  if (status != cudaSuccess || p.total_q < 0) return status;
  return (is_quantised(p) ? launch_attention_decode : launch_attention_decode_m64)(p, workspace, stream);
}

}  // namespace rapt::cuda
